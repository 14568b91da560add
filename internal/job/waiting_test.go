package job_test

import (
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/job"
)

// A QUEUED job has a reason why it waits: its sandbox cannot be created now,
// no sandbox can be requested, or there is no room. Once it runs it has no
// such reason.
func TestWaitingIsReported(t *testing.T) {
	for op, prefix := range map[fake.Op]string{fake.OpCreate: "waits: ", fake.OpTaken: "waits for a sandbox: "} {
		t.Run(string(op), func(t *testing.T) {
			inWorld(t, func(w *world) {
				cause := agentlab.Errorf(agentlab.CodeUnavailable, "the storage is not to be read").WithHint("repair disk-0")
				remove := w.host.Inject(fake.Fault{Op: op, Times: 1000, Err: cause})
				id := w.run(agentlab.JobRequest{Task: "echo x"}).ID
				w.phase(id, job.PhaseWaiting)
				if j := w.job(id); j.Status != agentlab.JobQueued || j.Waiting != prefix+"the storage is not to be read (repair disk-0)" {
					t.Errorf("%s, waiting %q", j.Status, j.Waiting)
				}
				out := 0
				for _, kind := range []string{agentlab.EventJobPhase, agentlab.EventSandboxState} {
					for _, text := range w.events(kind, id) {
						if strings.Contains(text, "the storage is not to be read (repair disk-0)") {
							out++
						}
					}
				}
				if out != 1 {
					t.Errorf("told by %d events of the job, want 1", out)
				}
				remove()
				if j := w.final(id); j.Status != agentlab.JobCompleted || j.Waiting != "" {
					t.Errorf("%s, waiting %q", j.Status, j.Waiting)
				}
			})
		})
	}
	inWorld(t, func(w *world) {
		w.max = 1
		w.restart()
		first := w.run(agentlab.JobRequest{Task: "sleep 5m"}).ID
		w.eventually("the first has the room", func() bool { return w.job(first).SandboxVMID != 0 })
		second := w.run(agentlab.JobRequest{Task: "echo x"}).ID
		w.phase(second, job.PhaseWaiting)
		if text := w.job(second).Waiting; !strings.Contains(text, "room for another sandbox") {
			t.Errorf("waiting %q", text)
		}
		w.final(first)
		if j := w.final(second); j.Waiting != "" {
			t.Errorf("has ended, and waits: %q", j.Waiting)
		}
	})
}
