package job_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// forked requests the attempts of four at a repository whose setup is lines.
func (w *world) forked(lines string) agentlab.JobRequest {
	w.host.SetSetup(lines)
	r := attempts("judge it", four...)
	r.RepoURL = "https://github.com/x/y"
	return r
}

// preparation returns the job that prepares the sandbox of attempts, nil if there
// is none.
func (w *world) preparation(id string) *agentlab.Job {
	w.Helper()
	list, err := w.store.Jobs(context.Background(), agentlab.JobFilter{ParentID: id})
	if err != nil {
		w.Fatal(err)
	}
	for _, j := range list {
		if j.Prepares() {
			return &j
		}
	}
	return nil
}

// setups returns how often the setup commands of the attempts at a job ran, if
// they log a line "setup".
func (w *world) setups(id string) (n int) {
	w.Helper()
	list := w.attemptsOf(id)
	if p := w.preparation(id); p != nil {
		list = append(list, *p)
	}
	for _, j := range list {
		n += strings.Count("\n"+w.log(j.ID), "\nsetup\n")
	}
	return n
}

// clean checks that nothing of a job with attempts is left.
func (w *world) clean(id string) {
	w.Helper()
	ctx := context.Background()
	if p := w.preparation(id); p != nil {
		w.final(p.ID)
	}
	for _, a := range w.attemptsOf(id) {
		w.final(a.ID)
	}
	driver := w.host.Open()
	w.eventually("no snapshot is left", func() bool {
		rows, err := w.store.Snapshots(ctx, agentlab.SnapshotFilter{})
		if err != nil {
			w.Fatal(err)
		}
		return len(rows) == 0
	})
	saved, err := driver.Snapshots(ctx)
	if err != nil || len(saved) != 0 {
		w.Errorf("left: %+v, %v", saved, err)
	}
	if left, err := driver.List(ctx); err != nil || len(left) != 0 {
		w.Errorf("left: %+v, %v", left, err)
	}
}

// wantWinner checks the result of a job of forked, and that nothing is left.
func (w *world) wantWinner(id string) agentlab.Job {
	w.Helper()
	j := w.final(id)
	if j.Status != agentlab.JobCompleted || j.Winner != 3 || w.file(id, "changes.diff") != "d3" {
		w.Errorf("%s %q, winner %d", j.Status, j.Reason, j.Winner)
		for _, a := range w.attemptsOf(id) {
			w.Logf("attempt %d: %s %q", a.Attempt, a.Status, a.Reason)
		}
	}
	w.clean(id)
	return j
}

func TestAttemptsContinueOneSandbox(t *testing.T) {
	inWorld(t, func(w *world) {
		id := w.run(w.forked("echo setup\nsleep 20s")).ID
		w.phase(id, "prepare")
		w.wantWinner(id)
		if n := w.setups(id); n != 1 {
			w.Errorf("setup ran %d times", n)
		}
		prep := w.preparation(id)
		if prep.Status != agentlab.JobCompleted || !slices.Contains(w.paths(id), agentlab.PrepareLog) {
			w.Errorf("%s %q, %q", prep.Status, prep.Reason, w.paths(id))
		}
		for _, a := range w.attemptsOf(id) {
			sb := w.sandbox(a.ID)
			if sb.From.Sandbox != w.sandbox(prep.ID).UID || sb.Profile != "plain" || sb.Image != w.sandbox(prep.ID).Image || sb.JobID != a.ID {
				w.Errorf("attempt %d: %+v", a.Attempt, sb)
			}
		}
		if got := w.events(agentlab.EventSandboxForked, prep.ID); len(got) != 1 || !strings.Contains(got[0], "is saved for the attempts of its job") {
			w.Errorf("%q", got)
		}
	})
}

// A sandbox that waits for room never waits for one that waits for it.
func TestForkedAttemptsWaitForRoom(t *testing.T) {
	inWorld(t, func(w *world) {
		w.max = 1
		w.restart()
		id := w.run(w.forked("echo setup")).ID
		w.wantWinner(id)
		if n := w.setups(id); n != 1 {
			w.Errorf("setup ran %d times", n)
		}
	})
}

// Whenever the sandbox cannot be forked, each attempt prepares its own.
func TestAttemptsThatAreNotForked(t *testing.T) {
	refused := agentlab.Errorf(agentlab.CodeInternal, "the disk is odd")
	const noFork, lost = "backend fake cannot continue the guest of another sandbox", "the prepared sandbox was not saved, or the snapshot is lost"
	for name, test := range map[string]struct {
		cfg    fake.Config
		agents []string
		fault  fake.Fault
		during func(w *world) // while the sandbox is being saved
		setups int
		why    string
	}{
		"no forks":          {cfg: fake.Config{NoForks: true}, setups: 4, why: noFork},
		"no kept snapshots": {cfg: fake.Config{NoKeptSnapshots: true}, setups: 4, why: noFork},
		"images":            {agents: []string{"shell", "opencode"}, setups: 4, why: "they have different images: agents, base"},
		"save":              {fault: fake.Fault{Op: fake.OpSaveSnapshot, Err: refused, Times: 1}, setups: 5, why: lost},
		"save, half":        {fault: fake.Fault{Op: fake.OpSaveSnapshot, At: fake.Half, Err: refused, Times: 1}, setups: 5, why: lost},
		"save, at its end":  {fault: fake.Fault{Op: fake.OpSaveSnapshot, At: fake.After, Err: refused, Times: 1}, setups: 5, why: lost},
		"lost sandbox": {setups: 5, why: lost, during: func(w *world) {
			list, err := w.sandboxes.List(context.Background(), agentlab.SandboxFilter{})
			if err != nil || len(list) != 1 {
				w.Fatalf("%+v %v", list, err)
			}
			if _, err := w.sandboxes.Destroy(context.Background(), list[0].VMID); err != nil {
				w.Fatal(err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			inWorldOn(t, test.cfg, func(w *world) {
				if test.during != nil {
					release := make(chan struct{})
					test.fault = fake.Fault{Op: fake.OpSaveSnapshot, Times: 1, Block: release}
					go func() {
						defer close(release)
						w.eventually("it is being saved", func() bool { return w.host.Calls(fake.OpSaveSnapshot) > 0 })
						test.during(w)
					}()
				}
				if test.fault.Op != "" {
					w.host.Inject(test.fault)
				}
				r := w.forked("echo setup")
				r.Attempts.Agents, r.NoPreflight = test.agents, true
				id := w.run(r).ID
				w.wantWinner(id)
				if n := w.setups(id); n != test.setups {
					w.Errorf("setup ran %d times", n)
				}
				if got := strings.Join(w.events(agentlab.EventJobPhase, id), "\n"); strings.Count(got, "job J: each attempt clones the repository and runs its setup commands itself: "+test.why) != 1 {
					w.Errorf("events:\n%s", got)
				}
				for _, a := range w.attemptsOf(id) {
					if sb := w.sandbox(a.ID); sb.From.Snapshot != "" {
						w.Errorf("%+v", sb.From)
					}
				}
			})
		})
	}
}

// A snapshot that cannot be used, or that is lost while attempts wait for room, is
// not waited for.
func TestUselessForkOfAttempts(t *testing.T) {
	inWorld(t, func(w *world) {
		r := w.forked("sleep 1m")
		id := w.run(r).ID
		w.phase(w.preparation(id).ID, "setup")
		p := w.profiles.get("plain")
		p.Options = `{"x":1}` // no backend has it
		w.profiles.set("plain", p)
		if j := w.final(id); j.Status != agentlab.JobFailed {
			w.Errorf("%s %q", j.Status, j.Reason)
		}
		w.clean(id)
		got := strings.Join(w.events(agentlab.EventJobPhase, id), "\n")
		if strings.Count(got, "could not continue the prepared sandbox: options: it differs from the snapshot's") != 1 {
			w.Errorf("events:\n%s", got)
		}
	})
	inWorld(t, func(w *world) {
		ctx := context.Background()
		w.max = 1
		w.restart()
		id := w.run(w.forked("echo setup")).ID
		w.eventually("an attempt runs", func() bool {
			return slices.ContainsFunc(w.attemptsOf(id), func(a agentlab.Job) bool { return a.Status != agentlab.JobQueued })
		})
		if n := w.setups(id); n != 1 {
			w.Errorf("setup ran %d times", n)
		}
		p := w.job(id)
		if err := w.snapshots.DropFork(ctx, p.Snapshot()); err != nil {
			w.Fatal(err)
		}
		w.wantWinner(id)
		if n := w.setups(id); n != 4 {
			w.Errorf("setup ran %d times", n)
		}
	})
}

// Without a repository there is nothing to prepare.
func TestAttemptsWithoutRepository(t *testing.T) {
	inWorld(t, func(w *world) {
		id := w.run(attempts("judge it", four...)).ID
		w.wantWinner(id)
		if p := w.preparation(id); p != nil {
			w.Errorf("%+v", p)
		}
	})
}

// If the setup commands fail, no attempt begins.
func TestPreparationFails(t *testing.T) {
	for setup, want := range map[string]string{
		"exit 3":            "preparing its sandbox ended as FAILED: the agent exited with code 3",
		"crash-vm":          "preparing its sandbox ended as FAILED: its sandbox failed: its VM has crashed: the guest's kernel panicked",
		"silent":            "preparing its sandbox ended as FAILED: its runner did not report for 1m30s",
		"hang":              "preparing its sandbox ended as TIMEOUT: asked to stop: TIMEOUT",
		"stubborn\nhang":    "preparing its sandbox ended as TIMEOUT: the time limit of 1h0m0s was exceeded; its runner did not report in time",
		"poweroff\nsleep 1": "preparing its sandbox ended as FAILED: its sandbox was stopped: the guest powered itself off",
	} {
		t.Run(setup, func(t *testing.T) {
			inWorld(t, func(w *world) {
				id := w.run(w.forked(setup)).ID
				j := w.final(id)
				w.clean(id)
				if j.Status != w.preparation(id).Status || j.Reason != want {
					w.Errorf("%s %q", j.Status, j.Reason)
				}
				for _, a := range w.attemptsOf(id) {
					if a.Status != j.Status || a.Reason != want || a.SandboxVMID != 0 {
						w.Errorf("attempt %d: %s %q", a.Attempt, a.Status, a.Reason)
					}
				}
			})
		})
	}
}

// A guest that reports success without a commit, or leaves another checkout,
// harms only the attempts.
func TestHostilePreparation(t *testing.T) {
	inWorld(t, func(w *world) {
		id := w.run(w.forked("report {\"status\":\"COMPLETED\",\"phase\":\"done\"}\nsleep 5m")).ID
		w.eventually("it is not forked", func() bool { return w.job(id).Fork == "" })
		w.final(id)
		w.clean(id)
		if got := strings.Join(w.events(agentlab.EventJobPhase, id), "\n"); !strings.Contains(got, "was not saved: the runner reported no commit") {
			w.Errorf("events:\n%s", got)
		}
	})
	inWorld(t, func(w *world) {
		id := w.run(w.forked(`report {"status":"COMPLETED","phase":"done","result":{"base_commit":"` + strings.Repeat("ab", 20) + `"}}` + "\nsleep 5m")).ID
		j := w.final(id)
		w.clean(id)
		if j.Status != agentlab.JobFailed || !strings.HasPrefix(j.Reason, "no attempt won") {
			w.Errorf("%s %q", j.Status, j.Reason)
		}
		for _, a := range w.attemptsOf(id) {
			if !strings.Contains(a.Reason, "the prepared commit is") {
				w.Errorf("attempt %d: %s %q", a.Attempt, a.Status, a.Reason)
			}
		}
	})
}

func TestCancelForkedAttempts(t *testing.T) {
	for name, until := range map[string]func(w *world, id string) bool{
		"at once":   func(*world, string) bool { return true },
		"preparing": func(w *world, id string) bool { return w.job(w.preparation(id).ID).Phase == "setup" },
		"prepared":  func(w *world, id string) bool { return w.job(w.preparation(id).ID).Status.Final() },
		"saving":    func(w *world, id string) bool { p := w.job(id); return p.Snapshot() != "" },
		"saved":     func(w *world, id string) bool { return w.host.Calls(fake.OpCreate) > 1 },
		"running": func(w *world, id string) bool {
			p := w.job(id).Phase
			return p == "attempts 1/4" || p == "attempts 2/4"
		},
	} {
		for _, dies := range []bool{false, true} {
			t.Run(fmt.Sprint(name, dies), func(t *testing.T) {
				inWorld(t, func(w *world) {
					w.host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, Delay: 10 * time.Second})
					r := w.forked("sleep 20s")
					r.Attempts.Tasks = []string{"exit 1", "hang"}
					id := w.run(r).ID
					w.eventually(name, func() bool { return until(w, id) })
					if _, err := w.jobs.Cancel(context.Background(), id); err != nil {
						w.Fatal(err)
					}
					if dies {
						w.restart()
					}
					began := time.Now()
					if j := w.final(id); j.Status != agentlab.JobCancelled {
						w.Errorf("%s %q", j.Status, j.Reason)
					}
					w.clean(id)
					if d := time.Since(began); d > 5*time.Minute {
						w.Errorf("it took %s", d)
					}
				})
			})
		}
	}
}

// The daemon dies at each step of the backend, and again and again. The attempts
// end as without that, and nothing is left.
func TestDaemonDiesWhileItForks(t *testing.T) {
	check := func(w *world, id string) {
		w.Helper()
		w.wantWinner(id)
		if n := w.setups(id); n != 1 && n != 5 {
			w.Errorf("setup ran %d times", n)
		}
	}
	for _, op := range []fake.Op{fake.OpCreate, fake.OpStart, fake.OpSaveSnapshot, fake.OpDeleteSnapshot, fake.OpDestroy} {
		for _, at := range []fake.Point{fake.Before, fake.Half, fake.After} {
			for nth := 1; nth <= 2; nth++ {
				if op == fake.OpStart && at == fake.Half || nth == 2 && (op == fake.OpSaveSnapshot || op == fake.OpDeleteSnapshot) {
					continue
				}
				t.Run(fmt.Sprint(op, at, nth), func(t *testing.T) {
					inWorld(t, func(w *world) {
						if nth == 2 {
							w.host.Inject(fake.Fault{Op: op, At: at, Times: 1})
						}
						var crashed atomic.Bool
						w.host.Inject(fake.Fault{Op: op, At: at, Times: 1, Crash: true, Hook: func(backend.Spec) { crashed.Store(true) }})
						id := w.run(w.forked("echo setup\nsleep 1m")).ID
						w.eventually("a crash", crashed.Load)
						w.restart()
						check(w, id)
					})
				})
			}
		}
	}
	for _, every := range []int{3, 7} {
		t.Run(fmt.Sprintf("every %d events", every), func(t *testing.T) {
			inWorld(t, func(w *world) {
				id := w.run(w.forked("echo setup\nsleep 1m")).ID
				for last := 0; !w.job(id).Status.Final(); {
					w.eventually("more events", func() bool {
						w.mu.Lock()
						n := len(w.seen)
						w.mu.Unlock()
						return n >= last+every || w.job(id).Status.Final()
					})
					w.mu.Lock()
					last = len(w.seen)
					w.mu.Unlock()
					w.restart()
				}
				check(w, id)
			})
		})
	}
}

// The guest that is saved has received only the Git credential, and its attempts
// get everything else; the credential stays redacted in what they report.
func TestSecretsOfForkedAttempts(t *testing.T) {
	const apiKey, gitToken = "sk-ant-0123456789abcdef", "ghp_9876543210zyxwvu"
	inWorld(t, func(w *world) {
		ctx := context.Background()
		for key, v := range map[string]string{"env.API_KEY": apiKey, "git.token": gitToken, "git.url": "https://github.com/x/y", "artifact.endpoint": "https://a", "artifact.token": "t0123456789"} {
			if err := w.vault.Set(ctx, "team", key, strings.NewReader(v), false); err != nil {
				w.Fatal(err)
			}
		}
		answers := make(chan guestapi.BootstrapResponse, 9)
		w.seize.Store(new(func(r guestapi.BootstrapResponse) {
			answers <- r
			if _, err := w.boot.Sweep(ctx, w.jobs.Known); err != nil { // while attempts wait for room
				w.Error(err)
			}
		}))
		w.max = 1
		w.restart()
		r := w.forked("env API_KEY")
		r.Profile = "secrets"
		r.Attempts.Tasks = []string{"exit 1", "artifact changes.diff d3\n" + `report {"status":"FAILED","phase":"done","message":"token ` + gitToken + `"}`}
		id := w.run(r).ID
		w.final(id)
		if _, err := w.boot.Sweep(ctx, w.jobs.Known); err != nil {
			w.Fatal(err)
		}
		w.clean(id)
		close(answers)
		for resp := range answers {
			if prep := resp.Job.Prepare; prep != (resp.Git != nil) || prep != (resp.Env == nil) || prep != (resp.ArtifactStore == nil) || prep != (resp.Job.Prepared == "") {
				w.Errorf("prepare %v: %+v", prep, resp)
			}
		}
		for _, a := range w.attemptsOf(id) {
			if a.Attempt%2 == 0 && a.Reason != "token [redacted]" {
				w.Errorf("reason %q", a.Reason)
			}
		}
		if got := w.events(agentlab.EventSandboxForked, w.preparation(id).ID); len(got) != 1 || !strings.Contains(got[0], "it has received secrets") {
			w.Errorf("%q", got)
		}
	})
}

// What the repository narrows while its setup commands run holds for the attempts
// from the first moment on; the models of all attempts stay reachable.
func TestNarrowedNetworkOfForkedAttempts(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		for _, key := range []string{"env.ANTHROPIC_API_KEY", "env.OPENAI_API_KEY"} {
			if err := w.vault.Set(ctx, "team", key, strings.NewReader("sk-0123456789abcdef"), false); err != nil {
				w.Fatal(err)
			}
		}
		r := w.forked("sleep 1m")
		r.Profile, r.Attempts.Agents = "secrets", []string{"claude", "codex"}
		id := w.run(r).ID
		prep := w.preparation(id).ID
		w.phase(prep, "setup")
		if err := w.jobs.NarrowNetwork(ctx, w.sandbox(prep).VMID, guestapi.NetworkNarrow{Mode: "allowlist", Allow: []string{"example.com"}}); err != nil {
			w.Fatal(err)
		}
		w.final(id)
		for _, a := range w.attemptsOf(id) {
			layers := w.sandbox(a.ID).Network.Layers
			if len(layers) != 1 {
				w.Fatalf("attempt %d: %+v", a.Attempt, layers)
			}
			var allow []string
			for _, rule := range layers[0].Allow {
				allow = append(allow, rule.Rule)
			}
			if got := strings.Join(allow, " "); got != "example.com api.anthropic.com:443 api.openai.com:443 github.com:443" {
				w.Errorf("attempt %d: %s", a.Attempt, got)
			}
		}
		w.clean(id)
	})
}

// The preparation of a job that has ended saves nothing.
func TestPreparationOfAnEndedJob(t *testing.T) {
	inWorld(t, func(w *world) {
		id := w.run(w.forked("stubborn\nsleep 1m")).ID
		prep := w.preparation(id).ID
		w.phase(prep, "setup")
		for _, a := range w.attemptsOf(id) {
			if _, err := w.jobs.Cancel(context.Background(), a.ID); err != nil {
				w.Fatal(err)
			}
		}
		if j := w.final(id); j.Status != agentlab.JobFailed || w.job(prep).Status.Final() {
			w.Errorf("%s %q, and its preparation is %s", j.Status, j.Reason, w.job(prep).Status)
		}
		w.clean(id)
		if p := w.job(prep); p.Status != agentlab.JobCompleted || w.host.Calls(fake.OpSaveSnapshot) != 0 {
			w.Errorf("%s %q, saved %d times", p.Status, p.Reason, w.host.Calls(fake.OpSaveSnapshot))
		}
	})
}

// The sandbox is lost while no daemon runs, after the preparation has COMPLETED.
func TestPreparedSandboxIsLost(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		id := w.run(w.forked("echo setup\nsleep 1m")).ID
		prep := w.preparation(id).ID
		w.phase(prep, "setup")
		sb := w.sandbox(prep)
		w.kill()
		if err := w.host.Open().Destroy(ctx, backend.RefOf(sb)); err != nil {
			w.Fatal(err)
		}
		db, err := store.Open(ctx, filepath.Join(w.dir, "agentlab.db"), store.Options{})
		if err != nil {
			w.Fatal(err)
		}
		_, err = db.UpdateJob(ctx, prep, func(j *agentlab.Job) ([]agentlab.Event, error) {
			j.Result.BaseCommit = strings.Repeat("ab", 20)
			return []agentlab.Event{j.End(agentlab.JobCompleted, "", time.Now())}, nil
		})
		if err == nil {
			_, err = db.UpdateSandbox(ctx, sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
				sb.State, sb.Desired = agentlab.SandboxDestroyed, agentlab.DesiredDestroyed
				return nil, nil
			})
		}
		if err := errors.Join(err, db.Close()); err != nil {
			w.Fatal(err)
		}
		w.begin()
		w.wantWinner(id)
		if n := w.setups(id); n < 4 { // the first log may be lost
			w.Errorf("setup ran %d times", n)
		}
	})
}
