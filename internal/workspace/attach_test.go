package workspace_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// What a sandbox writes to its workspace is there in the next one that has it, which
// waits until the first is destroyed.
func TestWorkspaceIsMountedAndPassedOn(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		t := w.T
		first := w.Create(sandboxtest.OnWorkspace("data", 0))
		w.Until(first.VMID, agentlab.SandboxReady)
		if v := w.WorkspaceOf("data"); !v.Formatted || v.State != agentlab.WorkspaceReady || w.AttachedTo("data") != first.UID {
			t.Errorf("%+v", v)
		}
		w.Sh(first, "echo hello > /work/note")
		if _, err := w.Svc.Create(context.Background(), sandboxtest.OnWorkspace("data", 0)); agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(err.Error(), first.Name) {
			t.Errorf("a second sandbox: %v", err)
		}
		second := w.Create(sandboxtest.OnWorkspace("data", time.Hour))
		synctest.Wait()
		if sb := w.Get(second.VMID); sb.State != agentlab.SandboxRequested || !strings.Contains(sb.Waiting, "data") {
			t.Errorf("%+v", sb)
		}
		w.Gone(first.VMID)
		w.Until(second.VMID, agentlab.SandboxReady)
		if got := w.Sh(second, "cat /work/note"); got != "hello" {
			t.Errorf("the note is %q", got)
		}
		if got := w.Leases("data"); len(got) != 1 || got[0] != second.VMID {
			t.Errorf("leases %v", got)
		}
		w.Gone(second.VMID)
		if got := w.Leases("data"); len(got) != 0 || w.AttachedTo("data") != "" {
			t.Errorf("leases %v", got)
		}
	})
}

// A daemon that is killed between any two calls of the driver gives the workspace to
// one sandbox after the other, and its content stays.
func TestWorkspaceAfterCrashes(t *testing.T) {
	for _, c := range []struct {
		op fake.Op
		at fake.Point
	}{
		{fake.OpCreateVolume, fake.Before}, {fake.OpCreateVolume, fake.Half}, {fake.OpCreateVolume, fake.After},
		{fake.OpCreate, fake.Half}, {fake.OpCreate, fake.After}, {fake.OpAttachVolume, fake.Before}, {fake.OpAttachVolume, fake.After},
		{fake.OpStart, fake.Before}, {fake.OpStart, fake.After}, {fake.OpDialControl, fake.Before},
		{fake.OpDestroy, fake.Before}, {fake.OpDestroy, fake.Half}, {fake.OpDestroy, fake.After},
	} {
		t.Run(fmt.Sprintf("%s/%s", c.op, c.at), func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				t := w.T
				crash := func() (restart func()) { return w.Crashes(c.op, c.at) }
				restart := func() {}
				if c.op != fake.OpDestroy {
					restart = crash()
				}
				for i := range 3 {
					sb := w.Create(sandboxtest.OnWorkspace("data", 0))
					restart()
					w.Until(sb.VMID, agentlab.SandboxReady)
					if got := w.Leases("data"); len(got) != 1 || got[0] != sb.VMID || w.AttachedTo("data") != sb.UID {
						t.Fatalf("leases %v, attached to %q", got, w.AttachedTo("data"))
					}
					w.Sh(sb, fmt.Sprintf("echo %d > /work/%d", i, i))
					if restart = func() {}; c.op == fake.OpDestroy {
						restart = crash()
					}
					sandboxtest.Must(w.Svc.Destroy(context.Background(), sb.VMID))(t)
					restart()
					w.Until(sb.VMID, agentlab.SandboxDestroyed)
					if w.AttachedTo("data") != "" || len(w.Leases("data")) != 0 {
						t.Fatalf("left: attached to %q, leases %v", w.AttachedTo("data"), w.Leases("data"))
					}
					if restart = func() {}; c.op != fake.OpDestroy && c.op != fake.OpCreateVolume {
						restart = crash()
					}
				}
				sb := w.Create(sandboxtest.OnWorkspace("data", 0))
				restart()
				w.Until(sb.VMID, agentlab.SandboxReady)
				if got := w.Sh(sb, "cat /work/0 /work/1 /work/2"); got != "0\n1\n2" {
					t.Errorf("the files are %q", got)
				}
			})
		})
	}
}

// Sandboxes get a workspace in the order of their requests, one at a time, and no
// request is forgotten, also over restarts of the daemon.
func TestQueueForAWorkspace(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		t := w.T
		w.Until(w.Create(sandboxtest.OnWorkspace("data", 0)).VMID, agentlab.SandboxReady)
		for range 20 {
			w.Create(sandboxtest.OnWorkspace("data", time.Hour))
			synctest.Wait()
		}
		queue := w.Leases("data")
		if len(queue) != 21 {
			t.Fatalf("leases %v", queue)
		}
		for i, vmid := range queue {
			w.Until(vmid, agentlab.SandboxReady)
			if got := w.Leases("data"); len(got) != len(queue)-i || got[0] != vmid || w.AttachedTo("data") != w.Get(vmid).UID {
				t.Fatalf("leases %v, want %v", got, queue[i:])
			}
			for _, other := range queue[i+1:] {
				if sb := w.Get(other); sb.State != agentlab.SandboxRequested {
					t.Fatalf("%+v", sb)
				}
			}
			if i%5 == 0 {
				w.Restart()
			}
			w.Gone(vmid)
		}
	})
}

// The steps of leases and the time that each waited are in the events, and their number
// in the database: metrics are made of both.
func TestLeasesAreCounted(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		t := w.T
		count := func(acquired, queued int) {
			t.Helper()
			got := sandboxtest.Must(w.Store.CountWorkspaceLeases(t.Context()))(t)
			if got[agentlab.LeaseStepAcquired] != acquired || got[agentlab.LeaseStepQueued] != queued {
				t.Errorf("leases %v, want %d acquired and %d queued", got, acquired, queued)
			}
		}
		first := w.Create(sandboxtest.OnWorkspace("data", 0))
		w.Until(first.VMID, agentlab.SandboxReady)
		second := w.Create(sandboxtest.OnWorkspace("data", time.Hour))
		count(1, 1)
		time.Sleep(5 * time.Minute)
		w.Gone(first.VMID)
		w.Until(second.VMID, agentlab.SandboxReady)
		count(1, 0)
		if ready, size := sandboxtest.Must(w.Store.CountWorkspaces(t.Context()))(t), sandboxtest.Must(w.Store.WorkspaceGB(t.Context()))(t); ready[agentlab.WorkspaceReady] != 1 || size[agentlab.WorkspaceReady] != 2 {
			t.Errorf("workspaces %v, GiB %v", ready, size)
		}
		w.Gone(second.VMID)
		count(0, 0)
		var steps []agentlab.LeaseStep
		var waited []float64
		for _, e := range w.Events(agentlab.EventWorkspaceLease) {
			var data struct {
				Step agentlab.LeaseStep `json:"step"`
				Wait *float64           `json:"wait_seconds"`
			}
			if err := json.Unmarshal([]byte(e.Data), &data); err != nil {
				t.Fatal(err)
			}
			if data.Step != "" {
				steps = append(steps, data.Step)
			}
			if data.Wait != nil {
				waited = append(waited, *data.Wait)
			}
		}
		acquired, queued, ended := agentlab.LeaseStepAcquired, agentlab.LeaseStepQueued, agentlab.LeaseStepEnded
		if !slices.Equal(steps, []agentlab.LeaseStep{acquired, queued, ended, acquired, ended}) {
			t.Errorf("steps %v", steps)
		}
		if len(waited) != 2 || waited[0] != 0 || waited[1] < 300 || waited[1] > 600 {
			t.Errorf("waited for %v seconds", waited)
		}
	})
}

// A sandbox that waits too long fails, and gives its place up.
func TestWaitForAWorkspaceEnds(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		t := w.T
		first := w.Create(sandboxtest.OnWorkspace("data", 0))
		w.Until(first.VMID, agentlab.SandboxReady)
		late, next := w.Create(sandboxtest.OnWorkspace("data", time.Minute)), w.Create(sandboxtest.OnWorkspace("data", time.Hour))
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if sb := w.Get(late.VMID); sb.State != agentlab.SandboxFailed || !strings.Contains(sb.Reason, "was not free within 1m") {
			t.Errorf("%+v", sb)
		}
		if got := w.Leases("data"); len(got) != 2 || got[1] != next.VMID {
			t.Errorf("leases %v", got)
		}
		w.Gone(next.VMID)
		if got := w.Leases("data"); len(got) != 1 || got[0] != first.VMID {
			t.Errorf("leases %v", got)
		}
	})
}

// A stopped sandbox that waits for a workspace gives its place up too.
func TestWaitOfAStoppedSandboxEnds(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		t := w.T
		first, stopped := w.Create(sandboxtest.OnWorkspace("data", 0)), w.Create(agentlab.SandboxRequest{})
		w.Until(first.VMID, agentlab.SandboxReady)
		w.Until(stopped.VMID, agentlab.SandboxReady)
		sandboxtest.Must(w.Svc.Stop(context.Background(), stopped.VMID, 0))(t)
		w.Until(stopped.VMID, agentlab.SandboxStopped)
		sandboxtest.Must(w.Workspaces.Attach(context.Background(), stopped.VMID, agentlab.WorkspaceSelection{Workspace: "data", Wait: time.Minute}))(t)
		next := w.Create(sandboxtest.OnWorkspace("data", time.Hour))
		time.Sleep(20 * time.Minute)
		synctest.Wait()
		if got := w.Leases("data"); len(got) != 2 || got[1] != next.VMID || !w.SawRefusal("was not free within 1m") {
			t.Errorf("leases %v", got)
		}
		if sb := w.Get(stopped.VMID); sb.Workspace != "" || sb.State != agentlab.SandboxStopped {
			t.Errorf("%+v", sb)
		}
		w.Gone(first.VMID)
		w.Until(next.VMID, agentlab.SandboxReady)
	})
}

// A workspace whose file system is missing, although a guest has used it, is not made
// again.
func TestLostFileSystem(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		t := w.T
		sb := w.Create(sandboxtest.OnWorkspace("data", 0))
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Sh(sb, "rm /work/lost+found")
		w.Gone(sb.VMID)
		sb = w.Create(sandboxtest.OnWorkspace("data", 0))
		w.Until(sb.VMID, agentlab.SandboxFailed)
		if got := w.Get(sb.VMID); !strings.Contains(got.Reason, "cannot be mounted") {
			t.Errorf("%+v", got)
		}
		synctest.Wait()
		if got := w.Leases("data"); len(got) != 0 || w.AttachedTo("data") != "" {
			t.Errorf("a failed sandbox keeps it: %v", got)
		}
	})
}

func TestAttachAndDetach(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		t := w.T
		first := w.Create(sandboxtest.OnWorkspace("data", 0))
		w.Until(first.VMID, agentlab.SandboxReady)
		w.Sh(first, "echo hello > /work/note")
		w.Sh(first, "echo x > /work/busy")
		detach := func(force bool) {
			if _, err := w.Workspaces.Release(context.Background(), "data", force); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		detach(false)
		if got := w.Leases("data"); len(got) != 1 || !w.SawRefusal("sleep (42)") {
			t.Errorf("a busy workspace was detached: %v", got)
		}
		if _, err := w.Snaps.SaveSnapshot(context.Background(), first.VMID, "x", false); agentlab.CodeOf(err) != agentlab.CodeConflict {
			t.Errorf("saved with a workspace: %v", err)
		}
		detach(true)
		if got := w.Leases("data"); len(got) != 0 || w.AttachedTo("data") != "" || w.Get(first.VMID).Workspace != "" || w.Get(first.VMID).State != agentlab.SandboxReady {
			t.Errorf("leases %v, %+v", got, w.Get(first.VMID))
		}
		second := w.Create(agentlab.SandboxRequest{})
		w.Until(second.VMID, agentlab.SandboxReady)
		sel := agentlab.WorkspaceSelection{Workspace: "data"}
		if _, err := w.Workspaces.Attach(context.Background(), second.VMID, sel); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got := w.Sh(second, "cat /work/note"); got != "hello" || w.AttachedTo("data") != second.UID {
			t.Errorf("the note is %q", got)
		}
		if _, err := w.Workspaces.Attach(context.Background(), first.VMID, sel); agentlab.CodeOf(err) != agentlab.CodeConflict {
			t.Errorf("attached twice: %v", err)
		}
		for what, fn := range map[string]func() error{
			"resize":   func() error { _, err := w.Workspaces.Resize(context.Background(), "data", 4); return err },
			"delete":   func() error { _, err := w.Workspaces.Delete(context.Background(), "data", false); return err },
			"fork":     func() error { _, err := w.Workspaces.Fork(context.Background(), "data", "copy", ""); return err },
			"snapshot": func() error { _, err := w.Workspaces.SaveSnapshot(context.Background(), "data", "x", ""); return err },
		} {
			if err := fn(); agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(err.Error(), second.Name) {
				t.Errorf("%s while it is used: %v", what, err)
			}
		}
	})
}

// Many requests at the same moment: one creates the workspace and has it. The others
// wait for it if they may.
func TestRaceForAWorkspace(t *testing.T) {
	for _, c := range []struct {
		wait time.Duration
		want int
	}{{0, 1}, {time.Hour, 20}} {
		sandboxtest.InWorld(t, func(w *sandboxtest.World) {
			t := w.T
			var wg sync.WaitGroup
			var mu sync.Mutex
			made := 0
			for range 20 {
				wg.Go(func() {
					_, err := w.Svc.Create(context.Background(), sandboxtest.OnWorkspace("data", c.wait))
					mu.Lock()
					defer mu.Unlock()
					switch {
					case err == nil:
						made++
					case c.wait > 0 || agentlab.CodeOf(err) != agentlab.CodeConflict:
						t.Error(err)
					}
				})
			}
			wg.Wait()
			if made != c.want || len(w.Leases("data")) != c.want {
				t.Errorf("%d sandboxes were created, want %d", made, c.want)
			}
		})
	}
}

// A maintenance sandbox has a workspace, and neither a network nor a bootstrap
// document. Its guest mounts the workspace only if that is requested.
func TestMaintenanceSandbox(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		t := w.T
		request := func(kind string) agentlab.SandboxRequest {
			r := sandboxtest.OnWorkspace("data", 0)
			r.Maintenance = kind
			return r
		}
		for _, r := range []agentlab.SandboxRequest{request("other"), {Maintenance: agentlab.MaintenanceDisk}} {
			if _, err := w.Svc.Create(t.Context(), r); agentlab.CodeOf(err) != agentlab.CodeInvalid {
				t.Errorf("%+v: %v", r, err)
			}
		}
		sb := w.Create(request(agentlab.MaintenanceDisk))
		w.Until(sb.VMID, agentlab.SandboxReady)
		if v := w.WorkspaceOf("data"); v.Formatted || w.AttachedTo("data") != sb.UID {
			t.Errorf("its guest has mounted it: %+v", v)
		}
		if sb = w.Get(sb.VMID); sb.Network.Mode != agentlab.NetworkOff || sb.Keepalive || !sb.Maintenance() {
			t.Errorf("%+v", sb)
		}
		if list := sandboxtest.Must(w.Svc.ReloadNetworks(t.Context(), []int{sb.VMID}))(t); list[0].Err == nil {
			t.Error("it got the policy of a profile")
		}
		w.Restart()
		w.Until(sb.VMID, agentlab.SandboxReady)
		if w.WorkspaceOf("data").Formatted {
			t.Error("its guest has mounted it after a restart")
		}
		w.Gone(sb.VMID)
		sb = w.Create(request(agentlab.MaintenanceFiles))
		w.Until(sb.VMID, agentlab.SandboxReady)
		if !w.WorkspaceOf("data").Formatted {
			t.Error("its guest has not mounted it")
		}
		w.Gone(sb.VMID)
		if w.AttachedTo("data") != "" {
			t.Error("the workspace is still attached")
		}
	})
}

// The guest of a sandbox that is destroyed writes its workspace first, however its job
// or its lease has ended.
func TestWorkspaceIsWrittenBeforeTheEnd(t *testing.T) {
	ended := func(status agentlab.JobStatus) func(*sandboxtest.World, agentlab.Sandbox) {
		return func(w *sandboxtest.World, sb agentlab.Sandbox) {
			sandboxtest.Must(w.Svc.Release(context.Background(), sb.VMID, sandbox.Outcome{Status: status}))(w.T)
		}
	}
	for name, end := range map[string]func(*sandboxtest.World, agentlab.Sandbox){
		"completed": ended(agentlab.JobCompleted), "failed": ended(agentlab.JobFailed), "time limit": ended(agentlab.JobTimeout), "lease": func(*sandboxtest.World, agentlab.Sandbox) {},
	} {
		for _, job := range []string{"", "job-1"} {
			t.Run(name+job, func(t *testing.T) {
				sandboxtest.InWorld(t, func(w *sandboxtest.World) {
					t := w.T
					r := sandboxtest.OnWorkspace("data", 0)
					r.JobID = job
					sb := w.Create(r)
					w.Until(sb.VMID, agentlab.SandboxReady)
					w.Sh(sb, "echo hello > /work/unwritten")
					end(w, sb)
					w.Until(sb.VMID, agentlab.SandboxDestroyed)
					next := w.Create(sandboxtest.OnWorkspace("data", 0))
					w.Until(next.VMID, agentlab.SandboxReady)
					if got := w.Sh(next, "cat /work/written"); got != "hello" {
						t.Errorf("what its guest had in memory is lost: %q", got)
					}
				})
			})
		}
	}
}

// A daemon that starts while the storage of a workspace does not answer as it should
// does not take the workspace from processes that use it.
func TestWorkspaceInUseIsNotGivenBack(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		t := w.T
		sb := w.Create(sandboxtest.OnWorkspace("data", 0))
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Sh(sb, "echo x > /work/busy")
		lost := w.Host.Inject(fake.Fault{Op: fake.OpAttachVolume, Err: agentlab.Errorf(agentlab.CodeNotFound, "there is no such volume")})
		w.Restart()
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := w.Leases("data"); len(got) != 1 || w.AttachedTo("data") != sb.UID {
			t.Fatalf("it was detached: leases %v, attached to %q", got, w.AttachedTo("data"))
		}
		w.Sh(sb, "rm /work/busy; echo hello > /work/unwritten")
		lost()
		time.Sleep(time.Minute)
		w.Gone(sb.VMID)
		next := w.Create(sandboxtest.OnWorkspace("data", 0))
		w.Until(next.VMID, agentlab.SandboxReady)
		if got := w.Sh(next, "cat /work/written"); got != "hello" {
			t.Errorf("it is lost: %q", got)
		}
	})
}
