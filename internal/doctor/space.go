package doctor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
)

const spaceEvery = 15 * time.Second

// Space watches the disk of the state directory, and keeps a reserve on it for
// the database.
type Space struct {
	*hostspace.Guard
	dir, images string // state directory and images
	reserve     *hostspace.Reserve
	released    chan struct{} // has a value if the reserve was released
	log         *slog.Logger
}

// EventLog stores events; *store.Store implements it.
type EventLog interface {
	AppendEvents(ctx context.Context, evs ...agentlab.Event) error
}

// NewSpace returns the Space of the state directory. least is the number of
// free bytes below which nothing starts.
func NewSpace(state, images, reserve string, least int64, log *slog.Logger) *Space {
	return &Space{
		Guard: hostspace.New(state, least, nil, nil), dir: state, images: images,
		reserve: hostspace.NewReserve(reserve), released: make(chan struct{}, 1), log: log,
	}
}

// Run writes events when the disk becomes too full to start a VM, when the
// reserve is released, and when there is enough space again. It also restores the
// reserve.
func (s *Space) Run(ctx context.Context, events EventLog) error {
	t := time.NewTicker(spaceEvery)
	defer t.Stop()
	full := false
	for {
		s.MakeReserve()
		if err := s.Start(); (err != nil) != full {
			full = err != nil
			s.report(ctx, events, err)
		}
		select {
		case <-t.C:
		case <-s.released:
			s.emit(ctx, events, reserveReleased, map[string]any{"full": true, "reserve": false})
		case <-ctx.Done():
			return nil
		}
	}
}

const reserveReleased = "the disk is full: part of the reserve was released so that jobs and sandboxes can end"

// Release frees disk space for the database. It is called during a write to the
// database, so Run writes the event.
func (s *Space) Release() bool {
	if !s.reserve.Release() {
		return false
	}
	s.log.Error(reserveReleased)
	select {
	case s.released <- struct{}{}:
	default:
	}
	return true
}

// AddHint adds a hint on how to free disk space to the error of a database that
// has none, although the reserve was released. Other errors are not changed.
func (s *Space) AddHint(err error) error {
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok || e.Code != agentlab.CodeNoSpace {
		return err
	}
	return e.WithHint("free %d MiB on the disk of %s, then start again and destroy sandboxes; images in %s are rebuilt on demand",
		hostspace.ReserveBytes>>20, s.dir, s.images)
}

// MakeReserve makes the reserve if it is missing and there is room.
func (s *Space) MakeReserve() {
	if err := s.reserve.Make(); err != nil {
		s.log.Warn("cannot allocate the reserve of disk space", "err", err)
	}
}

func (s *Space) report(ctx context.Context, events EventLog, err error) {
	if err == nil {
		s.emit(ctx, events, "there is enough free disk space again", map[string]any{"full": false})
		return
	}
	s.log.Warn("the disk is nearly full", "err", err)
	s.emit(ctx, events, agentlab.Reason(err.Error()), map[string]any{"full": true})
}

func (s *Space) emit(ctx context.Context, events EventLog, message string, data map[string]any) {
	e := agentlab.NewEvent(agentlab.EventSpace, data, "%s", message)
	if err := events.AppendEvents(ctx, e); err != nil && ctx.Err() == nil {
		s.log.Error("an event was not written", "kind", e.Kind, "err", err)
	}
}

// Findings reports the disk space for sandboxes, and a missing reserve.
func (s *Space) Findings() []backend.Finding {
	out := []backend.Finding{{Name: "disk space", Level: backend.LevelOK, Detail: "there is enough disk space for sandboxes"}}
	if err := s.Start(); err != nil {
		out[0] = backend.Finding{Name: "disk space", Level: backend.LevelError, Detail: err.Error(), Remedy: agentlab.HintOf(err)}
	}
	if !s.reserve.Held() {
		const mib = 1 << 20
		out = append(out, backend.Finding{
			Name: "disk reserve", Level: backend.LevelWarn,
			Detail: fmt.Sprintf("the disk of %s is or was full: at least part of the database's reserve of %d MiB is used", s.dir, hostspace.ReserveBytes/mib),
			Remedy: fmt.Sprintf("destroy sandboxes (agentlab sandbox list) or free disk space; the reserve is restored when %d MiB are free", (hostspace.ReserveBytes+hostspace.PauseLeast)/mib),
		})
	}
	return out
}
