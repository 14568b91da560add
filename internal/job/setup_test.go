package job_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
)

// setupJob requests a job on a sent repository whose setup logs a line "setup".
func (w *world) setupJob(repo, ref string, isDefault bool, sum byte) agentlab.JobRequest {
	w.Helper()
	w.host.SetSetup("echo setup")
	dir := w.TempDir()
	cmd := exec.Command("sh", "-c", `git init -q . && git -c user.name=t -c user.email=t@t commit -q --allow-empty -m x && git bundle create -q b HEAD --all`)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		w.Fatalf("%v: %s", err, out)
	}
	data, err := os.ReadFile(filepath.Join(dir, "b"))
	if err != nil {
		w.Fatal(err)
	}
	b, err := w.artifacts.PutBundle(context.Background(), bytes.NewReader(data))
	if err != nil {
		w.Fatal(err)
	}
	return agentlab.JobRequest{
		BundleID: b.ID, Task: "echo agent", Profile: "plain",
		Setup: &agentlab.SetupSource{Owner: "me", Repo: repo, Ref: ref, Default: isDefault, Sum: strings.Repeat(string("0123456789abcdef"[sum]), 64)},
	}
}

// setUp runs a job, and reports whether it continued the snapshot of an earlier one.
func (w *world) setUp(r agentlab.JobRequest) (j agentlab.Job, reused bool) {
	w.Helper()
	j = w.final(w.run(r).ID)
	if j.Status != agentlab.JobCompleted || !strings.HasSuffix("\n"+w.log(j.ID), "\nagent\n") {
		w.Fatalf("%s %q, log %q", j.Status, j.Reason, w.log(j.ID))
	}
	w.gone(j.ID)
	ran := strings.Count("\n"+w.log(j.ID), "\nsetup\n")
	p := w.preparation(j.ID)
	if p != nil {
		w.gone(p.ID)
		ran += strings.Count("\n"+w.log(p.ID), "\nsetup\n")
	}
	if ran > 1 || (ran == 0) != j.Setup.Reused || j.Setup.Reused && p != nil {
		w.Errorf("setup ran %d times; %+v", ran, j.Setup)
	}
	return j, j.Setup.Reused
}

func (w *world) entries(want int) []agentlab.Snapshot {
	w.Helper()
	list, err := w.snapshots.Setups(context.Background())
	if err != nil || len(list) != want {
		w.Fatalf("%d entries, want %d: %+v %v", len(list), want, list, err)
	}
	return list
}

func TestSecondJobSkipsSetup(t *testing.T) {
	inWorld(t, func(w *world) {
		first, reused := w.setUp(w.setupJob("h:/a", "main", true, 1))
		if reused || first.Fork == "" {
			w.Errorf("%+v", first)
		}
		made := w.entries(1)[0]
		if made.Setup.Repo != "h:/a" || made.Setup.Ref != "" || !made.Memory || made.UsedAt.IsZero() {
			w.Errorf("%+v", made)
		}
		time.Sleep(time.Minute)
		second, reused := w.setUp(w.setupJob("h:/a", "main", true, 1))
		if sb := w.sandbox(second.ID); !reused || sb.From.Snapshot != made.UID || w.entries(1)[0].UsedAt.Equal(made.UsedAt) {
			w.Errorf("%+v %+v; made %+v, now %+v", second.Setup, sb.From, made, w.entries(1)[0])
		}
		// Another daemon finds it.
		w.restart()
		if _, reused := w.setUp(w.setupJob("h:/a", "other", false, 1)); !reused {
			w.Error("a branch does not use the entry of the default branch")
		}
		w.entries(1)
	})
}

// No job uses an entry of something else.
func TestSetupScopes(t *testing.T) {
	inWorld(t, func(w *world) {
		big := w.profiles.get("plain")
		big.Resources.MemoryMB = 1024
		w.profiles.set("big", big)
		if _, reused := w.setUp(w.setupJob("h:/a", "hostile", false, 1)); reused {
			w.Fatal("reused nothing")
		}
		for name, change := range map[string]func(*agentlab.JobRequest){
			"another branch": func(r *agentlab.JobRequest) { r.Setup.Ref = "feature" },
			"repository":     func(r *agentlab.JobRequest) { r.Setup.Repo = "h:/b" },
			"owner":          func(r *agentlab.JobRequest) { r.Setup.Owner = "token x" },
			"inputs":         func(r *agentlab.JobRequest) { r.Setup.Sum = strings.Repeat("e", 64) },
			"profile":        func(r *agentlab.JobRequest) { r.Profile = "big" },
			"image":          func(r *agentlab.JobRequest) { r.Image = "agents" },
		} {
			r := w.setupJob("h:/a", "hostile", false, 1)
			change(&r)
			if _, reused := w.setUp(r); reused {
				w.Errorf("%s: it used the entry", name)
			}
		}
		if _, reused := w.setUp(w.setupJob("h:/a", "hostile", true, 1)); reused { // also if it has the name of the branch
			w.Error("the default branch used the entry of a branch")
		}
		if _, reused := w.setUp(w.setupJob("h:/a", "hostile", false, 1)); !reused {
			w.Error("the branch does not use its own entry")
		}
	})
}

// Whatever is wrong with an entry, the job runs setup itself.
func TestUnusableSetup(t *testing.T) {
	for name, c := range map[string]struct {
		cfg   fake.Config
		spoil func(w *world)
		fault fake.Fault
	}{
		"deleted":   {spoil: func(w *world) { _, _ = w.snapshots.DeleteSetups(context.Background(), "") }},
		"lost":      {spoil: func(w *world) { _ = w.host.Open().DeleteSnapshot(context.Background(), snapshotRefOf(w.entries(1)[0])) }},
		"no forks":  {cfg: fake.Config{NoForks: true}},
		"not saved": {fault: fake.Fault{Op: fake.OpSaveSnapshot, Err: agentlab.Errorf(agentlab.CodeInternal, "odd"), Times: 1}},
		"start": {spoil: func(w *world) {
			w.host.Inject(fake.Fault{Op: fake.OpStart, Err: agentlab.Errorf(agentlab.CodeUnsupported, "another QEMU"), Times: 1})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			inWorldOn(t, c.cfg, func(w *world) {
				if c.fault.Op != "" {
					w.host.Inject(c.fault)
				}
				for i := range 2 {
					id := w.run(w.setupJob("h:/a", "main", true, 1)).ID
					j := w.final(id)
					if j.Status != agentlab.JobCompleted {
						w.Fatalf("job %d: %s %q", i, j.Status, j.Reason)
					}
					w.gone(id)
					if c.spoil != nil && i == 0 {
						c.spoil(w)
					}
					if c.spoil != nil && i == 1 && strings.Count(w.log(id), "setup\n") != 1 && w.preparation(id) == nil {
						w.Errorf("setup did not run; %+v", j.Setup)
					}
					if name == "no forks" && (j.Setup.Note == "" || strings.Count(w.log(id), "setup\n") != 1) {
						w.Errorf("%+v, log %q", j.Setup, w.log(id))
					}
				}
			})
		})
	}
}

// A job that continued an entry and failed deletes it: the reason may be in it.
func TestFailedJobDropsSetup(t *testing.T) {
	inWorld(t, func(w *world) {
		w.setUp(w.setupJob("h:/a", "main", true, 1))
		r := w.setupJob("h:/a", "main", true, 1)
		r.Task = "exit 1"
		j := w.final(w.run(r).ID)
		if j.Status != agentlab.JobFailed || !j.Setup.Reused {
			w.Errorf("%s %+v", j.Status, j.Setup)
		}
		w.gone(j.ID)
		w.eventually("the entry is deleted", func() bool {
			list, err := w.snapshots.Setups(context.Background())
			return err == nil && len(list) == 0
		})
		if _, reused := w.setUp(w.setupJob("h:/a", "main", true, 1)); reused {
			w.Error("it was used again")
		}
	})
}

// A snapshot of a checkout with changes is used by its own job only.
func TestDirtySetup(t *testing.T) {
	inWorld(t, func(w *world) {
		r := w.setupJob("h:/a", "main", true, 1)
		w.host.SetSetup("echo setup\nwrite new file")
		id := w.run(r).ID
		if j := w.final(id); j.Status != agentlab.JobCompleted {
			w.Errorf("%s %q", j.Status, j.Reason)
		}
		w.gone(id)
		w.eventually("no snapshot is left", func() bool {
			rows, err := w.store.Snapshots(context.Background(), agentlab.SnapshotFilter{})
			return err == nil && len(rows) == 0
		})
	})
}

// The daemon is killed at each step of making an entry. The job completes, and what is
// left is an entry or nothing.
func TestKilledWhileSetupIsSaved(t *testing.T) {
	for name, f := range map[string]fake.Fault{
		"before":  {Op: fake.OpSaveSnapshot, Times: 1},
		"half":    {Op: fake.OpSaveSnapshot, At: fake.Half, Times: 1},
		"after":   {Op: fake.OpSaveSnapshot, At: fake.After, Times: 1},
		"destroy": {Op: fake.OpDestroy, Times: 1},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				release := make(chan struct{})
				f.Block = release
				before := w.host.Calls(f.Op)
				w.host.Inject(f)
				id := w.run(w.setupJob("h:/a", "main", true, 1)).ID
				w.eventually("the call", func() bool { return w.host.Calls(f.Op) > before })
				close(release)
				w.restart()
				if j := w.final(id); j.Status != agentlab.JobCompleted {
					w.Errorf("%s %q", j.Status, j.Reason)
				}
				w.gone(id)
				if _, reused := w.setUp(w.setupJob("h:/a", "main", true, 1)); !reused {
					w.entries(1)
				}
				w.eventually("one snapshot is left", func() bool {
					saved, err := w.host.Open().Snapshots(context.Background())
					return err == nil && len(saved) == len(w.entries(1))
				})
			})
		})
	}
}

// Entries that no job uses are deleted after a time.
func TestSetupExpires(t *testing.T) {
	inWorld(t, func(w *world) {
		w.setUp(w.setupJob("h:/a", "main", true, 1))
		time.Sleep(time.Hour)
		w.setUp(w.setupJob("h:/b", "main", true, 1))
		if n, err := w.snapshots.ExpireSnapshots(context.Background(), time.Now().Add(-30*time.Minute)); n != 1 || err != nil {
			w.Error(n, err)
		}
		w.eventually("one is left", func() bool {
			list, err := w.snapshots.Setups(context.Background())
			return err == nil && len(list) == 1 && list[0].Setup.Repo == "h:/b"
		})
	})
}

func snapshotRefOf(n agentlab.Snapshot) backend.SnapshotRef {
	return backend.SnapshotRef{UID: n.UID, Of: backend.Ref{UID: n.SandboxUID, Handle: n.Handle}}
}

// The least recently used entries are deleted when all together are too large.
func TestSetupsAreBounded(t *testing.T) {
	inWorld(t, func(w *world) {
		w.setupBytes = 4000 // two and a half of them
		w.restart()
		for _, repo := range []string{"h:/a", "h:/b", "h:/a", "h:/c"} {
			w.setUp(w.setupJob(repo, "main", true, 1))
			time.Sleep(time.Minute)
		}
		w.eventually("two are left", func() bool {
			list, err := w.snapshots.Setups(context.Background())
			return err == nil && len(list) == 2 && list[0].Setup.Repo == "h:/c" && list[1].Setup.Repo == "h:/a"
		})
		if saved, err := w.host.Open().Snapshots(context.Background()); err != nil || len(saved) != 2 {
			w.Errorf("%+v %v", saved, err)
		}
	})
}
