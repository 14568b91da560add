package bootstrap_test

import (
	"context"
	"testing"

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
