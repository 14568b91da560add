package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
)

const spaceEvery = 15 * time.Second

// watchSpace writes events when the host's disk becomes too full to start a
// VM, when its reserve is released, and when there is enough space again. It
// also restores the reserve.
func (s *services) watchSpace(ctx context.Context) error {
	t := time.NewTicker(spaceEvery)
	defer t.Stop()
	full := false
	for {
		s.makeReserve()
		if err := s.space.Start(); (err != nil) != full {
			full = err != nil
			s.tellSpace(ctx, err)
		}
		select {
		case <-t.C:
		case <-s.released:
			s.emitSpace(ctx, reserveReleased, map[string]any{"full": true, "reserve": false})
		case <-ctx.Done():
			return nil
		}
	}
}

const reserveReleased = "the disk is full: a part of the reserve was released so that jobs and sandboxes can be ended"

// releaseReserve frees disk space for the database. It is called during a
// write to the database, so watchSpace writes the event.
func (s *services) releaseReserve() bool {
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

// noRoomToStart adds a hint on how to free disk space to the error of a
// database that has none, although the reserve was released.
func (s *services) noRoomToStart(err error) error {
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok || e.Code != agentlab.CodeNoSpace {
		return err
	}
	return e.WithHint("free %d MiB on the disk of %s, then start again and destroy sandboxes; images in %s are built again when they are needed",
		hostspace.ReserveBytes>>20, s.cfg.Paths.State, s.cfg.Paths.Images())
}

func (s *services) makeReserve() {
	if err := s.reserve.Make(); err != nil {
		s.log.Warn("the reserve of disk space cannot be made", "err", err)
	}
}

func (s *services) tellSpace(ctx context.Context, err error) {
	if err == nil {
		s.emitSpace(ctx, "there is enough free disk space again", map[string]any{"full": false})
		return
	}
	s.log.Warn("the disk is nearly full", "err", err)
	s.emitSpace(ctx, agentlab.Reason(err.Error()), map[string]any{"full": true})
}

func (s *services) emitSpace(ctx context.Context, message string, data map[string]any) {
	e := agentlab.NewEvent(agentlab.EventSpace, data, "%s", message)
	if err := s.store.AppendEvents(ctx, e); err != nil && ctx.Err() == nil {
		s.log.Error("an event was not written", "kind", e.Kind, "err", err)
	}
}

// spaceFindings reports the disk space for sandboxes, a missing reserve, and
// paused guests.
func (s *services) spaceFindings() []backend.Finding {
	out := []backend.Finding{{Name: "disk space", Level: backend.LevelOK, Detail: "there is room for sandboxes"}}
	if err := s.space.Start(); err != nil {
		out[0] = backend.Finding{Name: "disk space", Level: backend.LevelError, Detail: err.Error(), Remedy: agentlab.HintOf(err)}
	}
	if !s.reserve.Held() {
		const mib = 1 << 20
		out = append(out, backend.Finding{
			Name: "disk reserve", Level: backend.LevelWarn,
			Detail: fmt.Sprintf("the disk of %s is full, or was: of the reserve of %d MiB that the database needs then, a part at least is used up", s.cfg.Paths.State, hostspace.ReserveBytes/mib),
			Remedy: fmt.Sprintf("destroy sandboxes (agentlab sandbox list) or free disk space; the reserve is made again when %d MiB are free", (hostspace.ReserveBytes+hostspace.PauseLeast)/mib),
		})
	}
	if paused := s.sandboxes.Paused(); len(paused) > 0 {
		first := slices.Min(slices.Collect(maps.Keys(paused)))
		out = append(out, backend.Finding{
			Name: "paused guests", Level: backend.LevelWarn,
			Detail: fmt.Sprintf("%d guests are paused, sandbox %d among them: %s", len(paused), first, paused[first]),
			Remedy: "destroy sandboxes that are not needed, or free disk space; the guests go on by themselves",
		})
	}
	return out
}
