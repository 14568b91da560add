package bootstrap_test

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/bootstrap"
	"github.com/agentlab-vm/agentlab/internal/secret"
	"github.com/agentlab-vm/agentlab/internal/store"
	"github.com/agentlab-vm/agentlab/internal/store/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// profiles has one profile, with secrets.
type profiles struct{}

func (profiles) Use(name string) (agentlab.Profile, error) {
	return agentlab.Profile{Name: name, Mode: "dangerous", SecretsBundle: "team"}, nil
}

// world is a running sandbox, with or without a job, and a guest that has its
// answer or not.
type world struct {
	*testing.T
	store *store.Store
	vault *secret.Vault
	svc   *bootstrap.Service
	sb    agentlab.Sandbox
	holds bool  // the guest has its answer
	asked int   // how often the guest was asked
	down  error // what the guest answers instead
	onAsk func()

	onDeliver func() // called when the secrets are read
	full      error  // of PutBootstrapToken, instead
}

// fullStore is the store, whose PutBootstrapToken may fail.
type fullStore struct {
	*store.Store
	err *error
}

func (s fullStore) PutBootstrapToken(ctx context.Context, t agentlab.BootstrapToken, check func(agentlab.Sandbox, *agentlab.Job) error) error {
	if *s.err != nil {
		return *s.err
	}
	return s.Store.PutBootstrapToken(ctx, t, check)
}

// hooked is the vault, which calls onDeliver.
type hooked struct {
	*secret.Vault
	w *world
}

func (h hooked) Deliver(ctx context.Context, name string, want func(string) bool) (secret.Bundle, error) {
	if h.w.onDeliver != nil {
		h.w.onDeliver()
	}
	return h.Vault.Deliver(ctx, name, want)
}

// endJob ends the job, as a report or a timeout does.
func (w *world) endJob() {
	w.Helper()
	_, err := w.store.UpdateJob(context.Background(), w.sb.JobID, func(j *agentlab.Job) ([]agentlab.Event, error) {
		return []agentlab.Event{j.End(agentlab.JobCancelled, "no longer wanted", time.Now())}, nil
	})
	if err != nil {
		w.Fatal(err)
	}
}

// changeSandbox changes the row of the sandbox.
func (w *world) changeSandbox(fn func(*agentlab.Sandbox)) {
	w.Helper()
	sb, err := w.store.UpdateSandbox(context.Background(), w.sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		fn(sb)
		return nil, nil
	})
	if err != nil {
		w.Fatal(err)
	}
	w.sb = sb
}

func inWorld(t *testing.T, withJob bool, fn func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, dir := context.Background(), t.TempDir()
		w := &world{T: t, vault: secret.NewVault(filepath.Join(dir, "secrets"))}
		storetest.Create(t, filepath.Join(dir, "db"))
		var err error
		if w.store, err = store.Open(ctx, filepath.Join(dir, "db"), store.Options{}); err != nil {
			t.Fatal(err)
		}
		defer w.store.Close()
		if err := w.vault.Set(ctx, "team", "env.K", strings.NewReader("value-of-k"), false); err != nil {
			t.Fatal(err)
		}
		sb := agentlab.Sandbox{
			UID: agentlab.NewUID(), Name: "box", Backend: "fake", Profile: "p", Image: "base@1",
			State: agentlab.SandboxReady, Desired: agentlab.DesiredRunning, Network: agentlab.Network{Mode: agentlab.NetworkNAT},
			Resources: agentlab.Resources{Cores: 1, MemoryMB: 512}, LeaseExpiresAt: time.Now().Add(time.Hour),
		}
		if withJob {
			sb.JobID = agentlab.NewJobID()
			err := w.store.CreateJob(ctx, agentlab.Job{ID: sb.JobID, Task: "true", Agent: "shell", Profile: "p", Mode: "dangerous", TTL: time.Hour, Status: agentlab.JobQueued}, nil)
			if err != nil {
				t.Fatal(err)
			}
		}
		if w.sb, err = w.store.AllocateSandbox(ctx, sb, agentlab.Allocation{First: 1000, Last: 2000}); err != nil {
			t.Fatal(err)
		}
		w.restart()
		fn(w)
	})
}

// restart begins with a service that remembers nothing.
func (w *world) restart() {
	w.svc = bootstrap.New(bootstrap.Config{Store: fullStore{w.store, &w.full}, Profiles: profiles{}, Secrets: hooked{w.vault, w}, Backends: oneBackend{ControllerURL: "http://controller"}})
}

// document returns what a booting guest gets, as after SetIdentity.
func (w *world) document() *guestapi.Bootstrap {
	w.Helper()
	doc, err := w.svc.Document(context.Background(), w.sb)
	if err != nil || doc == nil || doc.VMID != w.sb.VMID || doc.Controller != "http://controller" {
		w.Fatalf("%+v, %v", doc, err)
	}
	w.svc.Sent(w.sb.UID)
	return doc
}

// exchange is what the runner does with a token.
func (w *world) exchange(token string) guestapi.BootstrapResponse {
	w.Helper()
	resp, err := w.svc.Exchange(context.Background(), w.sb.VMID, secret.HashToken(token))
	if err != nil {
		w.Fatal(err)
	}
	return resp
}

// reissue calls Reissue for the row as it is.
func (w *world) reissue() (*guestapi.Bootstrap, time.Duration) {
	w.Helper()
	ctx := context.Background()
	sb, err := w.store.Sandbox(ctx, w.sb.VMID)
	if err != nil {
		w.Fatal(err)
	}
	doc, again, err := w.svc.Reissue(ctx, sb, func(context.Context) (guestapi.Health, error) {
		w.asked++
		if w.onAsk != nil {
			w.onAsk()
		}
		return guestapi.Health{Bootstrapped: w.holds}, w.down
	})
	if err != nil {
		w.Fatal(err)
	}
	return doc, again
}

// wait calls Reissue as often as it asks for, for an hour, and returns the
// first document.
func (w *world) wait() *guestapi.Bootstrap {
	w.Helper()
	for end := time.Now().Add(time.Hour); ; {
		doc, again := w.reissue()
		if doc != nil || again == 0 || time.Now().Add(again).After(end) {
			return doc
		}
		time.Sleep(again) // in the bubble's time
	}
}

// The answer to a token is lost some times; each time the guest gets another
// token, three at most, whether the daemon restarts in between or not.
func TestLostAnswers(t *testing.T) {
	for name, test := range map[string]struct{ job, restart bool }{
		"job": {true, false}, "job, restart": {true, true}, "no job": {false, false}, "no job, restart": {false, true},
	} {
		for _, lost := range []int{0, 1, 2, 3, 1000} {
			t.Run(name, func(t *testing.T) {
				inWorld(t, test.job, func(w *world) {
					doc := w.document()
					for given := 1; ; given++ {
						began := time.Now()
						resp := w.exchange(doc.Token)
						if resp.Env["K"] != "value-of-k" || (resp.Job != nil) != test.job {
							t.Fatalf("%+v", resp)
						}
						w.holds = given > lost
						if test.restart && given == 1 {
							w.restart()
						}
						if doc = w.wait(); doc == nil {
							if most := 4; w.holds != (lost < most) || given != min(lost+1, most) {
								t.Errorf("given %d times, the guest has it: %v", given, w.holds)
							}
							if w.asked == 0 || w.asked > 5 {
								t.Errorf("the guest was asked %d times", w.asked)
							}
							return
						}
						if took, want := time.Since(began), 5*time.Second<<(2*(given-1)); took != want {
							t.Errorf("token %d after %s, want %s", given+1, took, want)
						}
						w.svc.Sent(w.sb.UID)
					}
				})
			})
		}
	}
}

// No token for a job whose runner was heard to go on, that is to stop, or that
// has ended, whatever its guest says: a kept sandbox has deleted its answer.
func TestNoReissue(t *testing.T) {
	for name, change := range map[string]func(*agentlab.Job){
		"later phase":    func(j *agentlab.Job) { j.Phase = "clone" },
		"to be stopped":  func(j *agentlab.Job) { j.StopRequested = string(agentlab.JobCancelled) },
		"has ended":      func(j *agentlab.Job) { j.End(agentlab.JobCompleted, "", time.Now()) },
		"has failed":     func(j *agentlab.Job) { j.End(agentlab.JobFailed, "no", time.Now()) },
		"restart, ended": func(j *agentlab.Job) { j.End(agentlab.JobCompleted, "", time.Now()) },
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, true, func(w *world) {
				w.exchange(w.document().Token)
				_, err := w.store.UpdateJob(context.Background(), w.sb.JobID, func(j *agentlab.Job) ([]agentlab.Event, error) {
					change(j)
					return nil, nil
				})
				if err != nil {
					t.Fatal(err)
				}
				if strings.HasPrefix(name, "restart") {
					w.restart()
				}
				if doc := w.wait(); doc != nil || w.asked > 0 {
					t.Errorf("%+v, asked %d times", doc, w.asked)
				}
			})
		})
	}
}

// While a token is open the guest is left alone, and so is the runner of a job
// that has not begun; a guest that does not answer is asked again later.
func TestReissueWaits(t *testing.T) {
	inWorld(t, true, func(w *world) {
		w.document()
		if doc, again := w.reissue(); doc != nil || again != 0 {
			t.Errorf("not begun: %+v, %s", doc, again)
		}
	})
	inWorld(t, false, func(w *world) {
		doc := w.document()
		if none, again := w.reissue(); none != nil || again != 5*time.Second || w.asked > 0 {
			t.Errorf("open: %+v, %s, asked %d times", none, again, w.asked)
		}
		w.exchange(doc.Token)
		time.Sleep(time.Minute) // in the bubble's time
		w.down = errors.New("it does not answer")
		for range 3 {
			if doc, again := w.reissue(); doc != nil || again != 5*time.Second {
				t.Errorf("silent: %+v, %s", doc, again)
			}
		}
		w.down = nil
		if doc, _ := w.reissue(); doc == nil {
			t.Error("no token after it answered")
		}
	})
}

// A token that was revoked or has expired is replaced; one that did not reach
// the guest is sent again.
func TestTokenIsReissuedAfterRevocation(t *testing.T) {
	inWorld(t, false, func(w *world) {
		ctx := context.Background()
		w.document()
		if err := w.store.RevokeGrants(ctx, w.sb.VMID); err != nil {
			t.Fatal(err)
		}
		first := w.wait()
		if first == nil {
			t.Fatal("no token after a revocation")
		}
		if second, _ := w.reissue(); second == nil || second.Token != first.Token {
			t.Errorf("it was not sent: %+v, want %+v", second, first)
		}
		w.svc.Sent(w.sb.UID)
		if n, err := w.store.DeleteExpiredTokens(ctx, time.Now().Add(24*time.Hour)); err != nil || n != 1 {
			t.Errorf("%d tokens, %v", n, err)
		}
		if second := w.wait(); second == nil || second.Token == first.Token {
			t.Errorf("after it expired: %+v", second)
		}
	})
}

// A guest that boots again starts again.
func TestDocumentOfANewBoot(t *testing.T) {
	inWorld(t, false, func(w *world) {
		w.exchange(w.document().Token)
		w.holds = true
		if first, second := w.wait(), w.wait(); first != nil || second != nil || w.asked != 1 {
			t.Fatalf("asked %d times", w.asked)
		}
		w.holds = false // its memory is gone
		w.exchange(w.document().Token)
		if doc := w.wait(); doc == nil {
			t.Error("the answer to the second boot was lost, and there is no other token")
		}
	})
}

// The guest exchanges every token, but never confirms it and loses every
// answer. It gets three more, and the last ones are not sent again.
func TestUnconfirmedTokensAreCounted(t *testing.T) {
	inWorld(t, true, func(w *world) {
		seen := map[string]bool{}
		w.exchange(w.document().Token)
		for end := time.Now().Add(time.Hour); time.Now().Before(end); {
			doc, again := w.reissue()
			if doc != nil {
				if seen[doc.Token] {
					t.Fatal("an exchanged token was sent again")
				}
				seen[doc.Token] = true
				w.exchange(doc.Token) // without Sent: the call to the guest had no answer
			}
			if again == 0 {
				break
			}
			time.Sleep(again) // in the bubble's time
		}
		if len(seen) != 3 {
			t.Errorf("%d tokens, want 3", len(seen))
		}
	})
}

// A token that cannot be stored is no retry.
func TestFailedTokenIsNotCounted(t *testing.T) {
	inWorld(t, true, func(w *world) {
		w.exchange(w.document().Token)
		time.Sleep(time.Minute) // in the bubble's time
		w.full = errors.New("the disk is full")
		sb, err := w.store.Sandbox(context.Background(), w.sb.VMID)
		if err != nil {
			t.Fatal(err)
		}
		for range 5 {
			doc, _, err := w.svc.Reissue(context.Background(), sb, func(context.Context) (guestapi.Health, error) { return guestapi.Health{}, nil })
			if doc != nil || !errors.Is(err, w.full) {
				t.Fatalf("%+v, %v", doc, err)
			}
		}
		w.full = nil
		if doc, _ := w.reissue(); doc == nil {
			t.Error("no token when the disk had space again")
		}
	})
}

// A job that ends while its guest is asked gets no token.
func TestNoReissueForAJobThatEndsMeanwhile(t *testing.T) {
	inWorld(t, true, func(w *world) {
		w.exchange(w.document().Token)
		time.Sleep(time.Minute) // in the bubble's time
		w.onAsk = func() {
			_, err := w.store.UpdateJob(context.Background(), w.sb.JobID, func(j *agentlab.Job) ([]agentlab.Event, error) {
				return []agentlab.Event{j.End(agentlab.JobCompleted, "", time.Now())}, nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		if doc, again := w.reissue(); doc != nil || again != 0 || w.asked != 1 {
			t.Errorf("%+v, %s, asked %d times", doc, again, w.asked)
		}
		if open, err := w.store.BootstrapOpen(context.Background(), w.sb.VMID); open || err != nil {
			t.Errorf("there is an open token: %v, %v", open, err)
		}
	})
}

// The process dies after it stored a token and before the guest got it. The
// next process does not wait until that token expires.
func TestTokenOfADeadProcess(t *testing.T) {
	inWorld(t, true, func(w *world) {
		w.exchange(w.document().Token)
		lost := w.wait()
		if lost == nil {
			t.Fatal("no token")
		}
		w.restart()
		began := time.Now()
		doc := w.wait()
		if doc == nil || doc.Token == lost.Token || time.Since(began) > 10*time.Second {
			t.Fatalf("%+v after %s", doc, time.Since(began))
		}
		w.svc.Sent(w.sb.UID)
		w.exchange(doc.Token)
		if _, err := w.svc.Exchange(context.Background(), w.sb.VMID, secret.HashToken(lost.Token)); agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("the token of the dead process: %v", err)
		}
	})
}

// A token that was revoked before the guest got it is not used for the next
// boot.
func TestDocumentAfterRevocation(t *testing.T) {
	inWorld(t, true, func(w *world) {
		ctx := context.Background()
		if _, err := w.svc.Document(ctx, w.sb); err != nil {
			t.Fatal(err)
		}
		if err := w.store.RevokeGrants(ctx, w.sb.VMID); err != nil {
			t.Fatal(err)
		}
		w.exchange(w.document().Token)
	})
}

// A job that got secrets, and another answer after its bundle became empty, is
// redacted with the secrets that it got and the tokens of both answers.
func TestRedactionAfterTheBundleIsEmpty(t *testing.T) {
	inWorld(t, true, func(w *world) {
		ctx := context.Background()
		first := w.exchange(w.document().Token)
		if err := w.vault.Unset(ctx, "team", "env.K"); err != nil {
			t.Fatal(err)
		}
		second := w.exchange(w.wait().Token)
		if len(second.Env) > 0 {
			t.Fatalf("%+v", second.Env)
		}
		for range 2 {
			redact := w.svc.RedactFunc(ctx, w.sb.JobID)
			for _, secret := range []string{"value-of-k", first.Runner.Token, second.Runner.Token} {
				if strings.Contains(redact("it is "+secret), secret) {
					t.Errorf("%q is not redacted", secret)
				}
			}
			w.restart()
		}
	})
}

// A call that comes after the end of its sandbox leaves nothing in memory for
// ever.
func TestSweepForgetsDeliveries(t *testing.T) {
	inWorld(t, true, func(w *world) {
		ctx := context.Background()
		w.document()
		w.svc.Sent("gone")
		known := func(context.Context, string) (bool, error) { return true, nil }
		if _, err := w.svc.Sweep(ctx, known); err != nil {
			t.Fatal(err)
		}
		if got := w.svc.Deliveries(); len(got) != 1 || got[0] != w.sb.UID {
			t.Errorf("deliveries %q", got)
		}
	})
}

// oneBackend describes the only backend.
type oneBackend backend.Info

func (o oneBackend) Info(string) backend.Info { return backend.Info(o) }
