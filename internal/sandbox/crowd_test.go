package sandbox

import (
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
