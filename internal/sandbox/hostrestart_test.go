package sandbox_test

import (
	"context"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// hostRestart is a restart of the host with the daemon on it.
func (w *world) hostRestart() {
	w.Helper()
	w.kill()
	if err := w.host.Restart(); err != nil {
		w.Fatal(err)
	}
	w.begin()
}

// A kept sandbox is started again after its host was restarted, with the same
// disk; any other one fails, and says why.
func TestHostRestart(t *testing.T) {
	inWorld(t, func(w *world) {
		kept := w.create(agentlab.SandboxRequest{Name: "kept", Keepalive: new(true)})
		plain := w.create(agentlab.SandboxRequest{Name: "plain"})
		frozen := w.create(agentlab.SandboxRequest{Name: "frozen", Keepalive: new(true)})
		for _, sb := range []agentlab.Sandbox{kept, plain, frozen} {
			w.until(sb.VMID, agentlab.SandboxReady)
		}
		if _, err := w.svc.Suspend(context.Background(), frozen.VMID, false); err != nil {
			w.Fatal(err)
		}
		w.until(frozen.VMID, agentlab.SandboxSuspended)
		w.hostRestart()

		if sb := w.until(plain.VMID, agentlab.SandboxFailed); !strings.Contains(sb.Reason, "the host was restarted") || !strings.Contains(sb.Reason, "without keepalive") {
			t.Errorf("plain: %q", sb.Reason)
		}
		if sb := w.until(frozen.VMID, agentlab.SandboxStopped); sb.Desired != agentlab.DesiredStopped || !strings.Contains(sb.Reason, "memory") {
			t.Errorf("frozen: desired %s, %q", sb.Desired, sb.Reason)
		}
		told := false
		sb := w.untilIt(kept.VMID, func(sb agentlab.Sandbox) bool {
			for _, e := range w.events(agentlab.EventSandboxState) {
				told = told || e.SandboxVMID == kept.VMID && strings.Contains(e.Message, "the host was restarted; it is started again")
			}
			return told && sb.State == agentlab.SandboxReady
		})
		if sb.UID != kept.UID || w.power(sb) != backend.PowerRunning {
			t.Errorf("kept: %+v, power %s", sb, w.power(sb))
		}
		w.destroyAll()
	})
}
