package sandbox_test

import (
	"context"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
)

// TestNumbersInUse: numbers that others use on the backend are skipped, and
// if that cannot be determined, nothing is allocated.
func TestNumbersInUse(t *testing.T) {
	inWorld(t, func(w *world) {
		w.host.PutForeign(1000)
		w.host.PutForeign(1001)
		if sb := w.create(agentlab.SandboxRequest{Name: "play"}); sb.VMID != 1002 {
			w.Errorf("number %d", sb.VMID)
		}
		remove := w.host.Inject(fake.Fault{Op: fake.OpTaken, Err: agentlab.Errorf(agentlab.CodeUnavailable, "the node is away")})
		_, err := w.svc.Create(context.Background(), agentlab.SandboxRequest{Name: "other"})
		wantCode(t, err, agentlab.CodeUnavailable)
		remove()
		w.destroyAll()
	})
}

// TestNumberTakenDuringCreate: a backend that cannot make a sandbox because of what
// it has already fails the sandbox, which keeps its number.
func TestNumberTakenDuringCreate(t *testing.T) {
	inWorld(t, func(w *world) {
		w.host.Inject(fake.Fault{Op: fake.OpCreate, Hook: func(r backend.Spec) { w.host.PutForeign(r.VMID) }})
		told := w.create(agentlab.SandboxRequest{Name: "play"})
		sb := w.until(told.VMID, agentlab.SandboxReady, agentlab.SandboxFailed)
		if sb.State != agentlab.SandboxFailed || sb.UID != told.UID || !w.host.Foreign(told.VMID) {
			w.Errorf("%d is %s (%s)", sb.VMID, sb.State, sb.Reason)
		}
		w.destroyAll()
	})
}
