package store

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

func newAPIToken(name, hash string) agentlab.APIToken {
	return agentlab.APIToken{
		ID: agentlab.NewTokenID(), Name: name, Hash: hash, Role: agentlab.RoleWrite,
		Verbs:     []string{"sandbox.exec", "sandbox.read"},
		Sandboxes: []agentlab.TokenSandbox{{UID: "u1", VMID: 7, Name: "box"}},
		CreatedAt: epoch, ExpiresAt: epoch.Add(time.Hour),
	}
}

func none(agentlab.APIToken) []agentlab.Event { return nil }

func TestAPITokens(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	b, a := newAPIToken("b", hashOf("b")), newAPIToken("a", hashOf("a"))
	a.AnyVerb, a.Verbs, a.AnySandbox, a.Sandboxes = true, nil, true, nil
	for _, tok := range []agentlab.APIToken{b, a} {
		if err := s.PutAPIToken(ctx, tok, agentlab.Event{Kind: agentlab.EventTokenCreated, Message: tok.Name}); err != nil {
			t.Fatal(err)
		}
	}
	list := must(s.APITokens(ctx))(t)
	if !reflect.DeepEqual(list, []agentlab.APIToken{a, b}) {
		t.Errorf("kept %+v", list)
	}
	at := epoch.Add(3 * time.Minute)
	if err := s.TouchAPIToken(ctx, b.ID, at); err != nil {
		t.Fatal(err)
	}
	if err := s.TouchAPIToken(ctx, "tok-gone", at); err != nil {
		t.Errorf("touching what is gone: %v", err)
	}
	if got := must(s.APITokenByHash(ctx, b.Hash))(t); got.ID != b.ID || got.LastUsedAt != at {
		t.Errorf("by hash %+v", got)
	}
	_, err := s.APITokenByHash(ctx, hashOf("c"))
	wantCode(t, err, agentlab.CodeNotFound)
	_, err = s.APITokenByHash(ctx, "' OR 1=1 --")
	wantCode(t, err, agentlab.CodeNotFound)

	wantCode(t, s.PutAPIToken(ctx, newAPIToken("a", hashOf("d"))), agentlab.CodeExists)
	wantCode(t, s.PutAPIToken(ctx, newAPIToken("d", a.Hash)), agentlab.CodeExists)
	bad := newAPIToken("e", hashOf("e"))
	bad.Verbs, bad.Sandboxes = nil, nil // neither any nor some
	wantCode(t, s.PutAPIToken(ctx, bad), agentlab.CodeInvalid)

	got, err := s.DeleteAPIToken(ctx, "b", func(t agentlab.APIToken) []agentlab.Event {
		return []agentlab.Event{{Kind: agentlab.EventTokenRevoked, Message: t.ID}}
	})
	if err != nil || got.ID != b.ID {
		t.Errorf("deleted %+v, %v", got, err)
	}
	_, err = s.DeleteAPIToken(ctx, b.ID, none)
	wantCode(t, err, agentlab.CodeNotFound)
	if evs := must(s.Events(ctx, agentlab.EventFilter{}))(t); len(evs) != 3 || evs[2].Kind != agentlab.EventTokenRevoked || evs[2].Message != b.ID {
		t.Errorf("events %+v", evs)
	}
}

// TestAPITokenIDBeforeName: a token that is named as another's id does not
// stand in its way.
func TestAPITokenIDBeforeName(t *testing.T) {
	s := newStore(t)
	one := newAPIToken("one", hashOf("1"))
	other := newAPIToken(one.ID, hashOf("2"))
	for _, tok := range []agentlab.APIToken{other, one} {
		if err := s.PutAPIToken(t.Context(), tok); err != nil {
			t.Fatal(err)
		}
	}
	if got := must(s.DeleteAPIToken(t.Context(), one.ID, none))(t); got.Name != "one" {
		t.Errorf("deleted %q", got.Name)
	}
}

func TestAPITokenLimitsAndExpiry(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	for i := range maxAPITokens {
		if err := s.PutAPIToken(ctx, newAPIToken(fmt.Sprintf("t%d", i), fmt.Sprintf("%064x", i))); err != nil {
			t.Fatal(err)
		}
	}
	wantCode(t, s.PutAPIToken(ctx, newAPIToken("more", hashOf("f"))), agentlab.CodeLimit)
	if n, err := s.DeleteExpiredTokens(ctx, epoch.Add(time.Hour-1)); err != nil || n != 0 {
		t.Errorf("deleted %d too early, %v", n, err)
	}
	if n, err := s.DeleteExpiredTokens(ctx, epoch.Add(time.Hour)); err != nil || n != maxAPITokens {
		t.Errorf("deleted %d, %v", n, err)
	}
}

// TestAPITokenWidenedByHand: a row that was changed from outside and no longer
// restricts anything is rejected.
func TestAPITokenWidenedByHand(t *testing.T) {
	s := newStore(t)
	tok := newAPIToken("a", hashOf("a"))
	if err := s.PutAPIToken(t.Context(), tok); err != nil {
		t.Fatal(err)
	}
	for _, change := range []string{"sandboxes_json = '[]'", "verbs_json = 'null'", "sandboxes_json = '[{}]'", "any_sandbox = 1"} {
		_, err := s.w.ExecContext(t.Context(), "UPDATE api_tokens SET "+change)
		if err != nil {
			t.Fatal(err)
		}
		_, err = s.APITokenByHash(t.Context(), tok.Hash)
		wantCode(t, err, agentlab.CodeInternal)
	}
}
