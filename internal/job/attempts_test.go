package job_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// four are tasks of which the third is judged best.
var four = []string{
	"echo one\nartifact changes.diff d1\nartifact result.bundle b1\njudge exit 1; number 99",
	"echo two\nsleep 3m\nartifact changes.diff d2\nartifact result.bundle b2\njudge number 3",
	"echo three\nsleep 1m\nartifact changes.diff d3\nartifact result.bundle b3\nartifact attempts/1/changes.diff forged\nartifact outputs/x X\njudge number 7",
	"echo four\nexit 4",
}

func attempts(pick string, tasks ...string) agentlab.JobRequest {
	return agentlab.JobRequest{Attempts: &agentlab.JobAttempts{Count: len(tasks), Pick: pick, Tasks: tasks}}
}

// attemptsOf returns the attempts of a job after the end of their sandboxes.
func (w *world) attemptsOf(id string) []agentlab.Job {
	w.Helper()
	list, err := w.jobs.Attempts(context.Background(), id)
	if err != nil {
		w.Fatal(err)
	}
	return list
}

func (w *world) file(id, path string) string {
	w.Helper()
	_, r, err := w.artifacts.Open(context.Background(), id, path)
	if err != nil {
		return err.Error()
	}
	defer r.Close()
	var b bytes.Buffer
	if _, err := b.ReadFrom(r); err != nil {
		w.Fatal(err)
	}
	return b.String()
}

func (w *world) paths(id string) (out []string) {
	w.Helper()
	list, err := w.artifacts.List(context.Background(), id)
	if err != nil {
		w.Fatal(err)
	}
	for _, a := range list {
		out = append(out, a.Path)
	}
	return out
}

// wantThird checks the end of a job with the tasks of four.
func (w *world) wantThird(id string) {
	w.Helper()
	j := w.final(id)
	list := w.attemptsOf(id)
	for _, a := range list {
		w.final(a.ID)
	}
	if j.Status != agentlab.JobCompleted || j.Winner != 3 || j.Reason != "" || j.Result.Score == nil || *j.Result.Score != 7 || *j.Result.JudgeExit != 0 || *j.ExitCode != 0 {
		w.Errorf("%s, winner %d, %q, %+v", j.Status, j.Winner, j.Reason, j.Result)
	}
	want := []string{
		"attempts/1/agent.log", "attempts/1/changes.diff", "attempts/2/agent.log", "attempts/2/changes.diff",
		"attempts/3/agent.log", "attempts/3/changes.diff", "attempts/4/agent.log", "changes.diff", "outputs/x", "result.bundle",
	}
	if got := w.paths(id); !slices.Equal(got, want) {
		w.Errorf("artifacts %q", got)
	}
	for path, want := range map[string]string{
		"changes.diff": "d3", "result.bundle": "b3", "attempts/1/changes.diff": "d1", "attempts/2/changes.diff": "d2", "attempts/4/agent.log": "four\n",
	} {
		if got := w.file(id, path); got != want {
			w.Errorf("%s: %q", path, got)
		}
	}
	for i, want := range []agentlab.JobStatus{agentlab.JobCompleted, agentlab.JobCompleted, agentlab.JobCompleted, agentlab.JobFailed} {
		if list[i].Status != want {
			w.Errorf("attempt %d: %s %q", i+1, list[i].Status, list[i].Reason)
		}
	}
	if n := len(w.events(agentlab.EventJobStatus, id)); n != 2 {
		w.Errorf("status events %q", w.events(agentlab.EventJobStatus, id))
	}
	// A daemon that was killed can leave a file without its row.
	if n, err := w.artifacts.Sweep(context.Background(), w.jobs.Known); n > w.restarts || err != nil {
		w.Errorf("swept %d after %d restarts, %v", n, w.restarts, err)
	}
}

func TestBestAttemptWins(t *testing.T) {
	inWorld(t, func(w *world) {
		j := w.run(attempts("judge it", four...))
		if j.Status != agentlab.JobQueued || j.Attempts != 4 || j.SandboxVMID != 0 {
			w.Errorf("%+v", j)
		}
		w.wantThird(j.ID)
		won := 0
		for _, m := range w.events(agentlab.EventJobPhase, j.ID) {
			if m == "job J: attempt 3 (shell) won: judge exit 0, number 7" {
				won++
			}
		}
		if won != 1 {
			w.Errorf("events %q", w.events(agentlab.EventJobPhase, j.ID))
		}
	})
}

// The daemon dies at each stage, and again and again; the result is the same.
func TestDaemonDiesDuringAttempts(t *testing.T) {
	for name, until := range map[string]func(w *world, id string) bool{
		"queued":  func(*world, string) bool { return true },
		"running": func(w *world, id string) bool { return w.job(id).Status == agentlab.JobRunning },
		"one ended": func(w *world, id string) bool {
			return slices.ContainsFunc(w.attemptsOf(id), func(a agentlab.Job) bool { return a.Status.Final() })
		},
		"winner":     func(w *world, id string) bool { return w.job(id).Winner != 0 },
		"collecting": func(w *world, id string) bool { return len(w.paths(id)) > 2 },
		"final":      func(w *world, id string) bool { return w.job(id).Status.Final() },
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				id := w.run(attempts("judge it", four...)).ID
				w.eventually(name, func() bool { return until(w, id) })
				w.restart()
				w.wantThird(id)
			})
		})
	}
	t.Run("every 2 s", func(t *testing.T) {
		inWorld(t, func(w *world) {
			id := w.run(attempts("judge it", four...)).ID
			for range 90 {
				time.Sleep(2 * time.Second)
				w.restart()
			}
			w.wantThird(id)
		})
	})
}

func TestFirstAttemptWins(t *testing.T) {
	inWorld(t, func(w *world) {
		began := time.Now()
		id := w.run(attempts("", "sleep 10m", "exit 1", "echo done\nsleep 1m", "hang")).ID
		j := w.final(id)
		if j.Status != agentlab.JobCompleted || j.Winner != 3 || time.Since(began) > 5*time.Minute {
			w.Errorf("%s, winner %d after %s", j.Status, j.Winner, time.Since(began))
		}
		list := w.attemptsOf(id)
		for i, want := range []agentlab.JobStatus{agentlab.JobCancelled, agentlab.JobFailed, agentlab.JobCompleted, agentlab.JobCancelled} {
			if a := list[i]; a.Status != want || want == agentlab.JobCancelled && a.Reason != "attempt 3 won" {
				w.Errorf("attempt %d: %s %q", i+1, a.Status, a.Reason)
			}
			w.gone(list[i].ID)
		}
	})
}

func TestNoAttemptWins(t *testing.T) {
	for name, test := range map[string]struct {
		pick, first, last string
		reason            string
	}{
		"judged":   {"exit 2", "echo x", "judge exit 1; number 5", "no attempt won: 1 judge exit 2, 2 FAILED (exit 5), 3 FAILED, 4 judge exit 1, number 5"},
		"unjudged": {"", "exit 1", "crash-vm", "no attempt won: 1 FAILED (exit 1), 2 FAILED (exit 5), 3 FAILED, 4 FAILED"},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				j := w.final(w.run(attempts(test.pick, test.first, "exit 5", "crash-vm", test.last)).ID)
				if j.Status != agentlab.JobFailed || j.Reason != test.reason || j.Winner != 0 {
					w.Errorf("%s %q, winner %d", j.Status, j.Reason, j.Winner)
				}
			})
		})
	}
}

func TestCancelAttempts(t *testing.T) {
	for name, until := range map[string]func(w *world, id string) bool{
		"at once": func(*world, string) bool { return true },
		"running": func(w *world, id string) bool { return w.job(id).Status == agentlab.JobRunning },
	} {
		for _, dies := range []bool{false, true} {
			t.Run(fmt.Sprint(name, dies), func(t *testing.T) {
				inWorld(t, func(w *world) {
					id := w.run(attempts("x", "echo a\nhang", "hang", "stubborn\nhang")).ID
					w.eventually(name, func() bool { return until(w, id) })
					if _, err := w.jobs.Cancel(context.Background(), id); err != nil {
						w.Fatal(err)
					}
					if dies {
						w.restart()
					}
					if j := w.final(id); j.Status != agentlab.JobCancelled {
						w.Errorf("%s %q", j.Status, j.Reason)
					}
					for _, a := range w.attemptsOf(id) {
						if a = w.final(a.ID); a.Status != agentlab.JobCancelled {
							w.Errorf("attempt %d: %s %q", a.Attempt, a.Status, a.Reason)
						}
					}
				})
			})
		}
	}
}

// With room for fewer sandboxes, attempts run one after the other.
func TestAttemptsWaitForRoom(t *testing.T) {
	inWorld(t, func(w *world) {
		w.max = 1
		w.restart()
		w.wantThird(w.run(attempts("judge it", four...)).ID)
	})
}

// The attempts share the repository of their job, which is deleted at the end.
func TestAttemptsShareTheBundle(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		repo := t.TempDir()
		script := `git init -q . && git -c user.name=t -c user.email=t@t commit -q --allow-empty -m x && git bundle create -q b HEAD --all`
		cmd := exec.Command("sh", "-c", script)
		cmd.Dir = repo
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		data, err := os.ReadFile(filepath.Join(repo, "b"))
		if err != nil {
			t.Fatal(err)
		}
		b, err := w.artifacts.PutBundle(ctx, bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		r := attempts("", "repo\nexit 1", "repo\nexit 1")
		r.BundleID = b.ID
		id := w.run(r).ID
		w.final(id)
		for _, a := range w.attemptsOf(id) {
			if got := w.log(a.ID); got != fmt.Sprintf("repository bundle of %d bytes\n", len(data)) {
				t.Errorf("log %q", got)
			}
		}
		if left, err := filepath.Glob(filepath.Join(w.dir, "bundles", "*.bundle")); err != nil || len(left) > 0 {
			t.Errorf("left: %q %v", left, err)
		}
	})
}

func TestAttemptsAreChecked(t *testing.T) {
	inWorld(t, func(w *world) {
		base := func(change func(r *agentlab.JobRequest)) agentlab.JobRequest {
			r := agentlab.JobRequest{Task: "x", Attempts: &agentlab.JobAttempts{Count: 2}}
			change(&r)
			return r
		}
		for _, test := range []struct {
			field  string
			change func(r *agentlab.JobRequest)
		}{
			{"attempts.count", func(r *agentlab.JobRequest) { r.Attempts.Count = 1 }},
			{"attempts.count", func(r *agentlab.JobRequest) { r.Attempts.Count = agentlab.MaxAttempts + 1 }},
			{"attempts.agents", func(r *agentlab.JobRequest) { r.Attempts.Agents = []string{"shell", "shell", "shell"} }},
			{"attempts.tasks", func(r *agentlab.JobRequest) { r.Task, r.Attempts.Tasks = "", []string{"a", "b", "c"} }},
			{"attempts.pick", func(r *agentlab.JobRequest) { r.Attempts.Pick = " \n" }},
			{"attempts.pick", func(r *agentlab.JobRequest) { r.Attempts.Pick = strings.Repeat("x", agentlab.MaxPickBytes+1) }},
			{"task", func(r *agentlab.JobRequest) { r.Attempts.Tasks = []string{"a"} }},
			{"task", func(r *agentlab.JobRequest) { r.Task = "" }},
			{"task", func(r *agentlab.JobRequest) { r.Task, r.Attempts.Tasks = "", []string{"a", " "} }},
			{"agent", func(r *agentlab.JobRequest) { r.Attempts.Agents = []string{"shell", "hal"} }},
			{"agent", func(r *agentlab.JobRequest) { r.Agent, r.Attempts.Agents = "shell", []string{"shell"} }},
			{"agent", func(r *agentlab.JobRequest) { r.Agent, r.Task = agentlab.AgentNone, "" }},
			{"keepalive", func(r *agentlab.JobRequest) { r.Keepalive = new(true) }},
			{"attempts", func(r *agentlab.JobRequest) { r.Sandbox = &agentlab.SandboxRequest{} }},
			{"profile", func(r *agentlab.JobRequest) { r.Profile = "dark" }},
		} {
			_, err := w.jobs.Create(context.Background(), base(test.change))
			if e, _ := err.(*agentlab.Error); e == nil || e.Code != agentlab.CodeInvalid || e.Field != test.field {
				w.Errorf("got %v, want invalid of field %s", err, test.field)
			}
		}
		if all, err := w.jobs.List(context.Background(), agentlab.JobFilter{}); err != nil || len(all) != 0 {
			w.Errorf("refused requests left rows: %v, %v", all, err)
		}
		id := w.run(agentlab.JobRequest{Attempts: &agentlab.JobAttempts{Count: 5, Tasks: []string{"echo a", "echo b"}, Pick: "true"}}).ID
		w.final(id)
		for i, a := range w.attemptsOf(id) {
			if want := []string{"echo a", "echo b"}[i%2]; a.Task != want || a.Attempt != i+1 || a.ParentID != id || a.Pick != "true" {
				w.Errorf("%+v", a)
			}
		}
	})
}
