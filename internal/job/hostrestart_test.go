package job_test

import (
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
)

// The host is restarted while a job runs: the job fails with the reason. Its
// sandbox is started again, without the job, if it is kept.
func TestHostRestart(t *testing.T) {
	for _, keep := range []bool{false, true} {
		inWorld(t, func(w *world) {
			j := w.run(agentlab.JobRequest{Task: "sleep 30m", Keepalive: new(keep)})
			w.phase(j.ID, "agent")
			w.kill()
			if err := w.host.Restart(); err != nil {
				w.Fatal(err)
			}
			w.begin()
			j = w.final(j.ID)
			if j.Status != agentlab.JobFailed || !strings.Contains(j.Reason, "the host was restarted") {
				t.Errorf("keepalive %v: %s, %q", keep, j.Status, j.Reason)
			}
			if keep {
				w.eventually("started again", func() bool { return w.sandbox(j.ID).State == agentlab.SandboxReady })
				if now := w.job(j.ID); now.Status != agentlab.JobFailed {
					t.Errorf("after the sandbox was started again: %s", now.Status)
				}
			} else if !strings.Contains(j.Reason, "without keepalive") {
				t.Errorf("%q", j.Reason)
			}
		})
	}
}

// The sandbox may have been stopped and started again before its job is looked
// at: the job, whose agent is gone, fails all the same.
func TestSandboxStoppedAndStartedAgain(t *testing.T) {
	inWorld(t, func(w *world) {
		j := w.run(agentlab.JobRequest{Task: "sleep 30m", Keepalive: new(true)})
		w.phase(j.ID, "agent")
		sb := w.sandbox(j.ID) // as it was told of in between
		sb.State, sb.Desired, sb.Reason = agentlab.SandboxStopped, agentlab.DesiredRunning, "the host was restarted"
		w.jobs.Committed(agentlab.Commit{Sandboxes: []agentlab.Sandbox{sb}})
		if j = w.final(j.ID); j.Status != agentlab.JobFailed || !strings.Contains(j.Reason, "the host was restarted") {
			t.Errorf("%s, %q", j.Status, j.Reason)
		}
	})
}

// That a sandbox was stopped and started again before its job began does not
// count.
func TestSandboxStoppedBeforeTheJobBegins(t *testing.T) {
	inWorld(t, func(w *world) {
		release := make(chan struct{})
		w.host.Inject(fake.Fault{Op: fake.OpDialControl, Times: 1, Block: release})
		j := w.run(agentlab.JobRequest{Task: "echo done", Keepalive: new(true)})
		w.eventually("booting", func() bool { return w.sandbox(j.ID).State == agentlab.SandboxBooting })
		sb := w.sandbox(j.ID) // as it was in between
		sb.State, sb.Desired, sb.Reason = agentlab.SandboxStopped, agentlab.DesiredRunning, "the host was restarted"
		w.jobs.Committed(agentlab.Commit{Sandboxes: []agentlab.Sandbox{sb}})
		close(release)
		if j = w.final(j.ID); j.Status != agentlab.JobCompleted {
			t.Errorf("%s: %s", j.Status, j.Reason)
		}
	})
}
