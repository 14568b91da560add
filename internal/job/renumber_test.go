package job_test

import (
	"context"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
)

// A job whose sandbox gets another number between the reading of the job and
// of the sandbox continues with that sandbox.
func TestSandboxRenumberedMeanwhile(t *testing.T) {
	inWorld(t, func(w *world) {
		looking := make(chan struct{})
		w.host.Inject(fake.Fault{Op: fake.OpCreate, Times: 1, Hook: func(r backend.Spec) {
			<-looking
			w.host.PutForeign(r.VMID)
		}})
		look := func(vmid int) {
			close(looking)
			for agentlab.CodeOf(w.hasSandbox(vmid)) != agentlab.CodeNotFound {
				time.Sleep(time.Second) // in the bubble's time
			}
		}
		w.beforeSandbox.Store(&look)
		j := w.final(w.run(agentlab.JobRequest{Task: "echo x"}).ID)
		if j.Status != agentlab.JobCompleted || j.SandboxVMID != 1001 {
			t.Errorf("%s: %s; number %d", j.Status, j.Reason, j.SandboxVMID)
		}
	})
}

func (w *world) hasSandbox(vmid int) error {
	_, err := w.store.Sandbox(context.Background(), vmid)
	return err
}
