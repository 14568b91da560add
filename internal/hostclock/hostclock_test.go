package hostclock

import (
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/store"
)

const day = 24 * time.Hour

// machine is a host with a clock that can be set and a time since its boot
// that cannot.
type machine struct {
	t    *testing.T
	st   *store.Store
	w    *Watch
	wall time.Time
	up   time.Duration
	boot string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{t: t, wall: time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC), up: time.Hour, boot: "first"}
	st, err := store.Open(t.Context(), filepath.Join(t.TempDir(), "agentlab.db"), store.Options{Clock: func() time.Time { return m.wall }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	m.st = st
	m.daemon()
	return m
}

// daemon starts a daemon's watch; the one before it was killed.
func (m *machine) daemon() {
	m.t.Helper()
	m.w = New(func() time.Time { return m.wall }, slog.New(slog.DiscardHandler))
	m.w.uptime, m.w.bootID = func() time.Duration { return m.up }, m.boot
	if err := m.w.Load(m.t.Context(), m.st); err != nil {
		m.t.Fatal(err)
	}
}

// pass lets time pass while the watch looks now and then.
func (m *machine) pass(d time.Duration) {
	m.t.Helper()
	for left := d; left > 0; left -= time.Hour {
		step := min(left, time.Hour)
		m.wall, m.up = m.wall.Add(step), m.up+step
		m.look()
	}
}

func (m *machine) look() {
	m.t.Helper()
	if err := m.w.step(m.t.Context(), false); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) held() bool { return m.w.Hold(m.w.Now()) != nil }

// lease makes a sandbox with a lease of d and returns how much is left of it.
func (m *machine) lease(d time.Duration) (left func() time.Duration) {
	m.t.Helper()
	sb, err := m.st.AllocateSandbox(m.t.Context(), agentlab.Sandbox{
		UID: agentlab.NewUID(), Name: "leased", Backend: "fake", Profile: "p", Image: "base",
		State: agentlab.SandboxReady, Desired: agentlab.DesiredRunning,
		Resources: agentlab.Resources{Cores: 1, MemoryMB: 512}, Network: agentlab.Network{Mode: agentlab.NetworkNAT},
		LeaseExpiresAt: m.wall.Add(d),
	}, agentlab.Allocation{First: 1000, Last: 2000})
	if err != nil {
		m.t.Fatal(err)
	}
	return func() time.Duration {
		m.t.Helper()
		now, err := m.st.Sandbox(m.t.Context(), sb.VMID)
		if err != nil {
			m.t.Fatal(err)
		}
		return now.LeaseExpiresAt.Sub(m.w.Now())
	}
}

func (m *machine) want(what string, held bool, left, wantLeft time.Duration) {
	m.t.Helper()
	if m.held() != held || left != wantLeft {
		m.t.Errorf("%s: retention is held: %v, want %v; left of the lease: %s, want %s", what, m.held(), held, left, wantLeft)
	}
}

func TestClockJumpsForward(t *testing.T) {
	m := newMachine(t)
	left := m.lease(10 * day)
	m.pass(2 * day)
	m.want("no jump", false, left(), 8*day)
	m.wall = m.wall.Add(31 * day)
	m.want("before the watch looks", true, left(), 8*day)
	m.look()
	m.want("after it looked", true, left(), 8*day)
	m.pass(23 * time.Hour)
	m.want("23 hours later", true, left(), 7*day+time.Hour)
	m.pass(time.Hour)
	m.want("24 hours later", false, left(), 7*day)
}

func TestClockJumpsBack(t *testing.T) {
	m := newMachine(t)
	left := m.lease(10 * day)
	m.wall = m.wall.Add(-400 * day)
	m.want("before the watch looks", false, left(), 10*day)
	m.look()
	m.want("after it looked", false, left(), 10*day)
	m.pass(time.Hour)
	m.wall = m.wall.Add(400 * day)
	m.look()
	m.want("set right again", false, left(), 10*day-time.Hour)
}

// A jump that was corrected no longer delays anything.
func TestClockIsCorrected(t *testing.T) {
	m := newMachine(t)
	left := m.lease(10 * day)
	m.wall = m.wall.Add(31 * day)
	m.pass(time.Hour)
	m.want("after the jump", true, left(), 10*day-time.Hour)
	m.wall = m.wall.Add(-31 * day)
	m.look()
	m.want("after it was undone", false, left(), 10*day-time.Hour)
}

func TestClockIsConfirmed(t *testing.T) {
	m := newMachine(t)
	left := m.lease(10 * day)
	m.wall = m.wall.Add(31 * day)
	c, err := m.w.Confirm(t.Context())
	if err != nil || !c.Suspended || !c.Now.Equal(m.wall) {
		t.Errorf("%+v, %v", c, err)
	}
	m.want("after it was confirmed", false, left(), 10*day)
	m.daemon()
	m.want("after a restart", false, left(), 10*day)
	if c, err := m.w.Confirm(t.Context()); err != nil || c.Suspended {
		t.Errorf("again: %+v, %v", c, err)
	}
}

func TestClockBetweenTwoDaemons(t *testing.T) {
	t.Run("a jump", func(t *testing.T) {
		m := newMachine(t)
		left := m.lease(10 * day)
		m.wall, m.up = m.wall.Add(32*day), m.up+day
		m.daemon()
		m.want("started", true, left(), 9*day)
		m.pass(12 * time.Hour)
		m.daemon() // the time that was waited is not lost
		m.pass(12 * time.Hour)
		m.want("24 hours of a running host later", false, left(), 8*day)
	})
	t.Run("no daemon for long", func(t *testing.T) {
		m := newMachine(t)
		left := m.lease(40 * day)
		m.wall, m.up = m.wall.Add(31*day), m.up+31*day
		m.daemon()
		m.want("started", false, left(), 9*day)
	})
	t.Run("the host was off for a month", func(t *testing.T) {
		m := newMachine(t)
		left := m.lease(10 * day)
		m.wall, m.up, m.boot = m.wall.Add(31*day), time.Minute, "second"
		m.daemon()
		m.want("started", true, left(), 10*day)
	})
	t.Run("the host was off for a night", func(t *testing.T) {
		m := newMachine(t)
		left := m.lease(10 * day)
		m.wall, m.up, m.boot = m.wall.Add(12*time.Hour), time.Minute, "second"
		m.daemon()
		m.want("started", false, left(), 10*day-12*time.Hour)
	})
	t.Run("a host without a clock of its own", func(t *testing.T) {
		m := newMachine(t)
		left := m.lease(10 * day)
		right := m.wall.Add(time.Hour)
		m.wall, m.up, m.boot = time.Date(1970, 1, 1, 0, 0, 0, 0, time.UTC), time.Minute, "second"
		m.daemon()
		m.want("started", false, left(), 10*day)
		m.wall = right // set over the network
		m.look()
		m.want("set right", false, left(), 10*day)
	})
}
