package bootstrap_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/secret"
)

// wantDenied checks that a token gets nothing.
func (w *world) wantDenied(token string) {
	w.Helper()
	resp, err := w.svc.Exchange(context.Background(), w.sb.VMID, secret.HashToken(token))
	if agentlab.CodeOf(err) != agentlab.CodeDenied {
		w.Errorf("%+v, %v", resp, err)
	}
}

// A token that was made before the end of a running job is worth nothing
// afterwards, also in a kept sandbox: its runner has deleted the secrets. When
// the kept sandbox boots again, it gets them for its user.
func TestNoExchangeAfterTheEndOfAJob(t *testing.T) {
	for name, kept := range map[string]bool{"kept": true, "not kept": false} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, true, func(w *world) {
				w.changeSandbox(func(sb *agentlab.Sandbox) { sb.Keepalive = kept })
				w.exchange(w.document().Token)
				doc := w.wait()
				if doc == nil {
					t.Fatal("no other token")
				}
				w.endJob()
				w.wantDenied(doc.Token)
				again := w.document() // of another boot
				if !kept {
					w.wantDenied(again.Token)
				} else if resp := w.exchange(again.Token); resp.Job != nil || resp.Env["K"] == "" {
					t.Errorf("%+v", resp)
				}
			})
		})
	}
}

// A token gets nothing if its sandbox has failed, or is about to end.
func TestNoExchangeForAnEndingSandbox(t *testing.T) {
	for name, change := range map[string]func(*world){
		"destroyed": func(w *world) { w.changeSandbox(func(sb *agentlab.Sandbox) { sb.Desired = agentlab.DesiredDestroyed }) },
		"stopped":   func(w *world) { w.changeSandbox(func(sb *agentlab.Sandbox) { sb.Desired = agentlab.DesiredStopped }) },
		"failed":    func(w *world) { w.changeSandbox(func(sb *agentlab.Sandbox) { sb.State = agentlab.SandboxFailed }) },
		"cancelled": (*world).endJob, // before its runner asked
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, true, func(w *world) {
				doc := w.document()
				change(w)
				w.wantDenied(doc.Token)
			})
			inWorld(t, true, func(w *world) {
				doc := w.document()
				w.onDeliver = func() { change(w) } // between the first check and the transaction
				w.wantDenied(doc.Token)
			})
		})
	}
}

// withoutJobRow deletes the row of the job, which has ended, waits, and returns
// the token of the next boot.
func (w *world) withoutJobRow(kept bool, age time.Duration) string {
	w.Helper()
	w.changeSandbox(func(sb *agentlab.Sandbox) { sb.Keepalive = kept })
	w.exchange(w.document().Token)
	w.endJob()
	if err := w.store.DeleteJob(context.Background(), w.sb.JobID); err != nil {
		w.Fatal(err)
	}
	time.Sleep(age) // in the bubble's time
	return w.document().Token
}

// The row of a job is written after that of its sandbox. Later, a missing row
// was deleted, and the sandbox, if it is kept, gets its secrets for its user.
func TestExchangeWithoutJobRow(t *testing.T) {
	inWorld(t, true, func(w *world) {
		token := w.withoutJobRow(true, time.Minute)
		if _, err := w.svc.Exchange(context.Background(), w.sb.VMID, secret.HashToken(token)); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
			w.Errorf("it may be written soon: %v", err)
		}
	})
	inWorld(t, true, func(w *world) {
		if resp := w.exchange(w.withoutJobRow(true, time.Hour)); resp.Job != nil || resp.Env["K"] != "value-of-k" || resp.Runner.Token != "" {
			w.Errorf("%+v", resp)
		}
	})
	inWorld(t, true, func(w *world) { w.wantDenied(w.withoutJobRow(false, time.Hour)) })
}

// The secrets of a job without a row are redacted, also by a process that did
// not deliver them.
func TestRedactionWithoutJobRow(t *testing.T) {
	inWorld(t, true, func(w *world) {
		w.withoutJobRow(true, time.Minute)
		w.restart()
		if got := w.svc.RedactFunc(context.Background(), w.sb.JobID)("it is value-of-k"); strings.Contains(got, "value-of-k") {
			w.Errorf("%q", got)
		}
	})
}
