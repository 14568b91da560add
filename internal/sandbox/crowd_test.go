package sandbox

import (
	"slices"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// crowd returns a service that does not run.
func crowd(t *testing.T) *Service {
	host, err := fake.NewHost(fake.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = host.Close() })
	return New(NewCore(Config{Fleet: fleet.Single(host.Open(), nil)}), Parts{})
}

// With thousands of settled sandboxes, each has a step less often.
func TestIdleStepsAreLimited(t *testing.T) {
	s := crowd(t)
	if got := s.idleLimit(); got != MaxIdle {
		t.Errorf("without sandboxes: %s", got)
	}
	for vmid := range 10000 {
		s.track(agentlab.Sandbox{VMID: vmid, UID: "u", State: agentlab.SandboxReady})
	}
	if got := s.idleLimit(); got != 10000*time.Second/idleStepRate {
		t.Errorf("with 10,000: %s", got)
	}
}

// After a change of the clock the audit finds leases that have ended, and those whose
// warning is due.
func TestLeasesDue(t *testing.T) {
	now := time.Unix(1e9, 0)
	s := crowd(t)
	s.clock = func() time.Time { return now }
	name := s.cfg.Fleet.Default().Name()
	for vmid, left := range map[int]time.Duration{1: time.Hour, 2: 2 * time.Hour, 3: 3 * time.Hour} {
		s.track(agentlab.Sandbox{VMID: vmid, UID: "u", State: agentlab.SandboxReady, Backend: name}).
			seeLease(agentlab.Sandbox{LeaseExpiresAt: now.Add(left)}, now)
	}
	s.track(agentlab.Sandbox{VMID: 4, UID: "u", State: agentlab.SandboxRequested, Backend: name}) // its lease does not count
	if due := s.leasesDue(name); len(due) > 0 {
		t.Errorf("due: %v", due)
	}
	now = now.Add(2*time.Hour - 10*time.Minute)
	due := s.leasesDue(name)
	slices.Sort(due)
	if !slices.Equal(due, []int{1, 2}) {
		t.Errorf("due: %v, want the lease that has ended and the lease that ends soon", due)
	}
	s.withState(2, func(m *runtimeState) { m.warned = leaseWarnings[0] })
	if due := s.leasesDue(name); !slices.Equal(due, []int{1}) {
		t.Errorf("due after the warning: %v", due)
	}
	if due := s.leasesDue("another"); len(due) > 0 {
		t.Errorf("due on another backend: %v", due)
	}
}

// A guest whose sandbox is known to run is reached without a read of its row.
func TestSeenLive(t *testing.T) {
	s := crowd(t)
	name := s.cfg.Fleet.Default().Name()
	for vmid, c := range map[int]struct {
		state   agentlab.SandboxState
		backend string
		live    bool
	}{
		1: {agentlab.SandboxReady, name, true},
		2: {agentlab.SandboxRunning, name, true},
		3: {agentlab.SandboxCompleted, name, true},
		4: {agentlab.SandboxSuspended, name, false},
		5: {agentlab.SandboxPooled, name, false},
		6: {agentlab.SandboxReady, "another", false},
	} {
		s.track(agentlab.Sandbox{VMID: vmid, UID: "uid", Handle: "handle", State: c.state, Backend: c.backend})
		sb, ok := s.seenLive(vmid)
		if ok != c.live || sb.UID != "uid" || sb.Handle != "handle" || sb.VMID != vmid {
			t.Errorf("%+v: %v, %+v", c, ok, sb)
		}
	}
	if _, ok := s.seenLive(7); ok {
		t.Error("an unknown sandbox counts as live")
	}
}
