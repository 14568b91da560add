package job_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/job"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

func TestJobCompletes(t *testing.T) {
	inWorld(t, func(w *world) {
		began := time.Now()
		j := w.run(agentlab.JobRequest{Task: "echo hello\nartifact out/a.txt some text\necho bye"})
		if j.Status != agentlab.JobQueued || j.Agent != "shell" || j.Mode != "dangerous" || j.TTL != time.Hour {
			w.Fatalf("created %+v", j)
		}
		j = w.final(j.ID)
		if j.Status != agentlab.JobCompleted || j.Reason != "" || j.ExitCode == nil || *j.ExitCode != 0 || j.Phase != "done" {
			w.Fatalf("ended %+v", j)
		}
		if d := j.FinishedAt.Sub(began); d > 3*time.Second {
			w.Errorf("took %s, the guest boots in 2 s", d)
		}
		if got := w.log(j.ID); got != "hello\nbye\n" {
			w.Errorf("log %q", got)
		}
		a, err := w.artifacts.List(context.Background(), j.ID)
		if err != nil || len(a) != 1 || a[0].Path != "out/a.txt" || a[0].Size != 9 {
			w.Errorf("artifacts %v, %v", a, err)
		}
		want := []string{"job J is RUNNING", "job J is COMPLETED"}
		if got := w.events(agentlab.EventJobStatus, j.ID); !slices.Equal(got, want) {
			w.Errorf("status events %q", got)
		}
		want = []string{"job J: clone", "job J: agent", "job J: upload", "job J: done"}
		if got := w.events(agentlab.EventJobPhase, j.ID); !slices.Equal(got, want) {
			w.Errorf("phase events %q", got)
		}
		var states []string
		for _, m := range w.events(agentlab.EventSandboxState, j.ID) {
			states = append(states, m[strings.LastIndex(m, " ")+1:])
		}
		if got := strings.Join(states, " "); got != "PROVISIONING BOOTING READY RUNNING destroyed COMPLETED DESTROYED" && got != "PROVISIONING BOOTING READY RUNNING COMPLETED destroyed DESTROYED" {
			w.Errorf("sandbox went %s", got)
		}
	})
}

func TestJobEnds(t *testing.T) {
	for _, test := range []struct {
		name   string
		r      agentlab.JobRequest
		status agentlab.JobStatus
		reason string
		after  time.Duration // about
	}{
		{"fails", agentlab.JobRequest{Task: "exit 3"}, agentlab.JobFailed, "the agent exited with code 3", 0},
		{"fails like one that was killed", agentlab.JobRequest{Task: "exit 200", TTL: time.Minute}, agentlab.JobFailed, "the agent exited with code 200", 0},
		{"fails in its last minute", agentlab.JobRequest{Task: "sleep 9m30s\nexit 137", TTL: 10 * time.Minute}, agentlab.JobFailed, "the agent exited with code 137", 570 * time.Second},
		{"fails without an exit code", agentlab.JobRequest{Task: "sleep 50s\n" + `report {"status":"FAILED","phase":"done","message":"lost"}`, TTL: time.Minute}, agentlab.JobFailed, "lost", 50 * time.Second},
		{"claims too early that it was stopped", agentlab.JobRequest{Task: "sleep 50s\n" + `report {"status":"TIMEOUT","phase":"done"}`, TTL: time.Minute}, agentlab.JobFailed, "its runner stopped without a request", 50 * time.Second},
		{"was stopped by its own clock", agentlab.JobRequest{Task: "sleep 59s\n" + `report {"status":"TIMEOUT","phase":"done"}`, TTL: time.Minute}, agentlab.JobTimeout, "the time limit of 1m0s was exceeded", 59 * time.Second},
		{"unknown command", agentlab.JobRequest{Task: "rm -rf"}, agentlab.JobFailed, "the agent exited with code 127", 0},
		{"time is over", agentlab.JobRequest{Task: "hang", TTL: 10 * time.Minute}, agentlab.JobTimeout, "asked to stop: TIMEOUT", 10 * time.Minute},
		{"time is over, runner ignores it", agentlab.JobRequest{Task: "stubborn\nsilent", TTL: 10 * time.Minute}, agentlab.JobFailed, "its runner did not report for 1m30s", 90 * time.Second},
		{"VM crashes", agentlab.JobRequest{Task: "crash-vm"}, agentlab.JobFailed, "its sandbox failed: its VM has crashed: the guest's kernel panicked", 0},
		{"guest powers off", agentlab.JobRequest{Task: "poweroff"}, agentlab.JobFailed, "its sandbox was stopped: the guest powered itself off", 0},
		{"boot crashes", agentlab.JobRequest{Task: "true", Sandbox: &agentlab.SandboxRequest{Name: "crash-boots"}}, agentlab.JobFailed, "its sandbox failed: its VM crashed while it booted: kernel panic - not syncing: no working init found", 0},
		{"never boots", agentlab.JobRequest{Task: "true", Sandbox: &agentlab.SandboxRequest{Name: "never-boots"}}, agentlab.JobFailed, "its sandbox failed: its guest did not answer within 3m0s: the guest of sandbox 1000 does not answer yet", 180 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				began := time.Now()
				j := w.run(test.r)
				j = w.final(j.ID)
				if j.Status != test.status || j.Reason != test.reason {
					w.Errorf("%s: %q, want %s: %q", j.Status, j.Reason, test.status, test.reason)
				}
				_, console, err := w.artifacts.Open(context.Background(), j.ID, sandbox.ConsoleArtifact)
				if failed := strings.HasPrefix(test.reason, "its sandbox failed"); failed != (err == nil) {
					w.Errorf("the console log was saved: %v", err)
				}
				if err == nil {
					_ = console.Close()
				}
				if d := j.FinishedAt.Sub(began); d < test.after || d > test.after+10*time.Second {
					w.Errorf("ended after %s, want about %s", d, test.after)
				}
			})
		})
	}
}

// While the host has paused a guest, nothing is expected of its runner.
func TestPausedGuestIsNotSilent(t *testing.T) {
	inWorld(t, func(w *world) {
		j := w.run(agentlab.JobRequest{Task: "stubborn\nsilent", TTL: time.Hour})
		w.phase(j.ID, "agent")
		ref := w.ref(j.ID)
		if err := w.host.PauseVM(ref, "the host's disk is full"); err != nil {
			w.Fatal(err)
		}
		time.Sleep(10 * time.Minute)
		if now := w.job(j.ID); now.Status != agentlab.JobRunning {
			w.Fatalf("%s: %s", now.Status, now.Reason)
		}
		if err := w.host.PauseVM(ref, ""); err != nil {
			w.Fatal(err)
		}
		resumed := time.Now()
		j = w.final(j.ID)
		if d := j.FinishedAt.Sub(resumed); d < 75*time.Second || d > 100*time.Second {
			w.Errorf("%s after the guest went on: %s, %s", d, j.Status, j.Reason)
		}
	})
}

// While another backend is configured, nothing is expected of a runner either.
func TestRunnerOnAnotherBackendIsNotSilent(t *testing.T) {
	inWorld(t, func(w *world) {
		j := w.run(agentlab.JobRequest{Task: "stubborn\nsilent", TTL: time.Hour})
		w.phase(j.ID, "agent")
		was := w.sandbox(j.ID)
		move := func(name string) {
			_, err := w.store.UpdateSandbox(context.Background(), was.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
				sb.Backend = name
				return nil, nil
			})
			if err != nil {
				w.Fatal(err)
			}
			w.restart()
		}
		move("other")
		time.Sleep(10 * time.Minute)
		if now, sb := w.job(j.ID), w.sandbox(j.ID); now.Status != agentlab.JobRunning || sb.State != was.State || sb.Desired != was.Desired {
			w.Fatalf("%s: %s; sandbox %s", now.Status, now.Reason, sb.State)
		}
		move(was.Backend)
		if j = w.final(j.ID); j.Status != agentlab.JobFailed || j.Reason != "its runner did not report for 1m30s" {
			w.Errorf("%s: %s", j.Status, j.Reason)
		}
	})
}

// A runner that ignores its deadline is given up after the upload window.
func TestTimeoutIsForced(t *testing.T) {
	inWorld(t, func(w *world) {
		j := w.run(agentlab.JobRequest{Task: "stubborn\nhang", TTL: 10 * time.Minute})
		j = w.final(j.ID)
		if j.Status != agentlab.JobTimeout || j.Reason != "the time limit of 10m0s was exceeded; its runner did not report in time" {
			w.Errorf("%s: %s", j.Status, j.Reason)
		}
		if d := j.FinishedAt.Sub(j.StartedAt); d < 15*time.Minute || d > 15*time.Minute+time.Second {
			w.Errorf("ended %s after it began, want 10 min and the window of 5", d)
		}
	})
}

func TestCancel(t *testing.T) {
	ctx := context.Background()
	t.Run("queued", func(t *testing.T) {
		inWorld(t, func(w *world) {
			j := w.run(agentlab.JobRequest{Task: "hang"})
			w.sandbox(j.ID)
			j, err := w.jobs.Cancel(ctx, j.ID)
			if err != nil || j.Status != agentlab.JobCancelled {
				w.Fatalf("%+v, %v", j, err)
			}
			w.gone(j.ID)
			if again, err := w.jobs.Cancel(ctx, j.ID); err != nil || again.Status != agentlab.JobCancelled {
				w.Errorf("cancelling it again: %+v, %v", again, err)
			}
		})
	})
	t.Run("at once", func(t *testing.T) {
		inWorld(t, func(w *world) {
			j := w.run(agentlab.JobRequest{Task: "hang"})
			if _, err := w.jobs.Cancel(ctx, j.ID); err != nil {
				w.Fatal(err)
			}
			time.Sleep(10 * time.Minute)
			w.final(j.ID)
		})
	})
	t.Run("running", func(t *testing.T) {
		inWorld(t, func(w *world) {
			j := w.run(agentlab.JobRequest{Task: "echo before\nhang"})
			w.phase(j.ID, "agent")
			time.Sleep(20 * time.Minute)
			began := time.Now()
			if now, err := w.jobs.Cancel(ctx, j.ID); err != nil || now.Status != agentlab.JobRunning || now.StopRequested != "CANCELLED" {
				w.Fatalf("%+v, %v", now, err)
			}
			j = w.final(j.ID)
			if j.Status != agentlab.JobCancelled || j.FinishedAt.Sub(began) > time.Second {
				w.Errorf("%s after %s: %s", j.Status, j.FinishedAt.Sub(began), j.Reason)
			}
			if got := w.log(j.ID); got != "before\n" {
				w.Errorf("log %q", got)
			}
		})
	})
	t.Run("stubborn", func(t *testing.T) {
		inWorld(t, func(w *world) {
			j := w.run(agentlab.JobRequest{Task: "stubborn\nhang"})
			w.phase(j.ID, "agent")
			time.Sleep(time.Minute) // until it hangs
			began := time.Now()
			if _, err := w.jobs.Cancel(ctx, j.ID); err != nil {
				w.Fatal(err)
			}
			j = w.final(j.ID)
			if d := j.FinishedAt.Sub(began); j.Status != agentlab.JobCancelled || d < 2*time.Minute || d > 2*time.Minute+time.Second {
				w.Errorf("%s after %s: %s", j.Status, d, j.Reason)
			}
		})
	})
	t.Run("while it uploads after its time", func(t *testing.T) {
		inWorld(t, func(w *world) {
			j := w.run(agentlab.JobRequest{Task: "stubborn\nhang", TTL: 10 * time.Minute})
			w.phase(j.ID, "agent")
			time.Sleep(11 * time.Minute)
			if now := w.job(j.ID); now.Status != agentlab.JobRunning || now.StopRequested != "TIMEOUT" {
				w.Fatalf("%+v", now)
			}
			began := time.Now()
			j, err := w.jobs.Cancel(ctx, j.ID)
			if err != nil || j.Status != agentlab.JobTimeout || j.Reason != "the time limit of 10m0s was exceeded; its upload was cancelled by request" {
				w.Fatalf("%s: %s, %v", j.Status, j.Reason, err)
			}
			w.gone(j.ID)
			if d := time.Since(began); d > time.Minute {
				w.Errorf("its sandbox was gone after %s", d)
			}
		})
	})
	t.Run("ended", func(t *testing.T) {
		inWorld(t, func(w *world) {
			j := w.run(agentlab.JobRequest{Task: "exit 0"})
			w.final(j.ID)
			_, err := w.jobs.Cancel(ctx, j.ID)
			wantCode(t, err, agentlab.CodeConflict)
			_, err = w.jobs.Cancel(ctx, "job-aaaaaaaaaaaaa")
			wantCode(t, err, agentlab.CodeNotFound)
		})
	})
}

func TestKeepalive(t *testing.T) {
	for task, want := range map[string]agentlab.SandboxState{"exit 0": agentlab.SandboxCompleted, "exit 1": agentlab.SandboxReady} {
		t.Run(task, func(t *testing.T) {
			inWorld(t, func(w *world) {
				j := w.run(agentlab.JobRequest{Task: task, Keepalive: new(true)})
				w.final(j.ID)
				w.eventually("the sandbox is released", func() bool { return w.sandbox(j.ID).State == want })
				time.Sleep(30 * time.Minute)
				w.restart() // the new daemon finds it, and the final job
				time.Sleep(20 * time.Minute)
				sb := w.sandbox(j.ID)
				if sb.State != want {
					w.Fatalf("%s: %s", sb.State, sb.Reason)
				}
				c, err := w.sandboxes.DialGuest(context.Background(), sb.VMID, 7)
				if err != nil {
					w.Fatal(err)
				}
				_ = c.Close()
				// Started again it has a token, but its job is not run again.
				if _, err := w.sandboxes.Stop(context.Background(), sb.VMID, 0); err != nil {
					w.Fatal(err)
				}
				w.eventually("stopped", func() bool { return w.sandbox(j.ID).State == agentlab.SandboxStopped })
				before := w.job(j.ID)
				if _, err := w.sandboxes.Start(context.Background(), sb.VMID); err != nil {
					w.Fatal(err)
				}
				w.eventually("started", func() bool { return w.sandbox(j.ID).State == agentlab.SandboxReady })
				time.Sleep(time.Minute)
				if now := w.job(j.ID); now.UpdatedAt != before.UpdatedAt || w.sandbox(j.ID).State != agentlab.SandboxReady {
					w.Errorf("the final job changed: %+v", now)
				}
			})
		})
	}
}

func TestBadRequests(t *testing.T) {
	inWorld(t, func(w *world) {
		w.run(agentlab.JobRequest{Task: "hang", Sandbox: &agentlab.SandboxRequest{Name: "taken"}})
		for _, test := range []struct {
			name  string
			r     agentlab.JobRequest
			code  agentlab.Code
			field string
		}{
			{"no task", agentlab.JobRequest{}, agentlab.CodeInvalid, "task"},
			{"task without an agent", agentlab.JobRequest{Task: "x", Agent: agentlab.AgentNone, Sandbox: &agentlab.SandboxRequest{}}, agentlab.CodeInvalid, "task"},
			{"no agent and no sandbox", agentlab.JobRequest{Agent: agentlab.AgentNone}, agentlab.CodeInvalid, "agent"},
			{"agent", agentlab.JobRequest{Task: "x", Agent: "hal"}, agentlab.CodeInvalid, "agent"},
			{"profile", agentlab.JobRequest{Task: "x", Profile: "nope"}, agentlab.CodeNotFound, "profile"},
			{"image", agentlab.JobRequest{Task: "x", Image: "nope"}, agentlab.CodeNotFound, "image"},
			{"ttl", agentlab.JobRequest{Task: "x", TTL: time.Second}, agentlab.CodeInvalid, "ttl"},
			{"ref", agentlab.JobRequest{Task: "x", Ref: "--upload-pack"}, agentlab.CodeInvalid, "ref"},
			{"url", agentlab.JobRequest{Task: "x", RepoURL: "file:///etc"}, agentlab.CodeInvalid, "repo_url"},
			{"url and bundle", agentlab.JobRequest{Task: "x", RepoURL: "https://example.com/a.git", BundleID: "b"}, agentlab.CodeInvalid, "repo_url"},
			{"bundle", agentlab.JobRequest{Task: "x", BundleID: "bundle-nope"}, agentlab.CodeNotFound, "bundle_id"},
			{"secrets", agentlab.JobRequest{Task: "x", Profile: "nowhere"}, agentlab.CodeNotFound, "secrets_bundle"},
			{"mode", agentlab.JobRequest{Task: "x", Mode: "safe"}, agentlab.CodeInvalid, "mode"},
			{"name", agentlab.JobRequest{Task: "x", Sandbox: &agentlab.SandboxRequest{Name: "taken"}}, agentlab.CodeExists, "name"},
			{"cores", agentlab.JobRequest{Task: "x", Sandbox: &agentlab.SandboxRequest{Cores: 65}}, agentlab.CodeUnsupported, "resources.cores"},
		} {
			_, err := w.jobs.Create(context.Background(), test.r)
			if e, _ := err.(*agentlab.Error); e == nil || e.Code != test.code || e.Field != test.field {
				w.Errorf("%s: got %v, want code %s of field %s", test.name, err, test.code, test.field)
			}
		}
		all, err := w.jobs.List(context.Background(), agentlab.JobFilter{})
		if err != nil || len(all) != 1 {
			w.Errorf("refused requests left rows: %v, %v", all, err)
		}
	})
}

// Jobs wait for room, and get it in the order in which they came.
func TestRoom(t *testing.T) {
	inWorld(t, func(w *world) {
		w.max = 2
		w.restart()
		ids := make([]string, 6)
		for i := range ids {
			ids[i] = w.run(agentlab.JobRequest{Task: "sleep 5m"}).ID
			time.Sleep(time.Millisecond)
		}
		w.phase(ids[5], job.PhaseWaiting)
		_, err := w.sandboxes.Create(context.Background(), agentlab.SandboxRequest{})
		wantCode(t, err, agentlab.CodeLimit)
		began := time.Now()
		if _, err := w.jobs.Cancel(context.Background(), ids[4]); err != nil {
			w.Fatal(err)
		}
		var last time.Time
		for i, id := range ids {
			j := w.final(id)
			if i == 4 {
				continue
			}
			if j.Status != agentlab.JobCompleted || j.StartedAt.Before(last) {
				w.Errorf("job %d: %s (%s), started %s, the one before it %s", i, j.Status, j.Reason, j.StartedAt, last)
			}
			last = j.StartedAt
		}
		if d := time.Since(began); d > 16*time.Minute {
			w.Errorf("five jobs of 5 min, two at a time, took %s", d)
		}
	})
}
