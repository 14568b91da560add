// Package hostclock watches the clock of the host, so that a jump of the clock
// ends no lease and deletes no data.
package hostclock

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/hostos"
	"github.com/agentlab-vm/agentlab/internal/store"
)

const (
	jumpLimit   = 24 * time.Hour // a larger difference is a jump; a smaller one means that the clock was set
	acceptAfter = 24 * time.Hour // of a running host, after which a jump is accepted
	sampleEvery = 10 * time.Second
	saveEvery   = 5 * time.Minute // between two writes to the database
)

// Watch compares the clock of the host with the time since its boot, which
// cannot be set and which also runs while the host is suspended. A difference
// of more than jumpLimit is a jump:
//
//   - The ends of leases, jobs and their tokens move by the jump, so the time
//     that is left does not change. Until the database has the new ends, Now
//     returns the time as it was before the jump.
//   - After a jump forward no data is deleted because of its age until the
//     clock is confirmed, it goes back, or acceptAfter has passed.
//
// The last sample is stored in the database, to find a jump between two
// daemons. After a reboot only the clock itself shows how long the host was
// off: more than jumpLimit counts as a jump.
type Watch struct {
	raw    func() time.Time
	uptime func() time.Duration // since the boot
	bootID string
	log    *slog.Logger
	store  *store.Store // nil before Load
	check  chan struct{}

	stepping sync.Mutex // held while a sample is written

	mu    sync.Mutex
	ref   state // the reference for the clock
	trust state // the reference for retention: Trusted at SinceBoot
	saved time.Duration
}

// state is stored in the database.
type state struct {
	Boot      string        `json:"boot"`
	SinceBoot time.Duration `json:"since_boot_ns"`
	Wall      time.Time     `json:"wall"`    // the clock at SinceBoot
	Trusted   time.Time     `json:"trusted"` // the time at SinceBoot that retention uses
	Waited    time.Duration `json:"waited_ns,omitempty"`
}

// New returns a Watch of a clock; Load must follow.
func New(raw func() time.Time, log *slog.Logger) *Watch {
	// The ID "" means that every start counts as after a reboot.
	return &Watch{raw: raw, uptime: hostos.SinceBoot, bootID: hostos.BootID(), log: log, check: make(chan struct{}, 1)}
}

// Now returns the time of the host's clock. After a jump that is not in the
// database yet it returns the time without the jump. It does not block.
func (w *Watch) Now() time.Time {
	raw := w.raw()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.store == nil {
		return raw
	}
	want := w.ref.Wall.Add(w.uptime() - w.ref.SinceBoot)
	if !jumped(raw.Sub(want)) {
		return raw
	}
	select {
	case w.check <- struct{}{}:
	default:
	}
	return want.In(raw.Location())
}

func jumped(d time.Duration) bool { return d > jumpLimit || d < -jumpLimit }

// sample reads the clock.
func (w *Watch) sample() state {
	return state{Boot: w.bootID, SinceBoot: w.uptime(), Wall: w.raw().Round(0).UTC()}
}

// Load compares the clock with the last sample of the daemon before. It must
// come before any check of a lease.
func (w *Watch) Load(ctx context.Context, st *store.Store) error {
	text, err := st.Fact(ctx, store.FactClock)
	if err != nil {
		return err
	}
	now := w.sample()
	last := now
	last.Trusted = now.Wall
	if text != "" {
		if err := json.Unmarshal([]byte(text), &last); err != nil {
			return agentlab.Errorf(agentlab.CodeInternal, "the last sample of the clock in the database cannot be decoded: %w", err)
		}
	}
	if last.Boot != now.Boot || now.SinceBoot < last.SinceBoot || last.Boot == "" {
		off := now.Wall.Sub(last.Wall)
		if off < 0 || jumped(off) {
			off = 0
		}
		last.Boot, last.SinceBoot = now.Boot, now.SinceBoot-off
	}
	w.mu.Lock()
	w.store, w.ref, w.trust, w.saved = st, last, last, last.SinceBoot
	w.mu.Unlock()
	return w.step(ctx, text == "")
}

// Run samples the clock until ctx ends.
func (w *Watch) Run(ctx context.Context) error {
	t := time.NewTicker(sampleEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-w.check:
		case <-ctx.Done():
			return nil
		}
		if err := w.step(ctx, false); err != nil && ctx.Err() == nil {
			w.log.Error("the sample of the clock was not written", "err", err)
		}
	}
}

// step samples the clock once, and moves the ends of leases and jobs after a
// jump.
func (w *Watch) step(ctx context.Context, save bool) error {
	w.stepping.Lock()
	defer w.stepping.Unlock()
	w.mu.Lock()
	now := w.sample()
	now.Trusted, now.Waited = w.trust.trustedTime(now)
	jump := now.Wall.Sub(w.ref.Wall.Add(now.SinceBoot - w.ref.SinceBoot))
	old := w.ref
	save = save || now.SinceBoot-w.saved >= saveEvery
	if jump < -jumpLimit {
		w.ref = now // first for a jump back, last for a jump forward, so that no end is in the past in between
	}
	w.mu.Unlock()
	text, err := json.Marshal(now)
	switch {
	case err != nil:
	case jumped(jump):
		w.log.Warn("the clock of the host jumped", "by", jump, "to", now.Wall)
		err = w.store.ClockJumped(ctx, jump, string(text), agentlab.NewEvent(agentlab.EventClock, nil, "the clock of the host jumped by %s to %s; leases and jobs have as much time left as before",
			jump.Round(time.Second), now.Wall.Format(time.RFC3339)))
	case save:
		err = w.store.SetFact(ctx, store.FactClock, string(text))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.ref = old
		return err
	}
	if jumped(jump) || save {
		w.saved = now.SinceBoot
	}
	if jumped(jump) {
		w.ref = now
	}
	w.trust = now
	return nil
}

// trustedTime returns the time that retention uses: the clock in now, unless it
// differs too much from the time expected from s. A jump is accepted after
// acceptAfter.
func (s state) trustedTime(now state) (trusted time.Time, waited time.Duration) {
	elapsed := now.SinceBoot - s.SinceBoot
	trusted = s.Trusted.Add(elapsed)
	d := now.Wall.Sub(trusted)
	waited = s.Waited
	if jumped(s.Wall.Sub(s.Trusted)) { // otherwise the time of the jump is not known
		waited += elapsed
	}
	switch {
	case !jumped(d):
		if d > 0 {
			trusted = now.Wall
		}
		return trusted, 0
	case waited >= acceptAfter:
		return now.Wall, 0
	}
	return trusted, waited
}

// aheadBy returns how far a wall clock time is ahead of the time that retention
// uses, 0 if within the limit, and how long it takes until retention accepts it.
func (w *Watch) aheadBy(wall time.Time) (by, left time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen := w.sample()
	seen.Wall = wall
	trusted, waited := w.trust.trustedTime(seen)
	if by = wall.Sub(trusted); by <= jumpLimit {
		return 0, 0
	}
	return by, acceptAfter - waited
}

// Hold returns an error while no data may be deleted because of its age.
func (w *Watch) Hold(now time.Time) error {
	by, left := w.aheadBy(now)
	if raw, _ := w.aheadBy(w.raw()); by == 0 && raw > 0 {
		by = raw // the jump is not stored in the database yet
	}
	if by == 0 {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeConflict, "retention is suspended: the clock of the host is %s ahead of the expected time", days(by)).
		WithHint("if the clock is correct, run agentlab daemon confirm-clock; otherwise it is accepted in %s", left.Round(time.Minute))
}

func days(d time.Duration) string { return fmt.Sprintf("%.1f days", d.Hours()/24) }

// Findings reports whether the clock runs as expected.
func (w *Watch) Findings() []backend.Finding {
	f := backend.Finding{Name: "clock", Level: backend.LevelOK, Detail: "the clock of the host runs as expected"}
	if err := w.Hold(w.raw()); err != nil {
		f.Level, f.Detail = backend.LevelWarn, err.Error()
		f.Remedy = agentlab.HintOf(err)
	}
	return []backend.Finding{f}
}

// Confirm makes retention use the current time of the clock.
func (w *Watch) Confirm(ctx context.Context) (api.Clock, error) {
	if err := w.step(ctx, false); err != nil { // handles a new jump first
		return api.Clock{}, err
	}
	w.stepping.Lock()
	defer w.stepping.Unlock()
	by, _ := w.aheadBy(w.raw())
	now := w.sample()
	now.Trusted = now.Wall
	text, err := json.Marshal(now)
	if err == nil {
		err = w.store.ClockJumped(ctx, 0, string(text), agentlab.NewEvent(agentlab.EventClock, nil, "the clock of the host was confirmed at %s", now.Wall.Format(time.RFC3339)))
	}
	if err != nil {
		return api.Clock{}, err
	}
	w.mu.Lock()
	w.trust = now
	w.mu.Unlock()
	return api.Clock{Now: now.Wall, Suspended: by > 0}, nil
}
