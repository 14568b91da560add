package job_test

import (
	"context"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/job"
)

// The sandbox of a job that is cancelled before it starts is destroyed, also one that
// the job would have kept.
func TestCancelBeforeTheStartDestroysAKeptSandbox(t *testing.T) {
	inWorld(t, func(w *world) {
		keep := true
		remove := w.host.Inject(fake.Fault{Op: fake.OpCreate, Times: 1000, Err: agentlab.Errorf(agentlab.CodeUnavailable, "the storage is not to be read")})
		id := w.run(agentlab.JobRequest{Task: "echo x", Keepalive: &keep}).ID
		w.phase(id, job.PhaseWaiting)
		if j, err := w.jobs.Cancel(context.Background(), id); err != nil || j.Status != agentlab.JobCancelled {
			t.Fatalf("%s, %v", j.Status, err)
		}
		remove()
		w.gone(id)
	})
}
