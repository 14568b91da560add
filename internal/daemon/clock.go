package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/store"
)

const (
	jumpLimit   = 24 * time.Hour   // a difference of more is a jump; less is taken as the clock being set
	acceptAfter = 24 * time.Hour   // of a running host, after which a jump is taken for right
	clockEvery  = 10 * time.Second // between two looks at the clock
	clockSave   = 5 * time.Minute  // between two notes in the database
)

// clockWatch compares the host's clock with the time since its boot, which
// nobody can set and which goes on while the host sleeps. A difference of more
// than jumpLimit is a jump:
//
//   - The ends of leases, of jobs and of their tokens move with it, so that
//     what is under way has as much time left as before. Until that is in the
//     database, now returns the time as it was before the jump.
//   - After a jump forward nothing is deleted for its age until somebody
//     confirms the clock, it goes back, or acceptAfter has passed.
//
// What was last seen is kept in the database, so that a jump between two
// daemons is found, too. After a reboot nothing but the clock itself says how
// long the host was off: more than jumpLimit counts as a jump.
type clockWatch struct {
	raw    func() time.Time
	uptime func() time.Duration // since the boot
	bootID string
	log    *slog.Logger
	store  *store.Store // nil before load
	look   chan struct{}

	stepping sync.Mutex // held while what was seen is written

	mu    sync.Mutex
	ref   clockState // what the clock is compared with
	trust clockState // what retention is compared with: Trusted as of SinceBoot
	saved time.Duration
}

// clockState is what is kept in the database.
type clockState struct {
	Boot      string        `json:"boot"`
	SinceBoot time.Duration `json:"since_boot_ns"`
	Wall      time.Time     `json:"wall"`    // the clock at SinceBoot
	Trusted   time.Time     `json:"trusted"` // the time at SinceBoot as far as retention relies on it
	Waited    time.Duration `json:"waited_ns,omitempty"`
}

func newClockWatch(raw func() time.Time, log *slog.Logger) *clockWatch {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // "" means that every start is after a reboot
	return &clockWatch{
		raw: raw, uptime: sinceBoot, bootID: strings.TrimSpace(string(id)), log: log, look: make(chan struct{}, 1),
	}
}

func sinceBoot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// now returns the time of the host's clock, or after a jump that the database
// does not know yet the time without it. It does not wait.
func (w *clockWatch) now() time.Time {
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
	case w.look <- struct{}{}:
	default:
	}
	return want.In(raw.Location())
}

func jumped(d time.Duration) bool { return d > jumpLimit || d < -jumpLimit }

// seen is the clock as it is now.
func (w *clockWatch) seen() clockState {
	return clockState{Boot: w.bootID, SinceBoot: w.uptime(), Wall: w.raw().Round(0).UTC()}
}

// load compares the clock with what the last daemon saw of it. It must come
// before anything that judges a lease.
func (w *clockWatch) load(ctx context.Context, st *store.Store) error {
	text, err := st.Fact(ctx, store.FactClock)
	if err != nil {
		return err
	}
	now := w.seen()
	last := now
	last.Trusted = now.Wall
	if text != "" {
		if err := json.Unmarshal([]byte(text), &last); err != nil {
			return agentlab.Errorf(agentlab.CodeInternal, "what was last seen of the clock cannot be read: %w", err)
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

// run looks at the clock until ctx ends.
func (w *clockWatch) run(ctx context.Context) error {
	t := time.NewTicker(clockEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-w.look:
		case <-ctx.Done():
			return nil
		}
		if err := w.step(ctx, false); err != nil && ctx.Err() == nil {
			w.log.Error("what was seen of the clock was not written", "err", err)
		}
	}
}

// step looks at the clock once, and follows a jump.
func (w *clockWatch) step(ctx context.Context, save bool) error {
	w.stepping.Lock()
	defer w.stepping.Unlock()
	w.mu.Lock()
	now := w.seen()
	now.Trusted, now.Waited = w.trust.next(now)
	jump := now.Wall.Sub(w.ref.Wall.Add(now.SinceBoot - w.ref.SinceBoot))
	old := w.ref
	save = save || now.SinceBoot-w.saved >= clockSave
	if jump < -jumpLimit {
		w.ref = now // first, and in the other direction afterwards: no end is ever in the past in between
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

// next returns how far retention relies on the clock that is seen now: all the
// way, unless it is too far from the time that s leads to expect, which is
// accepted after acceptAfter.
func (s clockState) next(now clockState) (trusted time.Time, waited time.Duration) {
	elapsed := now.SinceBoot - s.SinceBoot
	trusted = s.Trusted.Add(elapsed)
	d := now.Wall.Sub(trusted)
	waited = s.Waited
	if jumped(s.Wall.Sub(s.Trusted)) { // else nobody knows when since then it jumped
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

// ahead is how far the time now is ahead of what retention relies on, 0 when
// that is not too far, and how long it will be until it is accepted.
func (w *clockWatch) ahead(now time.Time) (by, left time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen := w.seen()
	seen.Wall = now
	trusted, waited := w.trust.next(seen)
	if by = now.Sub(trusted); by <= jumpLimit {
		return 0, 0
	}
	return by, acceptAfter - waited
}

// hold implements gc.Config.Hold.
func (w *clockWatch) hold(now time.Time) error {
	by, left := w.ahead(now)
	if raw, _ := w.ahead(w.raw()); by == 0 && raw > 0 {
		by = raw // the jump is not in the database yet
	}
	if by == 0 {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeConflict, "nothing is deleted for its age: the clock of the host is %s ahead of the time that was expected", days(by)).
		WithHint("if it is right: agentlab daemon confirm-clock; it is taken for right in %s", left.Round(time.Minute))
}

func days(d time.Duration) string { return fmt.Sprintf("%.1f days", d.Hours()/24) }

func (w *clockWatch) finding() backend.Finding {
	f := backend.Finding{Name: "clock", Level: backend.LevelOK, Detail: "the clock of the host runs as expected"}
	if err := w.hold(w.raw()); err != nil {
		f.Level, f.Detail = backend.LevelWarn, err.Error()
		f.Remedy = agentlab.HintOf(err)
	}
	return f
}

// confirm makes retention rely on the clock as it is.
func (w *clockWatch) confirm(ctx context.Context) (api.Clock, error) {
	if err := w.step(ctx, false); err != nil { // a jump just now moves what is under way first
		return api.Clock{}, err
	}
	w.stepping.Lock()
	defer w.stepping.Unlock()
	by, _ := w.ahead(w.raw())
	now := w.seen()
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
