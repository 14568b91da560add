package sandbox_test

import (
	"context"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// TestNumbersInUse: numbers that others use on the backend are skipped, and
// if that cannot be determined, nothing is allocated.
func TestNumbersInUse(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Host.PutForeign(1000)
		w.Host.PutForeign(1001)
		if sb := w.Create(agentlab.SandboxRequest{Name: "play"}); sb.VMID != 1002 {
			w.Errorf("number %d", sb.VMID)
		}
		remove := w.Host.Inject(fake.Fault{Op: fake.OpTaken, Err: agentlab.Errorf(agentlab.CodeUnavailable, "the node is away")})
		_, err := w.Svc.Create(context.Background(), agentlab.SandboxRequest{Name: "other"})
		sandboxtest.WantCode(t, err, agentlab.CodeUnavailable)
		remove()
		w.DestroyAll()
	})
}

// TestNumberTakenDuringCreate: a backend that cannot make a sandbox because of what
// it has already fails the sandbox, which keeps its number.
func TestNumberTakenDuringCreate(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Host.Inject(fake.Fault{Op: fake.OpCreate, Hook: func(r backend.Spec) { w.Host.PutForeign(r.VMID) }})
		told := w.Create(agentlab.SandboxRequest{Name: "play"})
		sb := w.Until(told.VMID, agentlab.SandboxReady, agentlab.SandboxFailed)
		if sb.State != agentlab.SandboxFailed || sb.UID != told.UID || !w.Host.Foreign(told.VMID) {
			w.Errorf("%d is %s (%s)", sb.VMID, sb.State, sb.Reason)
		}
		w.DestroyAll()
	})
}
