package workspace_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// A sandbox that waits for a workspace names the sandbox that has it now.
func TestWaitingNamesTheCurrentHolder(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		var vmids []int
		for _, name := range []string{"wa", "wb", "wc"} {
			r := sandboxtest.OnWorkspace("data", time.Hour)
			r.Name = name
			vmids = append(vmids, w.Create(r).VMID)
			synctest.Wait()
		}
		w.Until(vmids[0], agentlab.SandboxReady)
		w.Gone(vmids[0])
		w.Until(vmids[1], agentlab.SandboxReady)
		synctest.Wait()
		if got := w.Get(vmids[2]).Waiting; !strings.Contains(got, "used by sandbox wb") {
			t.Errorf("it waits: %q", got)
		}
	})
}

// A sandbox whose workspace is taken before its job has ended fails with the reason: the
// agent never runs without the workspace.
func TestJobFailsWithoutItsWorkspace(t *testing.T) {
	for name, test := range map[string]struct {
		sandbox string
		job     agentlab.JobStatus // "" if there is no row
		state   agentlab.SandboxState
		want    agentlab.SandboxState
	}{
		"boots":   {"never-boots", "", agentlab.SandboxBooting, agentlab.SandboxDestroyed},
		"queued":  {"never-boots", agentlab.JobQueued, agentlab.SandboxBooting, agentlab.SandboxDestroyed},
		"running": {"play", agentlab.JobRunning, agentlab.SandboxReady, agentlab.SandboxDestroyed},
		"ended":   {"play", "", agentlab.SandboxReady, agentlab.SandboxReady}, // it was kept, and the row deleted by retention
	} {
		t.Run(name, func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				ctx := context.Background()
				r := sandboxtest.OnWorkspace("data", 0)
				r.Name, r.JobID = test.sandbox, agentlab.NewJobID()
				if test.job != "" {
					j := agentlab.Job{ID: r.JobID, Task: "work", Agent: "shell", Profile: "yolo-ephemeral", Mode: "dangerous", TTL: time.Hour, Status: test.job}
					if err := w.Store.CreateJob(ctx, j, nil); err != nil {
						t.Fatal(err)
					}
				}
				sb := w.Create(r)
				w.Until(sb.VMID, test.state)
				synctest.Wait()
				if _, err := w.Workspaces.Release(ctx, "data", true); err != nil {
					t.Fatal(err)
				}
				time.Sleep(10 * time.Second) // of the bubble
				sb = w.Until(sb.VMID, test.want)
				if failed := strings.Contains(sb.Reason, "taken from the sandbox before its job had ended"); failed != (test.want == agentlab.SandboxDestroyed) {
					t.Errorf("it is %s: %q", sb.State, sb.Reason)
				}
				if left := w.Leases("data"); len(left) != 0 || w.AttachedTo("data") != "" {
					t.Errorf("leases %v, attached to %q", left, w.AttachedTo("data"))
				}
			})
		})
	}
}
