package auth_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/auth"
	"github.com/agentlab-vm/agentlab/internal/store"
	"github.com/agentlab-vm/agentlab/internal/store/storetest"
)

type clock struct {
	mu sync.Mutex
	t  time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.t
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t = c.t.Add(d)
}

type lab struct {
	*auth.Service
	store  *store.Store
	clock  *clock
	path   string
	events []agentlab.Event
}

func newLab(t *testing.T, l auth.Limits) *lab {
	t.Helper()
	// Expiry runs on a timer of the real clock, so the day of these tests is today.
	lab := &lab{clock: &clock{t: time.Now()}, path: filepath.Join(t.TempDir(), "agentlab.db")}
	storetest.Create(t, lab.path)
	st, err := store.Open(t.Context(), lab.path, store.Options{Clock: lab.clock.now})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	st.Subscribe(func(c agentlab.Commit) { lab.events = append(lab.events, c.Events...) })
	lab.store = st
	lab.Service = auth.New(auth.Config{Store: st, Clock: lab.clock.now, Limits: l})
	return lab
}

var here = netip.MustParseAddr("192.0.2.1")

func (l *lab) create(t *testing.T, name string) (agentlab.APIToken, string) {
	t.Helper()
	tok, secret, err := l.Create(t.Context(), auth.Request{Name: name, Role: agentlab.RoleWrite, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	return tok, secret
}

func (l *lab) try(t *testing.T, from netip.Addr, secret string) error {
	t.Helper()
	_, _, leave, err := l.Authenticate(t.Context(), from, secret)
	if err == nil {
		leave()
	}
	return err
}

func TestTokenLife(t *testing.T) {
	l := newLab(t, auth.Limits{})
	tok, secret := l.create(t, "ci")
	if !strings.HasPrefix(secret, auth.Prefix) || len(secret) != len(auth.Prefix)+52 {
		t.Errorf("token %q", secret)
	}
	got, _, leave, err := l.Authenticate(t.Context(), here, secret)
	if err != nil {
		t.Fatal(err)
	}
	leave()
	if got.ID != tok.ID || !got.AnyVerb || !got.AnySandbox || got.Role != agentlab.RoleWrite {
		t.Errorf("entered as %+v", got)
	}
	list, err := l.List(t.Context())
	if err != nil || len(list) != 1 || !list[0].LastUsedAt.Equal(l.clock.now()) {
		t.Errorf("list %+v, %v", list, err)
	}
	if _, _, err := l.Create(t.Context(), auth.Request{Name: "ci", Role: agentlab.RoleRead, TTL: time.Hour}); agentlab.CodeOf(err) != agentlab.CodeExists {
		t.Errorf("a second of the name: %v", err)
	}
	if _, err := l.Revoke(t.Context(), "ci"); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Revoke(t.Context(), "ci"); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("revoked twice: %v", err)
	}
	if err := l.try(t, here, secret); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("after the revocation: %v", err)
	}
	var kinds []string
	for _, e := range l.events {
		kinds = append(kinds, e.Kind)
		if strings.Contains(e.Message+e.Data, secret) || strings.Contains(e.Message+e.Data, tok.Hash) {
			t.Errorf("an event holds the token: %+v", e)
		}
	}
	if fmt.Sprint(kinds) != "[token.created token.revoked]" {
		t.Errorf("events %v", kinds)
	}
}

// TestNoOracle: whatever is wrong with a token, the answer is the same.
func TestNoOracle(t *testing.T) {
	l := newLab(t, auth.Limits{Burst: 1000})
	_, revoked := l.create(t, "revoked")
	if _, err := l.Revoke(t.Context(), "revoked"); err != nil {
		t.Fatal(err)
	}
	_, expired := l.create(t, "expired")
	l.clock.add(time.Hour)
	_, good := l.create(t, "good")
	want := ""
	for name, secret := range map[string]string{
		"revoked": revoked, "expired": expired, "unknown": auth.Prefix + agentlab.NewToken(), "empty": "", "short": good[:len(good)-1],
		"long": good + "a", "other case": strings.ToUpper(good), "no prefix": strings.TrimPrefix(good, auth.Prefix), "huge": strings.Repeat("x", 1<<20),
		"hash": agentlab.NewToken(), "space": " " + good,
	} {
		err := l.try(t, here, secret)
		if agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got := err.Error() + agentlab.HintOf(err)
		if want == "" {
			want = got
		}
		if got != want {
			t.Errorf("%s: %q differs from %q", name, got, want)
		}
	}
	if err := l.try(t, here, good); err != nil {
		t.Errorf("the good one: %v", err)
	}
}

func TestRefusedRequests(t *testing.T) {
	l := newLab(t, auth.Limits{})
	for name, r := range map[string]auth.Request{
		"no role":      {Name: "a", TTL: time.Hour},
		"strange role": {Name: "a", Role: "root", TTL: time.Hour},
		"no name":      {Role: agentlab.RoleRead, TTL: time.Hour},
		"bad name":     {Name: "A b", Role: agentlab.RoleRead, TTL: time.Hour},
		"no time":      {Name: "a", Role: agentlab.RoleRead},
		"for ever":     {Name: "a", Role: agentlab.RoleRead, TTL: agentlab.MaxTokenTTL + 1},
		"empty verb":   {Name: "a", Role: agentlab.RoleRead, TTL: time.Hour, Verbs: []string{""}},
		"no uid":       {Name: "a", Role: agentlab.RoleRead, TTL: time.Hour, Sandboxes: []agentlab.TokenSandbox{{VMID: 7}}},
	} {
		if _, _, err := l.Create(t.Context(), r); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if list, err := l.List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("made %v, %v", list, err)
	}
}

// TestRevocationCuts: a call that is under way ends with its token, and one
// that begins at the same time does not outlive it.
func TestRevocationCuts(t *testing.T) {
	l := newLab(t, auth.Limits{})
	_, secret := l.create(t, "one")
	_, other := l.create(t, "two")
	_, ctx, leave, err := l.Authenticate(t.Context(), here, secret)
	if err != nil {
		t.Fatal(err)
	}
	defer leave()
	_, kept, leaveKept, err := l.Authenticate(t.Context(), here, other)
	if err != nil {
		t.Fatal(err)
	}
	defer leaveKept()
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			_, ctx, leave, err := l.Authenticate(t.Context(), here, secret)
			if err != nil {
				return
			}
			defer leave()
			<-ctx.Done() // or the test hangs
		})
	}
	if _, err := l.Revoke(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	<-ctx.Done()
	if err := context.Cause(ctx); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("cut with %v", err)
	}
	wg.Wait()
	if kept.Err() != nil {
		t.Error("another token's call was cut")
	}
}

// memory is a Store for synctest, where no file may be waited for.
type memory struct {
	auth.Store
	t agentlab.APIToken
}

func (m *memory) PutAPIToken(_ context.Context, t agentlab.APIToken, _ ...agentlab.Event) error {
	m.t = t
	return nil
}
func (m *memory) APITokenByHash(context.Context, string) (agentlab.APIToken, error) { return m.t, nil }
func (m *memory) TouchAPIToken(context.Context, string, time.Time) error {
	return errors.New("disk full")
}

// TestExpiryCuts: a call that is under way ends when its token expires. That
// the last use cannot be noted does not matter.
func TestExpiryCuts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := auth.New(auth.Config{Store: &memory{}})
		_, secret, err := s.Create(t.Context(), auth.Request{Name: "brief", Role: agentlab.RoleRead, TTL: 10 * time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		_, ctx, leave, err := s.Authenticate(t.Context(), here, secret)
		if err != nil {
			t.Fatal(err)
		}
		defer leave()
		began := time.Now()
		<-ctx.Done()
		if took := time.Since(began); took != 10*time.Minute {
			t.Errorf("cut after %s", took)
		}
		if _, _, _, err := s.Authenticate(t.Context(), here, secret); agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("used after its end: %v", err)
		}
	})
}

// TestGuessing: an address that brings bad tokens has to wait, alone, and a
// token that was good before is not kept out by it.
func TestGuessing(t *testing.T) {
	l := newLab(t, auth.Limits{Burst: 5, Every: time.Minute, Source: 8})
	_, known := l.create(t, "known")
	_, fresh := l.create(t, "fresh")
	if err := l.try(t, here, known); err != nil {
		t.Fatal(err)
	}
	bad := func(from netip.Addr) agentlab.Code {
		return agentlab.CodeOf(l.try(t, from, auth.Prefix+agentlab.NewToken()))
	}
	for i := range 5 {
		if c := bad(here); c != agentlab.CodeDenied {
			t.Fatalf("guess %d: %s", i, c)
		}
	}
	if c := bad(here); c != agentlab.CodeLimit {
		t.Errorf("the sixth guess: %s", c)
	}
	if c := agentlab.CodeOf(l.try(t, here, fresh)); c != agentlab.CodeLimit {
		t.Errorf("an unused token: %s", c)
	}
	if err := l.try(t, here, known); err != nil {
		t.Errorf("a token that was good before: %v", err)
	}
	elsewhere := netip.MustParseAddr("192.0.2.2")
	if err := l.try(t, elsewhere, fresh); err != nil {
		t.Errorf("from another address: %v", err)
	}
	l.clock.add(time.Minute)
	if c := bad(here); c != agentlab.CodeDenied {
		t.Errorf("after the wait: %s", c)
	}
	if c := bad(here); c != agentlab.CodeLimit {
		t.Errorf("and one more: %s", c)
	}

	// One host has a whole /64, and is one source.
	six := netip.MustParsePrefix("2001:db8:1:2::/64").Addr()
	for range 5 {
		if six = six.Next(); bad(six) != agentlab.CodeDenied {
			t.Fatal("a /64 was slowed down too early")
		}
	}
	if c := bad(six.Next()); c != agentlab.CodeLimit {
		t.Errorf("a host escapes within its /64: %s", c)
	}

	// A flood from everywhere stays bounded and leaves known tokens alone.
	addr, limited := netip.MustParseAddr("198.51.100.0"), false
	for range 100 {
		addr = addr.Next()
		limited = bad(addr) == agentlab.CodeLimit || limited
	}
	if !limited {
		t.Error("a flood from many addresses is not limited")
	}
	if err := l.try(t, addr, known); err != nil {
		t.Errorf("a known token in a flood: %v", err)
	}
}

// TestParallelGuessing: many guesses at once are no more than one after the
// other.
func TestParallelGuessing(t *testing.T) {
	l := newLab(t, auth.Limits{Burst: 5, Every: time.Hour})
	codes := make(chan agentlab.Code, 64)
	var wg sync.WaitGroup
	for range cap(codes) {
		wg.Go(func() { codes <- agentlab.CodeOf(l.try(t, here, auth.Prefix+agentlab.NewToken())) })
	}
	wg.Wait()
	close(codes)
	n := map[agentlab.Code]int{}
	for c := range codes {
		n[c]++
	}
	if n[agentlab.CodeDenied] != 5 || n[agentlab.CodeLimit] != 59 {
		t.Errorf("outcomes %v", n)
	}
}
