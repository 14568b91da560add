package job_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/gc"
)

// TestDaemonDies kills the daemon at each stage of a job. The job goes on and
// completes, with all of its log, once.
func TestDaemonDies(t *testing.T) {
	const task = "echo one\nsleep 20s\necho two\nartifact a.txt text\necho three"
	check := func(w *world, id string) {
		w.Helper()
		j := w.final(id)
		if j.Status != agentlab.JobCompleted {
			w.Errorf("%s: %s", j.Status, j.Reason)
		}
		if got := w.log(id); got != "one\ntwo\nthree\n" {
			w.Errorf("log %q", got)
		}
		if a, err := w.artifacts.List(context.Background(), id); err != nil || len(a) != 1 {
			w.Errorf("artifacts %v, %v", a, err)
		}
		if n := w.host.Calls(fake.OpStart); n > 2 {
			w.Errorf("the VM was started %d times", n)
		}
	}
	for _, p := range []struct {
		op fake.Op
		at fake.Point
	}{
		{fake.OpCreate, fake.Before}, {fake.OpCreate, fake.Half}, {fake.OpCreate, fake.After},
		{fake.OpListenGuest, fake.Before}, {fake.OpStart, fake.Before}, {fake.OpStart, fake.After},
		{fake.OpInspect, fake.Before}, {fake.OpDialControl, fake.Before},
		{fake.OpDestroy, fake.Before}, {fake.OpDestroy, fake.Half}, {fake.OpDestroy, fake.After},
	} {
		t.Run(string(p.op)+"/"+string(p.at), func(t *testing.T) {
			inWorld(t, func(w *world) {
				reachable := make(chan struct{})
				once := sync.OnceFunc(func() { close(reachable) })
				w.host.Inject(fake.Fault{Op: p.op, At: p.at, Times: 1, Crash: true, Hook: func(backend.Spec) { once() }})
				j := w.run(agentlab.JobRequest{Task: task})
				<-reachable
				w.restart()
				check(w, j.ID)
			})
		})
	}
	for _, stage := range []struct {
		name  string
		until func(w *world, id string) bool
		away  time.Duration
	}{
		{"queued", func(*world, string) bool { return true }, 0},
		{"booting", func(w *world, id string) bool { return w.sandbox(id).State == agentlab.SandboxBooting }, 0},
		{"running", func(w *world, id string) bool { return w.job(id).Phase == "agent" }, 0},
		{"running, away while it ends", func(w *world, id string) bool { return w.job(id).Phase == "agent" }, 30 * time.Minute},
		{"final", func(w *world, id string) bool { return w.job(id).Status.Final() }, 0},
		{"every 300 ms", nil, 0},
	} {
		t.Run(stage.name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				j := w.run(agentlab.JobRequest{Task: task})
				if stage.until == nil {
					for range 90 {
						time.Sleep(300 * time.Millisecond)
						w.restart()
					}
				} else {
					w.eventually(stage.name, func() bool { return stage.until(w, j.ID) })
					w.kill()
					time.Sleep(stage.away)
					w.begin()
				}
				check(w, j.ID)
			})
		})
	}
}

// A fault of the driver that passes is no fault of the job; one that stays
// ends it with the reason, and nothing is left.
func TestDriverFaults(t *testing.T) {
	for _, op := range []fake.Op{fake.OpCreate, fake.OpStart, fake.OpListenGuest, fake.OpInspect, fake.OpDialControl, fake.OpDestroy} {
		for _, code := range []agentlab.Code{agentlab.CodeBusy, agentlab.CodeUnavailable, agentlab.CodeUnknownOutcome, agentlab.CodeDenied, agentlab.CodeNoSpace} {
			t.Run(fmt.Sprintf("%s/%s", op, code), func(t *testing.T) {
				inWorld(t, func(w *world) {
					w.host.Inject(fake.Fault{Op: op, Times: 2, Err: agentlab.Errorf(code, "injected %s", code)})
					j := w.run(agentlab.JobRequest{Task: "echo x"})
					j = w.final(j.ID)
					stays := code == agentlab.CodeDenied || code == agentlab.CodeNoSpace
					creating := op == fake.OpCreate || op == fake.OpStart || op == fake.OpListenGuest
					if stays && creating {
						if want := "its sandbox failed: it could not be created: injected " + string(code); j.Status != agentlab.JobFailed || j.Reason != want {
							w.Errorf("%s: %q, want FAILED: %q", j.Status, j.Reason, want)
						}
					} else if j.Status != agentlab.JobCompleted {
						w.Errorf("%s: %s", j.Status, j.Reason)
					}
				})
			})
		}
	}
}

// Things done to the sandbox of a job end the job.
func TestSandboxChangeEndsJob(t *testing.T) {
	for name, test := range map[string]struct {
		do     func(w *world, vmid int) error
		reason string
	}{
		"destroyed": {func(w *world, vmid int) error { _, err := w.sandboxes.Destroy(context.Background(), vmid); return err }, "its sandbox was destroyed"},
		"stopped": {func(w *world, vmid int) error {
			_, err := w.sandboxes.Stop(context.Background(), vmid, time.Second)
			return err
		}, "its sandbox was stopped"},
	} {
		for _, phase := range []string{"", "agent"} {
			t.Run(name+"/"+phase, func(t *testing.T) {
				inWorld(t, func(w *world) {
					j := w.run(agentlab.JobRequest{Task: "hang"})
					w.eventually("booting", func() bool { return w.sandbox(j.ID).State == agentlab.SandboxBooting })
					w.phase(j.ID, phase)
					if err := test.do(w, w.sandbox(j.ID).VMID); err != nil {
						w.Fatal(err)
					}
					j = w.final(j.ID)
					if j.Status != agentlab.JobFailed || j.Reason != test.reason {
						w.Errorf("%s: %q, want FAILED: %q", j.Status, j.Reason, test.reason)
					}
				})
			})
		}
	}
}

// A stop of the sandbox before the job began is not the end of the job, even
// if the clock was set back in between.
func TestStopBeforeTheJobBegan(t *testing.T) {
	inWorld(t, func(w *world) {
		j := w.run(agentlab.JobRequest{Task: "echo x"})
		w.eventually("booting", func() bool { return w.sandbox(j.ID).State == agentlab.SandboxBooting })
		sb := w.sandbox(j.ID)
		sb.State, sb.Reason, sb.UpdatedAt = agentlab.SandboxStopped, "the host was restarted", time.Now().Add(time.Hour)
		w.jobs.Committed(agentlab.Commit{Sandboxes: []agentlab.Sandbox{sb}})
		if j = w.final(j.ID); j.Status != agentlab.JobCompleted {
			w.Errorf("%s: %s", j.Status, j.Reason)
		}
	})
}

// A sandbox whose job was never written, because the daemon died between the
// two, is destroyed by the next one.
func TestSandboxWithoutJob(t *testing.T) {
	inWorld(t, func(w *world) {
		sb, err := w.sandboxes.Create(context.Background(), agentlab.SandboxRequest{JobID: agentlab.NewJobID()})
		if err != nil {
			w.Fatal(err)
		}
		time.Sleep(time.Second) // its guest has not answered yet
		w.restart()
		w.gone(sb.JobID)
	})
}

// A sandbox that has been in use is not destroyed because its job has no row,
// also while it boots again. It ends with its lease.
func TestUsedSandboxWithoutJobRow(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		j := w.final(w.run(agentlab.JobRequest{Task: "echo x", Keepalive: new(true), TTL: 4 * time.Hour}).ID)
		vmid := w.sandbox(j.ID).VMID
		state := func(want agentlab.SandboxState) {
			w.Helper()
			w.eventually(string(want), func() bool {
				sb, err := w.store.Sandbox(ctx, vmid)
				if err != nil || sb.State == agentlab.SandboxDestroyed {
					w.Fatalf("%s, %v, want %s", sb.State, err, want)
				}
				return sb.State == want
			})
		}
		state(agentlab.SandboxCompleted)
		if err := w.store.DeleteJob(ctx, j.ID); err != nil {
			w.Fatal(err)
		}
		w.restart()
		time.Sleep(time.Minute)
		state(agentlab.SandboxCompleted)
		if _, err := w.sandboxes.Stop(ctx, vmid, 0); err != nil {
			w.Fatal(err)
		}
		state(agentlab.SandboxStopped)
		if _, err := w.sandboxes.Start(ctx, vmid); err != nil {
			w.Fatal(err)
		}
		state(agentlab.SandboxBooting)
		w.restart()
		state(agentlab.SandboxReady)
		time.Sleep(30 * time.Hour) // the lease and its grace
		w.gone(j.ID)
	})
}

func TestLocalRepo(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("skipped: there is no git to make a bundle with")
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "repo.bundle")
	for _, args := range [][]string{
		{"init", "-q", "-b", "main", dir},
		{"-C", dir, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "--allow-empty", "-m", "x"},
		{"-C", dir, "bundle", "create", "-q", file, "main", "HEAD"},
	} {
		if out, err := exec.Command("git", args...).CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	inWorld(t, func(w *world) {
		ctx := context.Background()
		b, err := w.artifacts.PutBundle(ctx, bytes.NewReader(data))
		if err != nil {
			w.Fatal(err)
		}
		j := w.run(agentlab.JobRequest{Task: "repo\nsleep 1h", BundleID: b.ID, TTL: 2 * time.Hour})
		if !j.Bundled || j.RepoURL != "" {
			w.Errorf("%+v", j)
		}
		_, err = w.jobs.Create(ctx, agentlab.JobRequest{Task: "repo", BundleID: b.ID})
		wantCode(t, err, agentlab.CodeNotFound)
		w.phase(j.ID, "agent")
		collector := gc.New(gc.Config{Store: w.store, Files: w.artifacts, Sweepers: []gc.Sweeper{w.artifacts}, Jobs: w.jobs})
		if _, err := collector.Pass(ctx); err != nil {
			w.Error(err)
		}
		if j = w.final(j.ID); j.Status != agentlab.JobCompleted {
			w.Errorf("%s: %s", j.Status, j.Reason)
		}
		if got := w.log(j.ID); got != fmt.Sprintf("repository bundle of %d bytes\n", len(data)) {
			w.Errorf("log %q", got)
		}
		if _, _, err := w.artifacts.RepoBundle(ctx, j.ID); err == nil {
			w.Error("the bundle is kept after the end")
		}
	})
}

// retention is how long the artifacts of profiles are kept.
type retention map[string]time.Duration

func (r retention) ArtifactTTL(profile string) time.Duration { return r[profile] }

// TestRetention runs jobs and lets years pass.
func TestRetention(t *testing.T) {
	const day = time.Hour // all periods have the same scale; guests ask for news all the time
	inWorld(t, func(w *world) {
		ctx := context.Background()
		collector := gc.New(gc.Config{
			Store: w.store, Files: w.artifacts, Sweepers: []gc.Sweeper{w.artifacts}, Jobs: w.jobs,
			Profiles:  retention{"dark": 5 * day},
			Artifacts: 30 * day, Events: 60 * day, Rows: 90 * day,
		})
		pass := func() gc.Deleted {
			w.Helper()
			d, err := collector.Pass(ctx)
			if err != nil {
				w.Fatal(err)
			}
			return d
		}
		dark := w.profiles.get("dark")
		dark.UploadArtifacts = true
		w.profiles.set("dark", dark)
		long := w.final(w.run(agentlab.JobRequest{Task: "echo x\nartifact a.txt text"}).ID)
		short := w.final(w.run(agentlab.JobRequest{Task: "echo x\nartifact a.txt text", Profile: "dark"}).ID)
		hand, err := w.sandboxes.Create(ctx, agentlab.SandboxRequest{TTL: 20 * day})
		if err != nil {
			w.Fatal(err)
		}
		kept := w.final(w.run(agentlab.JobRequest{Task: "echo x", Keepalive: new(true)}).ID)
		renew := func(after time.Duration) {
			w.Helper()
			for ; after > 0; after -= day / 2 {
				if _, err := w.sandboxes.RenewLease(ctx, w.sandbox(kept.ID).VMID, day); err != nil {
					w.Fatal(err)
				}
				time.Sleep(day / 2)
			}
		}
		has := func(id string) bool {
			a, err := w.artifacts.List(ctx, id)
			return err == nil && len(a) > 0 && w.log(id) != ""
		}
		if pass(); !has(long.ID) || !has(short.ID) {
			w.Error("artifacts were deleted on the first day")
		}
		renew(6 * day)
		if d := pass(); d.Artifacts != 1 || !has(long.ID) || has(short.ID) {
			w.Errorf("after 6 days %+v", d)
		}
		if d := pass(); d != (gc.Deleted{}) {
			w.Errorf("a second pass deleted %+v", d)
		}
		renew(25 * day)
		if d := pass(); d.Artifacts != 1 || d.Jobs != 0 || d.Sandboxes != 0 || has(long.ID) {
			w.Errorf("after 31 days %+v", d)
		}
		if sb, err := w.store.Sandbox(ctx, hand.VMID); err != nil || sb.State != agentlab.SandboxDestroyed {
			w.Errorf("the sandbox by hand: %+v, %v", sb, err)
		}
		renew(60 * day)
		if d := pass(); d.Jobs != 2 || d.Sandboxes != 2 || d.Events == 0 {
			w.Errorf("after 91 days %+v", d)
		}
		if _, err := w.store.Job(ctx, kept.ID); err != nil {
			w.Errorf("the job of a kept sandbox: %v", err)
		}
		if _, err := w.store.Job(ctx, long.ID); agentlab.CodeOf(err) != agentlab.CodeNotFound {
			w.Errorf("the old job is still there: %v", err)
		}
		out := 0
		w.mu.Lock()
		for _, e := range w.seen {
			if e.Kind == agentlab.EventGC && strings.HasPrefix(e.Message, "deleted 1 artifacts of job job-") && e.JobID != "" {
				out++
			}
		}
		w.mu.Unlock()
		if out != 2 {
			w.Errorf("%d deletions of artifacts were told of, want 2", out)
		}
	})
}
