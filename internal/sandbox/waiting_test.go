package sandbox_test

import (
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// TestWaitingIsReported checks that the row and one event tell why a sandbox cannot
// be made for now, with the hint and without secrets, and that the row tells so
// no more once it is made.
func TestWaitingIsReported(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		cause := agentlab.Errorf(agentlab.CodeUnavailable, "the storage is not to be read (hunter2)").WithHint("repair disk-0")
		remove := w.Host.Inject(fake.Fault{Op: fake.OpCreate, Times: 1000, Err: cause})
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		sb = w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.Waiting != "" })
		if sb.Waiting != "waits: the storage is not to be read ([redacted]) (repair disk-0)" || sb.State != agentlab.SandboxProvisioning || sb.Reason != "" {
			t.Errorf("%s, waiting %q, reason %q", sb.State, sb.Waiting, sb.Reason)
		}
		time.Sleep(3 * time.Minute)
		if evs := w.WaitingEvents(); len(evs) != 1 || !strings.Contains(evs[0], sb.Waiting) {
			t.Errorf("events: %q", evs)
		}
		remove()
		if sb = w.Until(sb.VMID, agentlab.SandboxReady); sb.Waiting != "" {
			t.Errorf("READY, and waits: %q", sb.Waiting)
		}
		w.DestroyAll()
	})
}

// TestShortFailureIsNotReported checks that what passes at the next try is no news.
func TestShortFailureIsNotReported(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Host.Inject(fake.Fault{Op: fake.OpCreate, Times: 2, Err: agentlab.Errorf(agentlab.CodeBusy, "busy")})
		w.Until(w.Create(agentlab.SandboxRequest{Name: "play"}).VMID, agentlab.SandboxReady)
		if evs := w.WaitingEvents(); len(evs) != 0 {
			t.Errorf("events: %q", evs)
		}
		w.DestroyAll()
	})
}

// TestUnknownStateIsReported checks that a READY sandbox whose VM cannot be looked
// at says so as long as that lasts, and stays READY.
func TestUnknownStateIsReported(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		remove := w.Host.Inject(fake.Fault{Op: fake.OpInspect, Times: 1000, Err: agentlab.Errorf(agentlab.CodeUnknownOutcome, "whose it is is not known")})
		w.Restart()
		sb = w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.Waiting != "" })
		if sb.State != agentlab.SandboxReady || !strings.Contains(sb.Waiting, "whose it is is not known") {
			t.Errorf("%s, waiting %q", sb.State, sb.Waiting)
		}
		remove()
		w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.Waiting == "" })
		w.DestroyAll()
	})
}
