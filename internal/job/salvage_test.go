package job_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
)

// inKeepingWorld is inWorld with disks that are kept for a day, and a job that works on
// a repository.
func inKeepingWorld(t *testing.T, fn func(w *world, j agentlab.Job)) {
	t.Helper()
	inWorld(t, func(w *world) {
		w.salvage = 24 * time.Hour
		w.restart()
		ctx := context.Background()
		if err := w.vault.Set(ctx, "team", "env.API_KEY", strings.NewReader("sk-ant-0123456789abcdef"), false); err != nil {
			w.Fatal(err)
		}
		j := w.run(agentlab.JobRequest{Profile: "secrets", Task: "hang", RepoURL: "https://example.com/x/y"})
		w.phase(j.ID, "agent")
		fn(w, w.job(j.ID))
	})
}

// keptDisk waits until the sandbox of a job is off and kept.
func (w *world) keptDisk(id string) agentlab.Sandbox {
	w.Helper()
	w.eventually(id+" is kept", func() bool {
		sb := w.sandbox(id)
		if sb.State == agentlab.SandboxDestroyed {
			w.Fatalf("destroyed: %+v", sb)
		}
		return sb.Salvage && sb.State == agentlab.SandboxStopped
	})
	return w.sandbox(id)
}

// The disk of a job whose VM is lost is kept for its time, and the work is extracted
// from a copy of it: without a network, without secrets, and also if the daemon is
// killed at any time.
func TestSalvage(t *testing.T) {
	for _, killed := range []bool{false, true} {
		inKeepingWorld(t, func(w *world, j agentlab.Job) {
			ctx := context.Background()
			if _, err := w.jobs.Salvage(ctx, j.ID); agentlab.CodeOf(err) != agentlab.CodeConflict {
				w.Errorf("a running job: %v", err)
			}
			if err := w.host.CrashVM(w.ref(j.ID), "boom"); err != nil {
				w.Fatal(err)
			}
			if killed {
				w.restart()
			}
			sb := w.keptDisk(j.ID)
			ends := sb.LeaseExpiresAt
			if j = w.job(j.ID); j.Status != agentlab.JobFailed || ends.Sub(j.FinishedAt) < 24*time.Hour-time.Minute {
				w.Fatalf("%+v\n%+v", j, sb)
			}
			if _, err := w.sandboxes.Start(ctx, sb.VMID); agentlab.CodeOf(err) != agentlab.CodeConflict {
				w.Errorf("it can be started: %v", err)
			}
			if _, err := w.workspaces.Attach(ctx, sb.VMID, agentlab.WorkspaceSelection{Workspace: "data"}); agentlab.CodeOf(err) != agentlab.CodeConflict {
				w.Errorf("it can get a workspace: %v", err)
			}
			if again, err := w.sandboxes.Destroy(ctx, sb.VMID); err != nil || !again.Salvage || again.Desired != agentlab.DesiredStopped {
				w.Errorf("%+v, %v", again, err)
			}
			made := make(chan agentlab.Job, 5)
			for range cap(made) {
				go func() {
					out, err := w.jobs.Salvage(ctx, j.ID)
					if err != nil {
						w.Error(err)
					}
					made <- out
				}()
			}
			out := <-made
			for range cap(made) - 1 {
				if again := <-made; again.ID != out.ID {
					w.Errorf("%s and %s extract the same work", out.ID, again.ID)
				}
			}
			given := make(chan guestapi.BootstrapResponse, 10)
			w.seize.Store(new(func(resp guestapi.BootstrapResponse) { given <- resp }))
			if killed {
				w.eventually("the disk is copied", func() bool { return w.job(out.ID).Fork != "" })
				w.restart()
				w.seize.Store(nil)
			}
			w.eventually("its sandbox has started", func() bool { return w.job(out.ID).Status != agentlab.JobQueued })
			if copied := w.sandbox(out.ID); copied.Network.Mode != agentlab.NetworkOff || copied.Salvage || copied.From.Sandbox != sb.UID {
				w.Errorf("%+v", copied)
			}
			if !killed {
				if seen := <-given; seen.Job == nil || !seen.Job.Salvage || !seen.Job.NoPush || len(seen.Env) > 0 || seen.Git != nil {
					w.Errorf("the guest got %+v, job %+v", seen, seen.Job)
				}
			}
			if _, err := w.jobs.Report(ctx, w.sandbox(out.ID).VMID, guestapi.Report{Status: "COMPLETED", Phase: "done"}); err != nil {
				w.Fatal(err)
			}
			if out = w.final(out.ID); out.Status != agentlab.JobCompleted || out.Salvages != j.ID || out.Branch != "agentlab/"+j.ID {
				w.Errorf("%+v", out)
			}
			w.eventually("the copy is deleted", func() bool {
				list, err := w.store.Snapshots(ctx, agentlab.SnapshotFilter{})
				return err == nil && len(list) == 0
			})
			if sb := w.keptDisk(j.ID); !sb.LeaseExpiresAt.Equal(ends) {
				w.Errorf("the time of the disk changed to %s", sb.LeaseExpiresAt)
			}
			time.Sleep(time.Until(ends) + time.Minute)
			w.gone(j.ID)
			if _, err := w.jobs.Salvage(ctx, j.ID); agentlab.CodeOf(err) != agentlab.CodeConflict {
				w.Errorf("a destroyed sandbox: %v", err)
			}
		})
	}
}

// Whatever ends a job before its work is stored, its disk is kept, and purging deletes
// it.
func TestUnstoredWorkIsKept(t *testing.T) {
	for name, end := range map[string]func(w *world, j agentlab.Job) error{
		"destroy": func(w *world, j agentlab.Job) error {
			_, err := w.sandboxes.Destroy(context.Background(), j.SandboxVMID)
			return err
		},
		"cancel": func(w *world, j agentlab.Job) error {
			w.host.Inject(fake.Fault{Op: fake.OpDialControl, Err: agentlab.Errorf(agentlab.CodeUnavailable, "silent")})
			_, err := w.jobs.Cancel(context.Background(), j.ID)
			return err
		},
		"lease": func(w *world, j agentlab.Job) error {
			_, err := w.store.UpdateSandbox(context.Background(), j.SandboxVMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
				sb.LeaseExpiresAt = time.Now()
				return nil, nil
			})
			w.sandboxes.Wake(j.SandboxVMID)
			return err
		},
		"report": func(w *world, j agentlab.Job) error {
			_, err := w.jobs.Report(context.Background(), j.SandboxVMID, guestapi.Report{Status: "FAILED", Phase: "done", Message: "the bundle is too large",
				Result: &guestapi.Result{BaseCommit: strings.Repeat("1", 40), HeadCommit: strings.Repeat("2", 40), Commits: 1}})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			inKeepingWorld(t, func(w *world, j agentlab.Job) {
				if err := end(w, j); err != nil {
					w.Fatal(err)
				}
				sb := w.keptDisk(j.ID)
				w.eventually("the job ends", func() bool { return w.job(j.ID).Status.Final() })
				if in, err := w.host.Open().Inspect(context.Background(), w.ref(j.ID)); err != nil || in.Power != "stopped" {
					w.Errorf("%+v, %v", in, err)
				}
				if _, err := w.sandboxes.Purge(context.Background(), sb.VMID); err != nil {
					w.Fatal(err)
				}
				w.gone(j.ID)
			})
		})
	}
}

// Of the disks that are kept, the oldest are deleted when they need more than the limit of
// 100 GiB. A disk whose size is not known counts with 32 GiB.
func TestKeptDisksAreBounded(t *testing.T) {
	for gb, kept := range map[int]int{60: 1, 0: 3} {
		inKeepingWorld(t, func(w *world, j agentlab.Job) {
			p := w.profiles.get("plain")
			p.Resources.RootSizeGB = gb
			w.profiles.set("plain", p)
			var ids []string
			for range kept + 1 {
				large := w.run(agentlab.JobRequest{Task: "hang", RepoURL: "https://example.com/x/y"})
				w.phase(large.ID, "agent")
				ids = append(ids, large.ID)
			}
			for _, id := range ids {
				if err := w.host.CrashVM(w.ref(id), "boom"); err != nil {
					w.Fatal(err)
				}
				w.keptDisk(id)
				time.Sleep(time.Minute)
			}
			w.gone(ids[0])
			for _, id := range ids[1:] {
				w.keptDisk(id)
			}
			w.max = 1
			w.restart() // a kept one does not count
			if _, err := w.jobs.Cancel(context.Background(), j.ID); err != nil {
				w.Fatal(err)
			}
		})
	}
}

// A disk whose work is being extracted is not deleted before it is copied: neither at
// the end of its time nor because newer disks need the space.
func TestDiskIsKeptUntilItIsCopied(t *testing.T) {
	ctx, busy := context.Background(), agentlab.Errorf(agentlab.CodeUnavailable, "busy")
	for name, end := range map[string]func(w *world, sb agentlab.Sandbox){
		"lease": func(_ *world, sb agentlab.Sandbox) { time.Sleep(time.Until(sb.LeaseExpiresAt) + time.Minute) },
		"restart": func(w *world, sb agentlab.Sandbox) {
			w.kill()
			time.Sleep(time.Until(sb.LeaseExpiresAt) + time.Minute)
			w.restart()
		},
		"space": func(w *world, _ agentlab.Sandbox) {
			newer := w.run(agentlab.JobRequest{Task: "hang", RepoURL: "https://example.com/x/y"})
			w.phase(newer.ID, "agent")
			if err := w.host.CrashVM(w.ref(newer.ID), "boom"); err != nil {
				w.Fatal(err)
			}
			w.keptDisk(newer.ID)
			time.Sleep(time.Minute)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inKeepingWorld(t, func(w *world, _ agentlab.Job) {
				p := w.profiles.get("plain")
				p.Resources.RootSizeGB = 60
				w.profiles.set("plain", p)
				j := w.run(agentlab.JobRequest{Task: "hang", RepoURL: "https://example.com/x/y"})
				w.phase(j.ID, "agent")
				if err := w.host.CrashVM(w.ref(j.ID), "boom"); err != nil {
					w.Fatal(err)
				}
				sb := w.keptDisk(j.ID)
				time.Sleep(time.Until(sb.LeaseExpiresAt) - 3*time.Minute)
				copies := w.host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, Err: busy})
				out, err := w.jobs.Salvage(ctx, j.ID)
				if err != nil {
					w.Fatal(err)
				}
				w.eventually("the copy is requested", func() bool { return w.job(out.ID).Fork != "" })
				end(w, sb)
				time.Sleep(time.Minute)
				w.keptDisk(j.ID)
				copies()
				w.eventually("its sandbox has started", func() bool { // its runner may have ended, too
					out = w.job(out.ID)
					return out.Status == agentlab.JobRunning || out.Status.Final()
				})
				if !out.Status.Final() {
					if _, err := w.jobs.Report(ctx, w.sandbox(out.ID).VMID, guestapi.Report{Status: "COMPLETED", Phase: "done"}); err != nil && !w.job(out.ID).Status.Final() {
						w.Fatal(err)
					}
				}
				if out = w.final(out.ID); out.Status != agentlab.JobCompleted {
					w.Fatalf("%s: %s", out.Status, out.Reason)
				}
				if name == "space" { // at once
					w.eventually("the disk is deleted", func() bool { return w.sandbox(j.ID).Desired == agentlab.DesiredDestroyed })
					if left := time.Until(w.sandbox(j.ID).LeaseExpiresAt); left < 0 {
						t.Errorf("%s after the end of its time", -left)
					}
				}
				w.gone(j.ID)
				named := slices.DeleteFunc(w.events(agentlab.EventSandboxLease, j.ID), func(text string) bool {
					return !strings.Contains(text, "work of J that is not stored is deleted")
				})
				if len(named) != 1 {
					t.Errorf("events: %q", named)
				}
			})
		})
	}
}
