package job_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/job"
	"github.com/agentlab-vm/agentlab/internal/redact"
	"github.com/agentlab-vm/agentlab/internal/secret"
)

// What a guest claims is believed only as far as it can be true.
func TestHostileReports(t *testing.T) {
	for _, test := range []struct {
		name   string
		report string
		status agentlab.JobStatus // RUNNING: it went on and ended COMPLETED
		reason string
		answer string // in the log
	}{
		{"unknown status", `{"status":"WON","phase":"agent"}`, agentlab.JobRunning, "", "report: 400"},
		{"queued again", `{"status":"QUEUED","phase":"agent"}`, agentlab.JobRunning, "", "report: 400"},
		{"unknown phase", `{"status":"RUNNING","phase":"../../etc"}`, agentlab.JobRunning, "", "report: 400"},
		{"waiting phase", `{"status":"RUNNING","phase":"waiting"}`, agentlab.JobRunning, "", "report: 400"},
		{"exit code", `{"status":"COMPLETED","phase":"done","exit_code":99999}`, agentlab.JobRunning, "", "report: 400"},
		{"commit", `{"status":"COMPLETED","phase":"done","result":{"head_commit":"$(reboot)"}}`, agentlab.JobRunning, "", "report: 400"},
		{"branch", `{"status":"COMPLETED","phase":"done","result":{"branch":"--force"}}`, agentlab.JobRunning, "", "report: 400"},
		{"commits", `{"status":"COMPLETED","phase":"done","result":{"commits":-5}}`, agentlab.JobRunning, "", "report: 400"},
		{"no JSON", `{"status":`, agentlab.JobRunning, "", "report: 400"},
		{"backwards", `{"status":"RUNNING","phase":"bootstrap"}`, agentlab.JobRunning, "", "report: accepted"},
		{"cancelled unasked", `{"status":"CANCELLED","phase":"done"}`, agentlab.JobFailed, "its runner stopped without a request", ""},
		{"timeout in the first minute", `{"status":"TIMEOUT","phase":"done"}`, agentlab.JobFailed, "its runner stopped without a request", ""},
		{"success of a failure", `{"status":"COMPLETED","phase":"done","exit_code":2}`, agentlab.JobFailed, "the agent exited with code 2", ""},
		{"control characters", `{"status":"FAILED","phase":"done","message":"a\u001b[31m\nb\u202e"}`, agentlab.JobFailed, "a [31m b", ""},
		{"long message", `{"status":"FAILED","phase":"done","message":"` + strings.Repeat("x", 4000) + `"}`, agentlab.JobFailed, strings.Repeat("x", 500) + "…", ""},
		{"early success", `{"status":"COMPLETED","phase":"done"}`, agentlab.JobCompleted, "", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				j := w.run(agentlab.JobRequest{Task: "report " + test.report + "\nsleep 10s"})
				j = w.final(j.ID)
				want := test.status
				if want == agentlab.JobRunning {
					want = agentlab.JobCompleted
				}
				if j.Status != want || j.Reason != test.reason {
					w.Errorf("%s %q, want %s %q", j.Status, j.Reason, want, test.reason)
				}
				if got := w.log(j.ID); !strings.Contains(got, test.answer) {
					w.Errorf("log %q, want an answer %q", got, test.answer)
				}
				if n := len(w.events(agentlab.EventJobStatus, j.ID)); n != 2 {
					w.Errorf("%d status events, want RUNNING and one end: %q", n, w.events(agentlab.EventJobStatus, j.ID))
				}
				var last string
				for _, p := range w.events(agentlab.EventJobPhase, j.ID) {
					if last == "job J: agent" && p == "job J: bootstrap" {
						w.Error("the phase went backwards")
					}
					last = p
				}
			})
		})
	}
}

// Only one of many concurrent calls ends a job; its result does not change
// afterwards.
func TestOneEnd(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		j := w.run(agentlab.JobRequest{Task: "hang"})
		w.phase(j.ID, "agent")
		vmid := w.sandbox(j.ID).VMID
		ref := w.ref(j.ID)
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				switch i % 4 {
				case 0:
					_, _ = w.jobs.Cancel(ctx, j.ID)
				case 1:
					_, _ = w.jobs.Report(ctx, vmid, guestapi.Report{Status: "COMPLETED", Phase: "done"})
				case 2:
					_, _ = w.jobs.Report(ctx, vmid, guestapi.Report{Status: "FAILED", Phase: "done", Message: fmt.Sprint(i)})
				default:
					_ = w.host.CrashVM(ref, "boom")
				}
			})
		}
		wg.Wait()
		j = w.final(j.ID)
		time.Sleep(time.Hour)
		if again := w.job(j.ID); !reflect.DeepEqual(again, j) && (again.Status != j.Status || again.Reason != j.Reason || !again.FinishedAt.Equal(j.FinishedAt)) {
			w.Errorf("the end changed from %+v to %+v", j, again)
		}
		ends := 0
		for _, m := range w.events(agentlab.EventJobStatus, j.ID) {
			if !strings.Contains(m, "RUNNING") && !strings.Contains(m, "is being cancelled") {
				ends++
			}
		}
		if ends != 1 {
			w.Errorf("%d ends: %q", ends, w.events(agentlab.EventJobStatus, j.ID))
		}
		for _, r := range []string{"COMPLETED", "RUNNING"} { // late reports are answered, and change nothing
			if _, err := w.jobs.Report(ctx, vmid, guestapi.Report{Status: r, Phase: "done"}); err != nil {
				w.Errorf("a late report: %v", err)
			}
		}
		if again := w.job(j.ID); again.Status != j.Status {
			w.Errorf("a late report made it %s", again.Status)
		}
	})
}

func TestDirectiveWaits(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		j := w.run(agentlab.JobRequest{Task: "hang", TTL: time.Hour})
		w.phase(j.ID, "agent")
		vmid := w.sandbox(j.ID).VMID
		began := time.Now()
		d, err := w.jobs.Directive(ctx, vmid, 30*time.Second)
		if err != nil || d.Stop != "" || time.Since(began) != 30*time.Second {
			w.Errorf("%+v, %v after %s", d, err, time.Since(began))
		}
		if d.SecondsLeft < 3500 || d.SecondsLeft > 3600 {
			w.Errorf("%d seconds left", d.SecondsLeft)
		}
		began = time.Now()
		got := make(chan guestapi.Directive, 1)
		go func() {
			d, _ := w.jobs.Directive(ctx, vmid, 50*time.Second)
			got <- d
		}()
		time.Sleep(time.Second)
		if _, err := w.jobs.Cancel(ctx, j.ID); err != nil {
			w.Fatal(err)
		}
		if d := <-got; d.Stop != "CANCELLED" || time.Since(began) > 1100*time.Millisecond {
			w.Errorf("%+v after %s", d, time.Since(began))
		}
		w.final(j.ID)
		_, err = w.jobs.Directive(ctx, 4711, time.Second)
		wantCode(t, err, agentlab.CodeNotFound)
		left, cancel := context.WithCancel(ctx)
		cancel()
		if d, err := w.jobs.Directive(left, vmid, time.Hour); err == nil && d.Stop != "CANCELLED" {
			w.Errorf("%+v, %v", d, err)
		}
	})
}

// The secrets go to the job that needs them and nowhere else.
func TestSecrets(t *testing.T) {
	const envValue, gitToken = "sk-ant-0123456789abcdef", "ghp_9876543210zyxwvu"
	inWorld(t, func(w *world) {
		ctx := context.Background()
		for key, v := range map[string]string{"env.API_KEY": envValue, "git.token": gitToken, "git.url": "https://github.com/x/y", "claude_settings_json": `{"model":"opus"}`} {
			if err := w.vault.Set(ctx, "team", key, strings.NewReader(v), false); err != nil {
				w.Fatal(err)
			}
		}
		j := w.run(agentlab.JobRequest{Profile: "secrets", Task: "env API_KEY\n" + `report {"status":"FAILED","phase":"done","message":"key ` + envValue + ` is wrong"}`})
		j = w.final(j.ID)
		if j.Reason != "key [redacted] is wrong" {
			w.Errorf("reason %q", j.Reason)
		}
		if got := w.log(j.ID); !strings.HasPrefix(got, "API_KEY=") || strings.Contains(got, envValue) {
			w.Errorf("log %q", got)
		}
		// The task holds it too, because the test put it there; nothing else may.
		if _, err := w.store.UpdateJob(ctx, j.ID, func(j *agentlab.Job) ([]agentlab.Event, error) { j.Task = "x"; return nil, nil }); err != nil {
			w.Fatal(err)
		}
		var all strings.Builder
		w.mu.Lock()
		for _, e := range w.seen {
			fmt.Fprintln(&all, e)
		}
		w.mu.Unlock()
		if strings.Contains(all.String(), envValue) || strings.Contains(all.String(), gitToken) {
			w.Error("an event holds a secret")
		}
		w.leaks(gitToken)
	})
}

// What a bootstrap answer holds depends on what the job has a use for.
func TestBootstrapHasOnlyNeededSecrets(t *testing.T) {
	for _, test := range []struct {
		name             string
		r                agentlab.JobRequest
		git, claude, env bool
		upload           bool
		domains          string
	}{
		{"repo, claude", agentlab.JobRequest{Profile: "secrets", Agent: "claude", RepoURL: "https://github.com/x/y"}, true, true, true, true, "*"},
		{"no repo, claude", agentlab.JobRequest{Profile: "secrets", Agent: "claude"}, false, true, true, true, "*"},
		{"repo, shell", agentlab.JobRequest{Profile: "secrets", Agent: "shell", RepoURL: "https://github.com/x/y"}, true, false, true, true, "*"},
		{"no secrets", agentlab.JobRequest{Profile: "plain", Agent: "claude", RepoURL: "https://github.com/x/y", NoPreflight: true}, false, false, false, true, "*"},
		{"allow list", agentlab.JobRequest{Profile: "listed", Agent: "shell"}, false, false, false, false, "github.com *.npmjs.org"},
		{"no network", agentlab.JobRequest{Profile: "dark", Agent: "shell"}, false, false, false, false, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				ctx := context.Background()
				for key, v := range map[string]string{"env.API_KEY": "sk-ant-0123456789abcdef", "env.ANTHROPIC_API_KEY": "sk-ant-0123456789abcdef", "git.token": "ghp_9876543210zyxwvu", "claude_settings_json": `{"model":"opus"}`} {
					if err := w.vault.Set(ctx, "team", key, strings.NewReader(v), false); err != nil {
						w.Fatal(err)
					}
				}
				// The runner must not be quicker than this test.
				release := make(chan struct{})
				w.host.Inject(fake.Fault{Op: fake.OpDialControl, Times: 1, Block: release})
				test.r.Task = "hang"
				j := w.run(test.r)
				w.eventually("booting", func() bool { return w.sandbox(j.ID).State == agentlab.SandboxBooting })
				sb := w.sandbox(j.ID)
				token, hash := secret.MintToken()
				_ = token
				if err := w.store.PutBootstrapToken(ctx, agentlab.BootstrapToken{Hash: hash, VMID: sb.VMID, ExpiresAt: time.Now().Add(10 * time.Minute)}, nil); err != nil {
					w.Fatal(err)
				}
				_, err := w.boot.Exchange(ctx, sb.VMID, secret.HashToken("guess"))
				wantCode(t, err, agentlab.CodeDenied)
				resp, err := w.boot.Exchange(ctx, sb.VMID, hash)
				if err != nil {
					w.Fatal(err)
				}
				if got := resp.Git != nil; got != test.git {
					w.Errorf("git credential given: %v", got)
				}
				if got := resp.ClaudeSettingsJSON != ""; got != test.claude {
					w.Errorf("claude settings given: %v", got)
				}
				if got := resp.Env["API_KEY"] != ""; got != test.env {
					w.Errorf("environment given: %v", got)
				}
				if got := resp.Artifact != nil && resp.Job.Upload; got != test.upload {
					w.Errorf("upload granted: %v", got)
				}
				if got := strings.Join(resp.Policy.AllowedDomains, " "); got != test.domains {
					w.Errorf("domains %q", got)
				}
				if resp.Job == nil || resp.Job.ID != j.ID || resp.Job.Task != "hang" || resp.Job.Seconds != 3600 || resp.Runner.Token == "" {
					w.Errorf("job %+v", resp.Job)
				}
				_, err = w.boot.Exchange(ctx, sb.VMID, hash)
				wantCode(t, err, agentlab.CodeDenied)
				if now := w.job(j.ID); now.Status != agentlab.JobRunning || now.DeadlineAt.Sub(now.StartedAt) != time.Hour {
					w.Errorf("after the fetch %+v", now)
				}
				// The fetch came while the sandbox was BOOTING: it becomes RUNNING all the same.
				close(release)
				w.eventually("running", func() bool { return w.sandbox(j.ID).State == agentlab.SandboxRunning })
				if left := w.sandbox(j.ID).LeaseExpiresAt.Sub(w.job(j.ID).DeadlineAt); left < 5*time.Minute {
					w.Errorf("the lease ends %s after the deadline", left)
				}
				if _, err := w.jobs.Cancel(ctx, j.ID); err != nil {
					w.Fatal(err)
				}
				w.final(j.ID)
			})
		})
	}
}

// When secrets vanish between the request and the boot, the job says so.
func TestSecretsVanish(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		if err := w.vault.Set(ctx, "team", "env.K", strings.NewReader("0123456789"), false); err != nil {
			w.Fatal(err)
		}
		j := w.run(agentlab.JobRequest{Profile: "secrets", Task: "hang"})
		p := w.profiles.get("secrets")
		p.SecretsBundle = "gone"
		w.profiles.set("secrets", p)
		j = w.final(j.ID)
		if j.Status != agentlab.JobFailed || !strings.HasPrefix(j.Reason, "its profile's secrets are not available: secrets_bundle: there is no secrets bundle") {
			w.Errorf("%s: %s", j.Status, j.Reason)
		}
	})
}

// Who has no token learns nothing, and ends nothing, whatever became of the
// profile; and a running job has had its secrets.
func TestGuessedToken(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		j := w.run(agentlab.JobRequest{Task: "echo one\nsleep 1m\necho two"})
		w.phase(j.ID, "agent")
		vmid := w.sandbox(j.ID).VMID
		w.profiles.remove("plain")
		_, err := w.boot.Exchange(ctx, vmid, secret.HashToken("guess"))
		wantCode(t, err, agentlab.CodeDenied)
		_, hash := secret.MintToken()
		if err := w.store.PutBootstrapToken(ctx, agentlab.BootstrapToken{Hash: hash, VMID: vmid, ExpiresAt: time.Now().Add(time.Minute)}, nil); err != nil {
			w.Fatal(err)
		}
		_, err = w.boot.Exchange(ctx, vmid, hash)
		wantCode(t, err, agentlab.CodeUnavailable)
		if j = w.final(j.ID); j.Status != agentlab.JobCompleted {
			w.Errorf("%s: %s", j.Status, j.Reason)
		}
	})
}

// Settings may hold secrets anywhere; the runner's redactor and ours agree.
func TestSettingsAreRedacted(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		const doc = `{"model":"opus","mcpServers":{"x":{"headers":{"Authorization":"Bearer abcdef0123456789"}}}}`
		if err := w.vault.Set(ctx, "team", "claude_settings_json", strings.NewReader(doc), false); err != nil {
			w.Fatal(err)
		}
		j := w.run(agentlab.JobRequest{Profile: "secrets", Agent: "claude", Task: "hang", NoPreflight: true})
		w.phase(j.ID, "agent")
		r, err := w.boot.Redactor(ctx, j.ID)
		if err != nil {
			w.Fatal(err)
		}
		for _, s := range redact.SettingsSecrets(doc) {
			if got := r.String(s + " opus"); strings.Contains(got, s) || !strings.Contains(got, "opus") {
				w.Errorf("%q", got)
			}
		}
		if _, err := w.jobs.Cancel(ctx, j.ID); err != nil {
			w.Fatal(err)
		}
		w.final(j.ID)
	})
}

// If the answer to the bootstrap is lost, with or without the daemon, the
// runner can fetch it again, but for a limited time.
func TestLostBootstrapAnswer(t *testing.T) {
	for name, test := range map[string]struct {
		lose    int32
		restart bool
		want    agentlab.JobStatus
	}{
		"once":               {1, false, agentlab.JobCompleted},
		"with the daemon":    {1, true, agentlab.JobCompleted},
		"three times":        {3, false, agentlab.JobCompleted},
		"again and again":    {1000, false, agentlab.JobFailed},
		"the answer arrives": {0, true, agentlab.JobCompleted},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.lose.Store(test.lose)
				j := w.run(agentlab.JobRequest{Task: "echo one\nsleep 10s\necho two"})
				w.eventually("running", func() bool { return w.job(j.ID).Status != agentlab.JobQueued })
				if test.restart {
					w.restart()
				}
				if j = w.final(j.ID); j.Status != test.want {
					w.Fatalf("%s: %s", j.Status, j.Reason)
				}
				if lost := test.lose - w.lose.Load(); lost > 5 {
					w.Errorf("the secrets were given %d times", lost)
				}
				if j.Status == agentlab.JobCompleted && w.log(j.ID) != "one\ntwo\n" {
					w.Errorf("log %q", w.log(j.ID))
				}
			})
		})
	}
}

// A final job's artifacts and log stay as they are, though its sandbox is
// kept; its runner is answered to the end.
func TestFinalJobIsClosed(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		tokens := make(chan guestapi.BootstrapResponse, 1)
		w.seize.Store(new(func(r guestapi.BootstrapResponse) { tokens <- r }))
		j := w.run(agentlab.JobRequest{Task: "echo one\nartifact a.txt honest", Keepalive: new(true)})
		j = w.final(j.ID)
		if j.Status != agentlab.JobCompleted {
			w.Fatalf("%s: %s", j.Status, j.Reason)
		}
		resp := <-tokens
		call := func(method, path, token, body string) int {
			r := httptest.NewRequest(method, path, strings.NewReader(body))
			r.Header.Set("Authorization", "Bearer "+token)
			rec := httptest.NewRecorder()
			w.guests.Handler(j.SandboxVMID).ServeHTTP(rec, r)
			return rec.Code
		}
		for _, test := range []struct {
			method, path, token, body string
			want                      int
		}{
			{"PUT", guestapi.PathUpload + "a.txt", resp.Artifact.Token, "evil", 401},
			{"PUT", guestapi.PathUpload + "b.txt", resp.Artifact.Token, "evil", 401},
			{"POST", guestapi.PathLog + "?offset=4&final=1", resp.Runner.Token, "evil", 401},
			{"GET", guestapi.PathRepo, resp.Runner.Token, "", 401},
			{"GET", guestapi.PathDirective, resp.Runner.Token, "", 200},
			{"POST", guestapi.PathReport, resp.Runner.Token, `{"status":"COMPLETED","phase":"done"}`, 200},
		} {
			if got := call(test.method, test.path, test.token, test.body); got != test.want {
				w.Errorf("%s %s: %d, want %d", test.method, test.path, got, test.want)
			}
		}
		if all, err := w.artifacts.List(ctx, j.ID); err != nil || len(all) != 1 || all[0].Size != int64(len("honest")) {
			w.Errorf("%+v, %v", all, err)
		}
		if got := w.log(j.ID); got != "one\n" {
			w.Errorf("log %q", got)
		}
	})
}

// After a long pause of the daemon, the silence of runners during it does not
// count.
func TestDaemonPauseIsNotSilence(t *testing.T) { job.CheckDaemonPause(t) }

// A runner that never asks for its job is given up.
func TestRunnerNeverBegins(t *testing.T) {
	inWorld(t, func(w *world) {
		j := w.run(agentlab.JobRequest{Task: "exit 0", Sandbox: &agentlab.SandboxRequest{Name: "no-runner"}})
		j = w.final(j.ID)
		if j.Status != agentlab.JobFailed || j.Reason != "its runner did not fetch the job within 10m0s" {
			w.Errorf("%s: %s", j.Status, j.Reason)
		}
		if d := j.FinishedAt.Sub(j.CreatedAt); d < 10*time.Minute || d > 11*time.Minute {
			w.Errorf("given up after %s", d)
		}
	})
}

func FuzzReport(f *testing.F) {
	for _, s := range []string{`{"status":"RUNNING","phase":"agent"}`, `{"status":"FAILED","phase":"done","exit_code":-1,"message":"\u0000"}`, `{"status":"COMPLETED","phase":"done","result":{"commits":1}}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var r guestapi.Report
		if json.Unmarshal([]byte(text), &r) != nil {
			return
		}
		job.CheckVerdict(t, r)
	})
}
