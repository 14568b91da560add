package sandbox_test

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
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// onWorkspace is a request for a sandbox with a workspace.
func onWorkspace(name string, wait time.Duration) agentlab.SandboxRequest {
	return agentlab.SandboxRequest{Workspace: &agentlab.WorkspaceSelection{Workspace: name, Wait: wait, Ensure: true, SizeGB: 2}}
}

// workspaceOf returns the workspace with a name.
func (w *world) workspaceOf(name string) agentlab.Workspace {
	w.Helper()
	v, err := w.workspaces.Get(context.Background(), name)
	if err != nil {
		w.Fatal(err)
	}
	return v
}

// leases returns the numbers of the sandboxes that have a workspace and wait for it.
func (w *world) leases(name string) (out []int) {
	w.Helper()
	list, err := w.store.WorkspaceLeases(context.Background(), w.workspaceOf(name).ID)
	if err != nil {
		w.Fatal(err)
	}
	for i, l := range list {
		if l.Acquired() != (i == 0) {
			w.Errorf("leases %+v", list)
		}
		out = append(out, l.VMID)
	}
	return out
}

// gone destroys a sandbox.
func (w *world) gone(vmid int) {
	w.Helper()
	must(w.svc.Destroy(context.Background(), vmid))(w.T)
	w.until(vmid, agentlab.SandboxDestroyed)
}

// sawRefusal reports whether an event says that a request for a lease was given up.
func (w *world) sawRefusal(why string) bool {
	return slices.ContainsFunc(w.events(agentlab.EventWorkspaceLease), func(e agentlab.Event) bool {
		return strings.Contains(e.Data, "refused") && strings.Contains(e.Message, why)
	})
}

// attachedTo returns the UID of the sandbox that the volume of a workspace is attached
// to.
func (w *world) attachedTo(name string) string {
	w.Helper()
	vol, err := w.driver.InspectVolume(context.Background(), backend.VolumeRef{UID: w.workspaceOf(name).UID})
	if err != nil {
		w.Fatal(err)
	}
	return vol.AttachedTo.UID
}

// What a sandbox writes to its workspace is there in the next one that has it, which
// waits until the first is destroyed.
func TestWorkspaceIsMountedAndPassedOn(t *testing.T) {
	inWorld(t, func(w *world) {
		t := w.T
		first := w.create(onWorkspace("data", 0))
		w.until(first.VMID, agentlab.SandboxReady)
		if v := w.workspaceOf("data"); !v.Formatted || v.State != agentlab.WorkspaceReady || w.attachedTo("data") != first.UID {
			t.Errorf("%+v", v)
		}
		w.sh(first, "echo hello > /work/note")
		if _, err := w.svc.Create(context.Background(), onWorkspace("data", 0)); agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(err.Error(), first.Name) {
			t.Errorf("a second sandbox: %v", err)
		}
		second := w.create(onWorkspace("data", time.Hour))
		synctest.Wait()
		if sb := w.get(second.VMID); sb.State != agentlab.SandboxRequested || !strings.Contains(sb.Waiting, "data") {
			t.Errorf("%+v", sb)
		}
		w.gone(first.VMID)
		w.until(second.VMID, agentlab.SandboxReady)
		if got := w.sh(second, "cat /work/note"); got != "hello" {
			t.Errorf("the note is %q", got)
		}
		if got := w.leases("data"); len(got) != 1 || got[0] != second.VMID {
			t.Errorf("leases %v", got)
		}
		w.gone(second.VMID)
		if got := w.leases("data"); len(got) != 0 || w.attachedTo("data") != "" {
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
			inWorld(t, func(w *world) {
				t := w.T
				crash := func() (restart func()) { return w.crashes(c.op, c.at) }
				restart := func() {}
				if c.op != fake.OpDestroy {
					restart = crash()
				}
				for i := range 3 {
					sb := w.create(onWorkspace("data", 0))
					restart()
					w.until(sb.VMID, agentlab.SandboxReady)
					if got := w.leases("data"); len(got) != 1 || got[0] != sb.VMID || w.attachedTo("data") != sb.UID {
						t.Fatalf("leases %v, attached to %q", got, w.attachedTo("data"))
					}
					w.sh(sb, fmt.Sprintf("echo %d > /work/%d", i, i))
					if restart = func() {}; c.op == fake.OpDestroy {
						restart = crash()
					}
					must(w.svc.Destroy(context.Background(), sb.VMID))(t)
					restart()
					w.until(sb.VMID, agentlab.SandboxDestroyed)
					if w.attachedTo("data") != "" || len(w.leases("data")) != 0 {
						t.Fatalf("left: attached to %q, leases %v", w.attachedTo("data"), w.leases("data"))
					}
					if restart = func() {}; c.op != fake.OpDestroy && c.op != fake.OpCreateVolume {
						restart = crash()
					}
				}
				sb := w.create(onWorkspace("data", 0))
				restart()
				w.until(sb.VMID, agentlab.SandboxReady)
				if got := w.sh(sb, "cat /work/0 /work/1 /work/2"); got != "0\n1\n2" {
					t.Errorf("the files are %q", got)
				}
			})
		})
	}
}

// Sandboxes get a workspace in the order of their requests, one at a time, and no
// request is forgotten, also over restarts of the daemon.
func TestQueueForAWorkspace(t *testing.T) {
	inWorld(t, func(w *world) {
		t := w.T
		w.until(w.create(onWorkspace("data", 0)).VMID, agentlab.SandboxReady)
		for range 20 {
			w.create(onWorkspace("data", time.Hour))
			synctest.Wait()
		}
		queue := w.leases("data")
		if len(queue) != 21 {
			t.Fatalf("leases %v", queue)
		}
		for i, vmid := range queue {
			w.until(vmid, agentlab.SandboxReady)
			if got := w.leases("data"); len(got) != len(queue)-i || got[0] != vmid || w.attachedTo("data") != w.get(vmid).UID {
				t.Fatalf("leases %v, want %v", got, queue[i:])
			}
			for _, other := range queue[i+1:] {
				if sb := w.get(other); sb.State != agentlab.SandboxRequested {
					t.Fatalf("%+v", sb)
				}
			}
			if i%5 == 0 {
				w.restart()
			}
			w.gone(vmid)
		}
	})
}

// The steps of leases and the time that each waited are in the events, and their number
// in the database: metrics are made of both.
func TestLeasesAreCounted(t *testing.T) {
	inWorld(t, func(w *world) {
		t := w.T
		count := func(acquired, queued int) {
			t.Helper()
			got := must(w.store.CountWorkspaceLeases(t.Context()))(t)
			if got[agentlab.LeaseStepAcquired] != acquired || got[agentlab.LeaseStepQueued] != queued {
				t.Errorf("leases %v, want %d acquired and %d queued", got, acquired, queued)
			}
		}
		first := w.create(onWorkspace("data", 0))
		w.until(first.VMID, agentlab.SandboxReady)
		second := w.create(onWorkspace("data", time.Hour))
		count(1, 1)
		time.Sleep(5 * time.Minute)
		w.gone(first.VMID)
		w.until(second.VMID, agentlab.SandboxReady)
		count(1, 0)
		if ready, size := must(w.store.CountWorkspaces(t.Context()))(t), must(w.store.WorkspaceGB(t.Context()))(t); ready[agentlab.WorkspaceReady] != 1 || size[agentlab.WorkspaceReady] != 2 {
			t.Errorf("workspaces %v, GiB %v", ready, size)
		}
		w.gone(second.VMID)
		count(0, 0)
		var steps []agentlab.LeaseStep
		var waited []float64
		for _, e := range w.events(agentlab.EventWorkspaceLease) {
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
	inWorld(t, func(w *world) {
		t := w.T
		first := w.create(onWorkspace("data", 0))
		w.until(first.VMID, agentlab.SandboxReady)
		late, next := w.create(onWorkspace("data", time.Minute)), w.create(onWorkspace("data", time.Hour))
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if sb := w.get(late.VMID); sb.State != agentlab.SandboxFailed || !strings.Contains(sb.Reason, "was not free within 1m") {
			t.Errorf("%+v", sb)
		}
		if got := w.leases("data"); len(got) != 2 || got[1] != next.VMID {
			t.Errorf("leases %v", got)
		}
		w.gone(next.VMID)
		if got := w.leases("data"); len(got) != 1 || got[0] != first.VMID {
			t.Errorf("leases %v", got)
		}
	})
}

// A stopped sandbox that waits for a workspace gives its place up too.
func TestWaitOfAStoppedSandboxEnds(t *testing.T) {
	inWorld(t, func(w *world) {
		t := w.T
		first, stopped := w.create(onWorkspace("data", 0)), w.create(agentlab.SandboxRequest{})
		w.until(first.VMID, agentlab.SandboxReady)
		w.until(stopped.VMID, agentlab.SandboxReady)
		must(w.svc.Stop(context.Background(), stopped.VMID, 0))(t)
		w.until(stopped.VMID, agentlab.SandboxStopped)
		must(w.workspaces.Attach(context.Background(), stopped.VMID, agentlab.WorkspaceSelection{Workspace: "data", Wait: time.Minute}))(t)
		next := w.create(onWorkspace("data", time.Hour))
		time.Sleep(20 * time.Minute)
		synctest.Wait()
		if got := w.leases("data"); len(got) != 2 || got[1] != next.VMID || !w.sawRefusal("was not free within 1m") {
			t.Errorf("leases %v", got)
		}
		if sb := w.get(stopped.VMID); sb.Workspace != "" || sb.State != agentlab.SandboxStopped {
			t.Errorf("%+v", sb)
		}
		w.gone(first.VMID)
		w.until(next.VMID, agentlab.SandboxReady)
	})
}

// A workspace whose file system is missing, although a guest has used it, is not made
// again.
func TestLostFileSystem(t *testing.T) {
	inWorld(t, func(w *world) {
		t := w.T
		sb := w.create(onWorkspace("data", 0))
		w.until(sb.VMID, agentlab.SandboxReady)
		w.sh(sb, "rm /work/lost+found")
		w.gone(sb.VMID)
		sb = w.create(onWorkspace("data", 0))
		w.until(sb.VMID, agentlab.SandboxFailed)
		if got := w.get(sb.VMID); !strings.Contains(got.Reason, "cannot be mounted") {
			t.Errorf("%+v", got)
		}
		synctest.Wait()
		if got := w.leases("data"); len(got) != 0 || w.attachedTo("data") != "" {
			t.Errorf("a failed sandbox keeps it: %v", got)
		}
	})
}

func TestAttachAndDetach(t *testing.T) {
	inWorld(t, func(w *world) {
		t := w.T
		first := w.create(onWorkspace("data", 0))
		w.until(first.VMID, agentlab.SandboxReady)
		w.sh(first, "echo hello > /work/note")
		w.sh(first, "echo x > /work/busy")
		detach := func(force bool) {
			if _, err := w.workspaces.Release(context.Background(), "data", force); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		detach(false)
		if got := w.leases("data"); len(got) != 1 || !w.sawRefusal("sleep (42)") {
			t.Errorf("a busy workspace was detached: %v", got)
		}
		if _, err := w.snaps.SaveSnapshot(context.Background(), first.VMID, "x", false); agentlab.CodeOf(err) != agentlab.CodeConflict {
			t.Errorf("saved with a workspace: %v", err)
		}
		detach(true)
		if got := w.leases("data"); len(got) != 0 || w.attachedTo("data") != "" || w.get(first.VMID).Workspace != "" || w.get(first.VMID).State != agentlab.SandboxReady {
			t.Errorf("leases %v, %+v", got, w.get(first.VMID))
		}
		second := w.create(agentlab.SandboxRequest{})
		w.until(second.VMID, agentlab.SandboxReady)
		sel := agentlab.WorkspaceSelection{Workspace: "data"}
		if _, err := w.workspaces.Attach(context.Background(), second.VMID, sel); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got := w.sh(second, "cat /work/note"); got != "hello" || w.attachedTo("data") != second.UID {
			t.Errorf("the note is %q", got)
		}
		if _, err := w.workspaces.Attach(context.Background(), first.VMID, sel); agentlab.CodeOf(err) != agentlab.CodeConflict {
			t.Errorf("attached twice: %v", err)
		}
		for what, fn := range map[string]func() error{
			"resize":   func() error { _, err := w.workspaces.Resize(context.Background(), "data", 4); return err },
			"delete":   func() error { _, err := w.workspaces.Delete(context.Background(), "data", false); return err },
			"fork":     func() error { _, err := w.workspaces.Fork(context.Background(), "data", "copy", ""); return err },
			"snapshot": func() error { _, err := w.workspaces.SaveSnapshot(context.Background(), "data", "x", ""); return err },
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
		inWorld(t, func(w *world) {
			t := w.T
			var wg sync.WaitGroup
			var mu sync.Mutex
			made := 0
			for range 20 {
				wg.Go(func() {
					_, err := w.svc.Create(context.Background(), onWorkspace("data", c.wait))
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
			if made != c.want || len(w.leases("data")) != c.want {
				t.Errorf("%d sandboxes were created, want %d", made, c.want)
			}
		})
	}
}

// A maintenance sandbox has a workspace, and neither a network nor a bootstrap
// document. Its guest mounts the workspace only if that is requested.
func TestMaintenanceSandbox(t *testing.T) {
	inWorld(t, func(w *world) {
		t := w.T
		request := func(kind string) agentlab.SandboxRequest {
			r := onWorkspace("data", 0)
			r.Maintenance = kind
			return r
		}
		for _, r := range []agentlab.SandboxRequest{request("other"), {Maintenance: agentlab.MaintenanceDisk}} {
			if _, err := w.svc.Create(t.Context(), r); agentlab.CodeOf(err) != agentlab.CodeInvalid {
				t.Errorf("%+v: %v", r, err)
			}
		}
		sb := w.create(request(agentlab.MaintenanceDisk))
		w.until(sb.VMID, agentlab.SandboxReady)
		if v := w.workspaceOf("data"); v.Formatted || w.attachedTo("data") != sb.UID {
			t.Errorf("its guest has mounted it: %+v", v)
		}
		if sb = w.get(sb.VMID); sb.Network.Mode != agentlab.NetworkOff || sb.Keepalive || !sb.Maintenance() {
			t.Errorf("%+v", sb)
		}
		if list := must(w.svc.ReloadNetworks(t.Context(), []int{sb.VMID}))(t); list[0].Err == nil {
			t.Error("it got the policy of a profile")
		}
		w.restart()
		w.until(sb.VMID, agentlab.SandboxReady)
		if w.workspaceOf("data").Formatted {
			t.Error("its guest has mounted it after a restart")
		}
		w.gone(sb.VMID)
		sb = w.create(request(agentlab.MaintenanceFiles))
		w.until(sb.VMID, agentlab.SandboxReady)
		if !w.workspaceOf("data").Formatted {
			t.Error("its guest has not mounted it")
		}
		w.gone(sb.VMID)
		if w.attachedTo("data") != "" {
			t.Error("the workspace is still attached")
		}
	})
}

// The guest of a sandbox that is destroyed writes its workspace first, however its job
// or its lease has ended.
func TestWorkspaceIsWrittenBeforeTheEnd(t *testing.T) {
	ended := func(status agentlab.JobStatus) func(*world, agentlab.Sandbox) {
		return func(w *world, sb agentlab.Sandbox) {
			must(w.svc.Release(context.Background(), sb.VMID, sandbox.Outcome{Status: status}))(w.T)
		}
	}
	for name, end := range map[string]func(*world, agentlab.Sandbox){
		"completed": ended(agentlab.JobCompleted), "failed": ended(agentlab.JobFailed), "time limit": ended(agentlab.JobTimeout), "lease": func(*world, agentlab.Sandbox) {},
	} {
		for _, job := range []string{"", "job-1"} {
			t.Run(name+job, func(t *testing.T) {
				inWorld(t, func(w *world) {
					t := w.T
					r := onWorkspace("data", 0)
					r.JobID = job
					sb := w.create(r)
					w.until(sb.VMID, agentlab.SandboxReady)
					w.sh(sb, "echo hello > /work/unwritten")
					end(w, sb)
					w.until(sb.VMID, agentlab.SandboxDestroyed)
					next := w.create(onWorkspace("data", 0))
					w.until(next.VMID, agentlab.SandboxReady)
					if got := w.sh(next, "cat /work/written"); got != "hello" {
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
	inWorld(t, func(w *world) {
		t := w.T
		sb := w.create(onWorkspace("data", 0))
		w.until(sb.VMID, agentlab.SandboxReady)
		w.sh(sb, "echo x > /work/busy")
		lost := w.host.Inject(fake.Fault{Op: fake.OpAttachVolume, Err: agentlab.Errorf(agentlab.CodeNotFound, "there is no such volume")})
		w.restart()
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := w.leases("data"); len(got) != 1 || w.attachedTo("data") != sb.UID {
			t.Fatalf("it was detached: leases %v, attached to %q", got, w.attachedTo("data"))
		}
		w.sh(sb, "rm /work/busy; echo hello > /work/unwritten")
		lost()
		time.Sleep(time.Minute)
		w.gone(sb.VMID)
		next := w.create(onWorkspace("data", 0))
		w.until(next.VMID, agentlab.SandboxReady)
		if got := w.sh(next, "cat /work/written"); got != "hello" {
			t.Errorf("it is lost: %q", got)
		}
	})
}
