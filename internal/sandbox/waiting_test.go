package sandbox_test

import (
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
)

// waitingEvents are the messages of events that tell why a sandbox waits.
func (w *world) waitingEvents() (out []string) {
	for _, e := range w.events(agentlab.EventSandboxState) {
		if strings.Contains(e.Data, `"waiting"`) {
			out = append(out, e.Message)
		}
	}
	return out
}

// TestWaitingIsReported checks that the row and one event tell why a sandbox cannot
// be made for now, with the hint and without secrets, and that the row tells so
// no more once it is made.
func TestWaitingIsReported(t *testing.T) {
	inWorld(t, func(w *world) {
		cause := agentlab.Errorf(agentlab.CodeUnavailable, "the storage is not to be read (hunter2)").WithHint("repair disk-0")
		remove := w.host.Inject(fake.Fault{Op: fake.OpCreate, Times: 1000, Err: cause})
		sb := w.create(agentlab.SandboxRequest{Name: "play"})
		sb = w.untilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.Waiting != "" })
		if sb.Waiting != "waits: the storage is not to be read ([redacted]) (repair disk-0)" || sb.State != agentlab.SandboxProvisioning || sb.Reason != "" {
			t.Errorf("%s, waiting %q, reason %q", sb.State, sb.Waiting, sb.Reason)
		}
		time.Sleep(3 * time.Minute)
		if evs := w.waitingEvents(); len(evs) != 1 || !strings.Contains(evs[0], sb.Waiting) {
			t.Errorf("events: %q", evs)
		}
		remove()
		if sb = w.until(sb.VMID, agentlab.SandboxReady); sb.Waiting != "" {
			t.Errorf("READY, and waits: %q", sb.Waiting)
		}
		w.destroyAll()
	})
}

// TestShortFailureIsNotReported checks that what passes at the next try is no news.
func TestShortFailureIsNotReported(t *testing.T) {
	inWorld(t, func(w *world) {
		w.host.Inject(fake.Fault{Op: fake.OpCreate, Times: 2, Err: agentlab.Errorf(agentlab.CodeBusy, "busy")})
		w.until(w.create(agentlab.SandboxRequest{Name: "play"}).VMID, agentlab.SandboxReady)
		if evs := w.waitingEvents(); len(evs) != 0 {
			t.Errorf("events: %q", evs)
		}
		w.destroyAll()
	})
}

// TestUnknownStateIsReported checks that a READY sandbox whose VM cannot be looked
// at says so as long as that lasts, and stays READY.
func TestUnknownStateIsReported(t *testing.T) {
	inWorld(t, func(w *world) {
		sb := w.create(agentlab.SandboxRequest{Name: "play"})
		w.until(sb.VMID, agentlab.SandboxReady)
		remove := w.host.Inject(fake.Fault{Op: fake.OpInspect, Times: 1000, Err: agentlab.Errorf(agentlab.CodeUnknownOutcome, "whose it is is not known")})
		w.restart()
		sb = w.untilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.Waiting != "" })
		if sb.State != agentlab.SandboxReady || !strings.Contains(sb.Waiting, "whose it is is not known") {
			t.Errorf("%s, waiting %q", sb.State, sb.Waiting)
		}
		remove()
		w.untilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.Waiting == "" })
		w.destroyAll()
	})
}
