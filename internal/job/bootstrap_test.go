package job_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/secret"
)

// held makes a job whose runner does not come to fetch it, so that a test can
// play the runner, and lets it go at the test's end.
func (w *world) held(r agentlab.JobRequest) agentlab.Job {
	w.Helper()
	release := make(chan struct{})
	w.host.Inject(fake.Fault{Op: fake.OpDialControl, Times: 1, Block: release})
	w.Cleanup(func() { close(release) })
	j := w.run(r)
	w.eventually("booting", func() bool { return w.sandbox(j.ID).State == agentlab.SandboxBooting })
	return j
}

// token mints a bootstrap token for a sandbox.
func (w *world) token(vmid int, ttl time.Duration) string {
	w.Helper()
	token, hash := secret.MintToken()
	err := w.store.PutBootstrapToken(context.Background(), agentlab.BootstrapToken{Hash: hash, VMID: vmid, ExpiresAt: time.Now().Add(ttl)}, nil)
	if err != nil {
		w.Fatal(err)
	}
	return token
}

// answer is everything that a guest sees of an answer, and how long it took.
type answer struct {
	status int
	header http.Header
	body   string
	took   time.Duration
}

// fetch sends a bootstrap request on a sandbox's channel.
func (w *world) fetch(channel int, token string, vmid int) answer {
	body, _ := json.Marshal(guestapi.BootstrapRequest{Token: token, VMID: vmid})
	rec := httptest.NewRecorder()
	began := time.Now()
	w.guests.Handler(channel).ServeHTTP(rec, httptest.NewRequest("POST", guestapi.PathBootstrap, strings.NewReader(string(body))))
	return answer{rec.Code, rec.Header(), rec.Body.String(), time.Since(began)}
}

// Whatever is wrong with a token, the answer is the same to the byte, takes
// the same time, and changes nothing.
func TestBootstrapRefusals(t *testing.T) {
	inWorld(t, func(w *world) {
		a, b := w.held(agentlab.JobRequest{Task: "hang"}), w.held(agentlab.JobRequest{Task: "hang"})
		va, vb := w.sandbox(a.ID).VMID, w.sandbox(b.ID).VMID
		good, foreign, expired := w.token(va, 10*time.Minute), w.token(vb, 10*time.Minute), w.token(va, time.Second)
		time.Sleep(time.Second) // in the bubble's time
		want := w.fetch(va, "no-such-token", va)
		if want.status != http.StatusForbidden || want.took == 0 {
			t.Fatalf("%+v", want)
		}
		refused := func(name string, channel int, token string, vmid int) {
			t.Helper()
			if got := w.fetch(channel, token, vmid); !reflect.DeepEqual(got, want) {
				t.Errorf("%s: %+v, want %+v", name, got, want)
			}
		}
		refused("empty", va, "", va)
		refused("long", va, strings.Repeat("x", 300), va)
		refused("the other's token", va, foreign, va)
		refused("the other's token and name", va, foreign, vb)
		refused("the wrong name", va, good, vb)
		refused("no name", va, good, 0)
		refused("the other's channel", vb, good, va)
		refused("the other's channel and name", vb, good, vb)
		refused("expired", va, expired, va)
		for _, id := range []string{a.ID, b.ID} {
			if j := w.job(id); j.Status != agentlab.JobQueued {
				t.Errorf("%s is %s", id, j.Status)
			}
		}
		if got := w.fetch(va, good, va); got.status != http.StatusOK {
			t.Fatalf("the good token: %+v", got)
		}
		refused("replay", va, good, va)
		refused("consumed, through the other's channel", vb, good, va)
		if _, err := w.sandboxes.Destroy(context.Background(), vb); err != nil {
			t.Fatal(err)
		}
		w.gone(b.ID)
		refused("of a sandbox that is gone", vb, foreign, vb)
	})
}

// Of racing fetches one wins, and for the others nothing is resolved.
func TestBootstrapRace(t *testing.T) {
	inWorld(t, func(w *world) {
		count := filepath.Join(t.TempDir(), "count")
		w.reference("team", "env.K", "cmd:sh -c 'echo x >> "+count+"; echo value-of-k'")
		j := w.held(agentlab.JobRequest{Profile: "secrets", Task: "hang"})
		vmid := w.sandbox(j.ID).VMID
		token := w.token(vmid, 10*time.Minute)
		var mu sync.Mutex
		var wg sync.WaitGroup
		codes := map[int]int{}
		for range 8 {
			wg.Go(func() {
				got := w.fetch(vmid, token, vmid)
				mu.Lock()
				defer mu.Unlock()
				codes[got.status]++
			})
		}
		wg.Wait()
		if codes[http.StatusOK] != 1 || codes[http.StatusForbidden] != 7 {
			t.Errorf("answers %v", codes)
		}
		if text, err := os.ReadFile(count); err != nil || string(text) != "x\n" {
			t.Errorf("resolved: %q, %v", text, err)
		}
	})
}

// reference sets a reference in a bundle.
func (w *world) reference(bundle, key, text string) {
	w.Helper()
	if err := w.vault.Set(context.Background(), bundle, key, strings.NewReader(text), true); err != nil {
		w.Fatal(err)
	}
}

// A job gets what it has a use for; what it has none for is not even asked
// for, so a broken reference there does no harm.
func TestReferencesOfUse(t *testing.T) {
	inWorld(t, func(w *world) {
		w.reference("team", "env.K", "cmd:echo value-of-k")
		w.reference("team", "git.token", "cmd:false")
		w.reference("team", "claude_settings_json", "cmd:false")
		w.reference("team", "artifact.token", "cmd:echo value-of-store")
		j := w.run(agentlab.JobRequest{Profile: "secrets", Task: "env K"})
		if j = w.final(j.ID); j.Status != agentlab.JobCompleted {
			t.Fatalf("%s: %s", j.Status, j.Reason)
		}
		if got := w.log(j.ID); got != "K=**********\n" {
			t.Errorf("log %q", got)
		}
		w.leaks("value-of-k", "value-of-store")
	})
}

// A reference that gives nothing ends the job with a clear reason: at once
// where trying again is of no use, else after some tries. What a program said
// is never shown, and the token is not consumed.
func TestReferenceFails(t *testing.T) {
	for name, test := range map[string]struct{ ref, reason string }{
		"variable": {"env:AGENTLAB_TEST_NOT_SET", `env.K: cannot resolve the reference "env:AGENTLAB_TEST_NOT_SET": it is not in the environment of agentlabd`},
		"file":     {"file:/nowhere/at/all", `env.K: cannot resolve the reference "file:/nowhere/at/all": there is no such file`},
		"program":  {"cmd:no-such-program-here", `env.K: cannot resolve the reference "cmd:no-such-program-here": the program "no-such-program-here" is not installed`},
		"failure":  {`cmd:sh -c "echo s3cret; echo s3cret >&2; exit 3"`, `: sh exited with code 3 (tried 5 times)`},
		"too much": {"cmd:head -c 1000000 /dev/zero", ": head printed more than 131072 bytes"},
		"nothing":  {"cmd:true", ": the value is empty"},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.reference("team", "env.K", test.ref)
				j := w.run(agentlab.JobRequest{Profile: "secrets", Task: "hang"})
				j = w.final(j.ID)
				if j.Status != agentlab.JobFailed || !strings.HasPrefix(j.Reason, "its profile's secrets are not available: ") || !strings.Contains(j.Reason, test.reason) {
					t.Errorf("%s: %s", j.Status, j.Reason)
				}
				if !j.StartedAt.IsZero() {
					t.Error("the token was consumed")
				}
				w.mu.Lock()
				all := fmt.Sprint(w.seen)
				w.mu.Unlock()
				if strings.Contains(strings.ReplaceAll(all, `echo s3cret`, ""), "s3cret") {
					t.Error("an event holds what the program said")
				}
			})
		})
	}
}

// A reference that failed for a while is no reason to end a job.
func TestReferenceRecovers(t *testing.T) {
	inWorld(t, func(w *world) {
		flag := filepath.Join(t.TempDir(), "tries")
		w.reference("team", "env.K", fmt.Sprintf("cmd:sh -c 'echo x >> %[1]s; test $(wc -l < %[1]s) -ge 3 && echo value-of-k'", flag))
		j := w.run(agentlab.JobRequest{Profile: "secrets", Task: "echo done"})
		if j = w.final(j.ID); j.Status != agentlab.JobCompleted {
			t.Errorf("%s: %s", j.Status, j.Reason)
		}
	})
}

// What a guest says is redacted by what it was given, though meanwhile the
// daemon was restarted, the bundle changed and the key rotated; and that is
// forgotten when nothing more can be heard of the guest.
func TestRedactionOutlivesChanges(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		source := filepath.Join(t.TempDir(), "key")
		if err := os.WriteFile(source, []byte("value-before-change\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		w.reference("team", "env.K", "file:"+source)
		j := w.run(agentlab.JobRequest{Profile: "secrets", Task: "sleep 2m\nenv K\nsleep 2m\nenv K", Keepalive: new(true)})
		w.phase(j.ID, "agent")
		if err := os.WriteFile(source, []byte("value-after-change\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		w.restart()
		if err := w.vault.Unset(ctx, "team", "env.K"); err != nil {
			t.Fatal(err)
		}
		w.eventually("the first line is there", func() bool { return strings.Contains(w.log(j.ID), "\n") })
		if _, err := w.vault.Rotate(ctx, nil, nil); err != nil {
			t.Fatal(err)
		}
		w.restart()
		if j = w.final(j.ID); j.Status != agentlab.JobCompleted {
			t.Fatalf("%s: %s", j.Status, j.Reason)
		}
		if got, want := w.log(j.ID), strings.Repeat("K="+strings.Repeat("*", len("value-before-change"))+"\n", 2); got != want {
			t.Errorf("log %q", got)
		}
		w.leaks("value-before-change")
		kept := filepath.Join(w.dir, "secrets", "delivered", j.ID+".age")
		forget := func(want int) {
			t.Helper()
			n, err := w.boot.Sweep(ctx, w.jobs.Known)
			_, serr := os.Stat(kept)
			if err != nil || n != want || (serr == nil) != (want == 0) {
				t.Errorf("forgot %d, want %d: %v, %v", n, want, err, serr)
			}
		}
		forget(0) // its sandbox is kept, and may write to its console
		if _, err := w.sandboxes.Destroy(ctx, j.SandboxVMID); err != nil {
			t.Fatal(err)
		}
		w.gone(j.ID)
		forget(1)
	})
}

// A sandbox that is kept after its job gets no more than the job had a use
// for, and no right to report or upload.
func TestBootstrapAfterTheJob(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		for key, v := range map[string]string{"env.K": "value-of-k", "git.token": "value-of-token", "claude_settings_json": `{"a":1}`, "ssh_keys.example.com": "-PRIVATE KEY-----"} {
			if err := w.vault.Set(ctx, "team", key, strings.NewReader(v), false); err != nil {
				t.Fatal(err)
			}
		}
		j := w.run(agentlab.JobRequest{Profile: "secrets", Task: "echo done", Keepalive: new(true)})
		w.final(j.ID)
		vmid := w.sandbox(j.ID).VMID
		got := w.fetch(vmid, w.token(vmid, time.Minute), vmid)
		var resp guestapi.BootstrapResponse
		if err := json.Unmarshal([]byte(got.body), &resp); err != nil || got.status != http.StatusOK {
			t.Fatalf("%+v, %v", got, err)
		}
		if resp.Env["K"] != "value-of-k" || len(resp.SSHKeys) != 1 || resp.Git != nil || resp.ClaudeSettingsJSON != "" ||
			resp.Job != nil || resp.Runner.Token != "" || resp.Artifact != nil || resp.ArtifactStore != nil {
			t.Errorf("%+v", resp)
		}
	})
}

// A sandbox without a job whose bootstrap answer was lost gets another token,
// for a limited time.
func TestLostAnswerWithoutJob(t *testing.T) {
	for name, test := range map[string]struct {
		lose    int32
		restart bool
		given   int
	}{
		"not lost":        {0, false, 1},
		"lost once":       {1, false, 1},
		"with the daemon": {1, true, 1},
		"lost twice":      {2, false, 1},
		"again and again": {1000, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				ctx := context.Background()
				if err := w.vault.Set(ctx, "team", "env.K", strings.NewReader("value-of-k"), false); err != nil {
					w.Fatal(err)
				}
				w.lose.Store(test.lose)
				got := make(chan guestapi.BootstrapResponse, 10)
				w.seize.Store(new(func(r guestapi.BootstrapResponse) { got <- r }))
				sb, err := w.sandboxes.Create(ctx, agentlab.SandboxRequest{Profile: "secrets", TTL: 2 * time.Hour})
				if err != nil {
					w.Fatal(err)
				}
				w.eventually("ready", func() bool {
					now, err := w.store.Sandbox(ctx, sb.VMID)
					return err == nil && now.State == agentlab.SandboxReady
				})
				if test.restart {
					w.restart()
				}
				time.Sleep(time.Hour) // in the bubble's time
				if len(got) != test.given {
					w.Fatalf("given %d times, want %d", len(got), test.given)
				}
				if lost := test.lose - w.lose.Load(); lost > 4 {
					w.Errorf("the secrets were given %d times", lost)
				}
				if test.given > 0 {
					if r := <-got; r.Env["K"] != "value-of-k" || r.Job != nil || r.Runner.Token != "" {
						w.Errorf("%+v", r)
					}
				}
			})
		})
	}
}

// If the secrets of a sandbox without a job are not available, the reason is
// reported once, and the sandbox gets them as soon as they are available.
func TestReferenceFailsWithoutJob(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		source := filepath.Join(w.TempDir(), "key")
		w.reference("team", "env.K", "file:"+source)
		got := make(chan guestapi.BootstrapResponse, 1)
		w.seize.Store(new(func(r guestapi.BootstrapResponse) { got <- r }))
		if _, err := w.sandboxes.Create(ctx, agentlab.SandboxRequest{Profile: "secrets", TTL: time.Hour}); err != nil {
			w.Fatal(err)
		}
		told := func() (n int) {
			w.mu.Lock()
			defer w.mu.Unlock()
			for _, e := range w.seen {
				if strings.Contains(e.Message, "its profile's secrets are not available") && strings.Contains(e.Message, "there is no such file") {
					n++
				}
			}
			return n
		}
		w.eventually("it is told", func() bool { return told() == 1 })
		time.Sleep(time.Minute) // in the bubble's time
		if err := os.WriteFile(source, []byte("value-of-k"), 0o600); err != nil {
			w.Fatal(err)
		}
		if r := <-got; r.Env["K"] != "value-of-k" || told() != 1 {
			w.Errorf("%+v, told %d times", r, told())
		}
	})
}

// A job that needs no secret does not depend on their folder; one that does
// tells what is wrong with it.
func TestUnusableVault(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		if err := w.vault.Set(ctx, "team", "env.K", strings.NewReader("value-of-k"), false); err != nil {
			w.Fatal(err)
		}
		j := w.held(agentlab.JobRequest{Profile: "secrets", Task: "hang"})
		if err := os.Chmod(filepath.Join(w.dir, "secrets"), 0o755); err != nil {
			w.Fatal(err)
		}
		if k := w.final(w.run(agentlab.JobRequest{Task: "echo done"}).ID); k.Status != agentlab.JobCompleted {
			w.Errorf("%s: %s", k.Status, k.Reason)
		}
		vmid := w.sandbox(j.ID).VMID
		if got := w.fetch(vmid, w.token(vmid, time.Minute), vmid); got.status != http.StatusServiceUnavailable || strings.Contains(got.body, "secrets/") {
			w.Errorf("%+v", got)
		}
		if j = w.job(j.ID); j.Status != agentlab.JobFailed || !strings.Contains(j.Reason, "other users can read") {
			w.Errorf("%s: %s", j.Status, j.Reason)
		}
	})
}
