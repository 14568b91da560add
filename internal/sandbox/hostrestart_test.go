package sandbox_test

import (
	"context"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// A kept sandbox is started again after its host was restarted, with the same
// disk; any other one fails, and says why.
func TestHostRestart(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		kept := w.Create(agentlab.SandboxRequest{Name: "kept", Keepalive: new(true)})
		plain := w.Create(agentlab.SandboxRequest{Name: "plain"})
		frozen := w.Create(agentlab.SandboxRequest{Name: "frozen", Keepalive: new(true)})
		for _, sb := range []agentlab.Sandbox{kept, plain, frozen} {
			w.Until(sb.VMID, agentlab.SandboxReady)
		}
		if _, err := w.Svc.Suspend(context.Background(), frozen.VMID, false); err != nil {
			w.Fatal(err)
		}
		w.Until(frozen.VMID, agentlab.SandboxSuspended)
		w.HostRestart()

		if sb := w.Until(plain.VMID, agentlab.SandboxFailed); !strings.Contains(sb.Reason, "the host was restarted") || !strings.Contains(sb.Reason, "without keepalive") {
			t.Errorf("plain: %q", sb.Reason)
		}
		if sb := w.Until(frozen.VMID, agentlab.SandboxStopped); sb.Desired != agentlab.DesiredStopped || !strings.Contains(sb.Reason, "memory") {
			t.Errorf("frozen: desired %s, %q", sb.Desired, sb.Reason)
		}
		told := false
		sb := w.UntilIt(kept.VMID, func(sb agentlab.Sandbox) bool {
			for _, e := range w.Events(agentlab.EventSandboxState) {
				told = told || e.SandboxVMID == kept.VMID && strings.Contains(e.Message, "the host was restarted; it is started again")
			}
			return told && sb.State == agentlab.SandboxReady
		})
		if sb.UID != kept.UID || w.Power(sb) != backend.PowerRunning {
			t.Errorf("kept: %+v, power %s", sb, w.Power(sb))
		}
		w.DestroyAll()
	})
}
