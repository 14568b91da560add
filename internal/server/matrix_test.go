package server

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/auth"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
	"github.com/agentlab-vm/agentlab/internal/store"
	"github.com/agentlab-vm/agentlab/internal/store/storetest"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// The sandboxes and jobs of the matrix: a bound token is for the first ones.
const (
	ownUID, otherUID = "uid-own", "uid-other"
	otherJobID       = "job-bbbbbbbbbbbbb"
	lostJobID        = "job-ccccccccccccc" // its sandbox's number was given to the first one since
)

// knownSandboxes finds sandboxes and jobs without counting it as work of a
// service: the lookup is part of the access check.
type knownSandboxes struct{ stubSandboxes }

func (s knownSandboxes) Get(_ context.Context, name string) (agentlab.Sandbox, error) {
	switch name {
	case "box", "1":
		return agentlab.Sandbox{VMID: 1, Name: "box", UID: ownUID, JobID: stubJobID, State: agentlab.SandboxReady}, nil
	case "other", "2":
		return agentlab.Sandbox{VMID: 2, Name: "other", UID: otherUID, JobID: otherJobID, State: agentlab.SandboxReady}, nil
	}
	return agentlab.Sandbox{}, agentlab.Errorf(agentlab.CodeNotFound, "there is no sandbox %s", name)
}

type knownJobs struct{ stubJobs }

func (s knownJobs) Get(_ context.Context, id string) (agentlab.Job, error) {
	if id == "job-b" { // the beginning of one
		id = otherJobID
	}
	vmid := map[string]int{stubJobID: 1, otherJobID: 2, lostJobID: 1}[id]
	if vmid == 0 {
		return agentlab.Job{}, agentlab.Errorf(agentlab.CodeNotFound, "there is no job %s", id)
	}
	return agentlab.Job{ID: id, SandboxVMID: vmid, Status: agentlab.JobRunning}, nil
}

// accessLab is the API on a unix socket and on TCP, with real tokens.
type accessLab struct {
	*harness
	tokens *auth.Service
	store  *store.Store
	tcp    string               // host:port
	peer   atomic.Pointer[Peer] // who calls over the unix socket
}

func startAccess(t *testing.T, change ...func(*Config)) *accessLab {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agentlab.db")
	storetest.Create(t, path)
	st, err := store.Open(t.Context(), path, store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	l := &accessLab{store: st, tokens: auth.New(auth.Config{Store: st, Limits: auth.Limits{Burst: 100000}})}
	l.harness = start(t, func(c *Config) {
		c.Rules = Rules{OwnUID: 1234, Groups: map[string]Access{"root": AccessWrite, "daemon": AccessRead}}
		c.PeerOf = func(net.Conn) (Peer, error) { return *l.peer.Load(), nil }
		c.Services.Sandboxes = knownSandboxes{c.Services.Sandboxes.(stubSandboxes)}
		c.Services.Jobs = knownJobs{c.Services.Jobs.(stubJobs)}
		c.Services.Tokens = l.tokens
		for _, f := range change {
			f(c)
		}
	})
	l.err = agentlab.Errorf(agentlab.CodeBusy, "reached")
	l.tcp = l.serveTCP(t, TCP{})
	t.Cleanup(func() { _ = st.Close() })
	return l
}

// serveTCP serves the API on a port of the loopback too.
func (h *harness) serveTCP(t *testing.T, c TCP) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- h.srv.ServeTCP(ln, c) }()
	t.Cleanup(func() { // before the harness shuts the server down: the order of clean-up is the last first
		ctx, cancel := context.WithTimeout(context.Background(), guard.Patience)
		defer cancel()
		if err := h.srv.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("serve TCP: %v", err)
		}
	})
	return ln.Addr().String()
}

// make makes a token.
func (l *accessLab) make(t *testing.T, r auth.Request) string {
	t.Helper()
	r.Name, r.TTL = strings.ReplaceAll(agentlab.NewTokenID(), "tok-", "t"), time.Hour
	_, secret, err := l.tokens.Create(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return secret
}

// call makes a call to a route, with what its path and its kind need, and
// reports whether it was denied.
func (l *accessLab) call(t *testing.T, r route, sandbox, job string, c credential) (denied bool, status int, body string) {
	t.Helper()
	l.mu.Lock()
	l.calls = nil
	l.mu.Unlock()
	url := strings.NewReplacer("{sandbox}", sandbox, "{job}", job, "{path...}", "a").Replace(r.path)
	url = regexp.MustCompile(`\{[a-z.]+\}`).ReplaceAllString(url, "x")
	if r.target == byQuery && sandbox != "" {
		url += "?sandbox=" + sandbox + "&job=" + job
	}
	if r.target == byScope && job != "" {
		url += "?job=" + job
	}
	req, err := http.NewRequestWithContext(t.Context(), r.method, "http://localhost"+url, strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if r.status == http.StatusSwitchingProtocols {
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", operation(l.srv, r).Responses["101"].Headers["Upgrade"].Schema.Enum[0].(string))
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	l.peer.Store(&c.peer)
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		if c.unix {
			return sockpath.Dial(ctx, l.socket)
		}
		return (&net.Dialer{}).DialContext(ctx, "tcp", l.tcp)
	}}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	denied = resp.StatusCode == http.StatusForbidden
	if denied && (r.method != http.MethodHead && !strings.Contains(string(text), `"code":"denied"`) || l.numCalls() != 0) {
		t.Errorf("%s %s as %s: denied with %s, after calls of services %v", r.method, url, c.name, text, l.calls)
	}
	return denied, resp.StatusCode, string(text)
}

// credential is one way to come to the API, and what it should be able to do
// by the rules of docs/access.md, said once more and in other words than the
// code's.
type credential struct {
	name  string
	unix  bool
	peer  Peer
	token string
	may   func(r route) bool
}

var ranks = map[Access]int{AccessRead: 1, AccessWrite: 2, AccessAdmin: 3}

func upTo(rank int) func(route) bool {
	return func(r route) bool { return ranks[r.access] <= rank && (r.origin == anyOrigin || rank == 3) }
}

func tokenUpTo(rank int) func(route) bool {
	return func(r route) bool { return ranks[r.access] <= rank && r.origin == anyOrigin }
}

func never(route) bool { return false }

// about reports whether a route says what it is about.
func about(r route) bool { return r.target != noTarget }

func (l *accessLab) credentials(t *testing.T) []credential {
	own := []agentlab.TokenSandbox{{UID: ownUID, VMID: 1, Name: "box"}}
	revoked := l.make(t, auth.Request{Role: agentlab.RoleAdmin})
	list, err := l.tokens.List(t.Context())
	if err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	if _, err := l.tokens.Revoke(t.Context(), list[0].ID); err != nil {
		t.Fatal(err)
	}
	root, stranger := Peer{}, Peer{UID: 4242, GID: 4242}
	bound := l.make(t, auth.Request{Role: agentlab.RoleAdmin, Sandboxes: own})
	return []credential{
		{"foreign user", true, stranger, "", never},
		{"group with read", true, Peer{UID: 4242, GID: 1}, "", upTo(1)}, // gid 1 is group daemon everywhere
		{"group with write", true, Peer{UID: 4242, GID: 0}, "", upTo(2)},
		{"daemon's user", true, Peer{UID: 1234, GID: 1234}, "", upTo(3)},
		{"root", true, root, "", upTo(3)},
		{"read token", false, stranger, l.make(t, auth.Request{Role: agentlab.RoleRead}), tokenUpTo(1)},
		{"write token", false, stranger, l.make(t, auth.Request{Role: agentlab.RoleWrite}), tokenUpTo(2)},
		{"admin token", false, stranger, l.make(t, auth.Request{Role: agentlab.RoleAdmin}), tokenUpTo(3)},
		{"bound token", false, stranger, bound, func(r route) bool { return about(r) && r.origin == anyOrigin }},
		{"bound read token", false, stranger, l.make(t, auth.Request{Role: agentlab.RoleRead, Sandboxes: own}),
			func(r route) bool { return about(r) && r.access == AccessRead && r.origin == anyOrigin }},
		{"exec token", false, stranger, l.make(t, auth.Request{Role: agentlab.RoleAdmin, Verbs: []string{"sandbox.exec"}}),
			func(r route) bool { return r.verb == "sandbox.exec" }},
		{"root with a read token", true, root, l.make(t, auth.Request{Role: agentlab.RoleRead}), tokenUpTo(1)},
		{"root with a bound token", true, root, bound, func(r route) bool { return about(r) && r.origin == anyOrigin }},
		{"root with a revoked token", true, root, revoked, never},
		{"revoked token", false, stranger, revoked, never},
		{"made-up token", false, stranger, auth.Prefix + agentlab.NewToken(), never},
		{"no token", false, stranger, "", never},
	}
}

// TestAccessMatrix calls every route of the table for real, over the unix
// socket and over TCP, with each kind of credential. What is denied reaches no
// service. docs/access.md is made of what was measured.
func TestAccessMatrix(t *testing.T) {
	l := startAccess(t)
	creds := l.credentials(t)
	cells := map[string]map[string]bool{}
	n := 0
	for _, r := range l.srv.table {
		cells[r.id] = map[string]bool{}
		for _, c := range creds {
			denied, status, body := l.call(t, r, "box", stubJobID, c)
			n++
			if denied == c.may(r) {
				t.Errorf("%s %s as %s: status %d %s", r.method, r.path, c.name, status, body)
			}
			cells[r.id][c.name] = !denied
			if !strings.Contains(c.name, "bound") {
				continue
			}
			for _, away := range [][2]string{{"other", otherJobID}, {"2", otherJobID}, {"box", otherJobID}, {"other", stubJobID}, {"other", "job-b"}, {"nobody", "job-ddddddddddddd"}, {"", ""}, {"1", lostJobID}} {
				if r.target == onSandbox && (away[0] == "box" || away[0] == "1") || (r.target == onJob || r.target == byScope) && away[1] == stubJobID || away[0] == "" && r.target != byQuery && r.target != byScope {
					continue // it is about its own after all, or about nothing
				}
				n++
				if denied, status, body := l.call(t, r, away[0], away[1], c); !denied {
					t.Errorf("%s %s about %s as %s: status %d %s", r.method, r.path, away, c.name, status, body)
				}
			}
		}
	}
	t.Logf("%d calls: %d routes, %d kinds of credentials", n, len(l.srv.table), len(creds))

	path := filepath.Join("..", "..", "docs", "access.md")
	want := accessDoc(t, l.srv.table, creds, cells)
	if *update {
		if err := os.WriteFile(path, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("docs/access.md is not what the API does now; run: go test ./internal/server -run TestAccessMatrix -update")
	}
}

// accessDoc is docs/access.md: its text, and two tables.
func accessDoc(t *testing.T, table []route, creds []credential, cells map[string]map[string]bool) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "access.md"))
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	b.Write(text)
	b.WriteString("\n## Verbs\n| Verb | Least role | Allows to | Calls |\n|---|---|---|---|\n")
	for _, v := range verbs {
		var ids []string
		role, local := "", ""
		for _, r := range table {
			if r.verb != v.name {
				continue
			}
			ids = append(ids, "`"+r.id+"`")
			if role == "" || r.access < AccessOf(agentlab.Role(role)) {
				role = r.access.String()
			}
			if r.origin == localOnly {
				local = " (local only)"
			}
		}
		fmt.Fprintf(&b, "| `%s` | %s%s | %s | %s |\n", v.name, role, local, v.allows, strings.Join(ids, " "))
	}
	b.WriteString("\n## The matrix\nResults of a test that makes each call with each kind of credential (with bound tokens: about their own sandbox). " +
		"✓ allowed, · denied. About: where the call names its sandbox or job; a bound token can make no other calls.\n\n| Call | About |")
	for _, c := range creds {
		fmt.Fprintf(&b, " %s |", c.name)
	}
	b.WriteString("\n|---|---|" + strings.Repeat("---|", len(creds)) + "\n")
	for _, r := range table {
		fmt.Fprintf(&b, "| `%s %s` | %s |", r.method, documented(r.path), r.target)
		for _, c := range creds {
			fmt.Fprintf(&b, " %s |", map[bool]string{true: "✓", false: "·"}[cells[r.id][c.name]])
		}
		b.WriteString("\n")
	}
	return b.Bytes()
}

// TestUnlistedRouteIsDenied checks that a route of the mux that is not in the
// table is denied to everybody, because it has no access column.
func TestUnlistedRouteIsDenied(t *testing.T) {
	l := startAccess(t)
	reached := false
	l.srv.mux.HandleFunc("GET /v1/backdoor", func(http.ResponseWriter, *http.Request) { reached = true })
	l.srv.mux.HandleFunc("/v1/sandboxes/{sandbox}/backdoor", func(http.ResponseWriter, *http.Request) { reached = true })
	huma.Register(l.srv.api, huma.Operation{OperationID: "backdoor", Method: http.MethodPost, Path: "/v1/backdoor"},
		func(context.Context, *struct{}) (*struct{}, error) { reached = true; return nil, nil })
	for _, c := range l.credentials(t) {
		for _, r := range []route{
			{method: get, path: "/v1/backdoor"}, {method: post, path: "/v1/backdoor"}, {method: http.MethodHead, path: "/v1/backdoor"},
			{method: del, path: "/v1/sandboxes/{sandbox}/backdoor"},
		} {
			if denied, status, body := l.call(t, r, "box", stubJobID, c); !denied || reached {
				t.Errorf("%s %s as %s: %d %s, reached %t", r.method, r.path, c.name, status, body, reached)
			}
		}
	}
}

// TestRouteColumns: a row with an empty or unfit column is not served at all.
func TestRouteColumns(t *testing.T) {
	s, err := New(Config{Services: newStub().services()})
	if err != nil {
		t.Fatal(err)
	}
	good := route{get, "/v1/x", AccessRead, "daemon.read", noTarget, anyOrigin, 200, "x", "X", call(s.health)}
	if err := good.check(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*route){
		"no access":        func(r *route) { r.access = 0 },
		"too much access":  func(r *route) { r.access = AccessAdmin + 1 },
		"no verb":          func(r *route) { r.verb = "" },
		"unknown verb":     func(r *route) { r.verb = "daemon.raed" },
		"no target":        func(r *route) { r.target = 0 },
		"no origin":        func(r *route) { r.origin = 0 },
		"hidden sandbox":   func(r *route) { r.path = "/v1/x/{sandbox}" },
		"hidden job":       func(r *route) { r.path = "/v1/x/{job}" },
		"missing sandbox":  func(r *route) { r.target = onSandbox },
		"missing job":      func(r *route) { r.target = onJob },
		"both in one path": func(r *route) { r.path, r.target = "/v1/x/{job}/{sandbox}", onJob },
		"no handler":       func(r *route) { r.bind = nil },
	} {
		r := good
		if change(&r); s.register(r) == nil {
			t.Errorf("%s: it was registered", name)
		}
	}
}

// TestVerbs: a verb has one meaning, and none is left over.
func TestVerbs(t *testing.T) {
	s, err := New(Config{Services: newStub().services()})
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range verbs {
		var uses []route
		for _, r := range s.table {
			if r.verb == v.name {
				uses = append(uses, r)
			}
		}
		if len(uses) == 0 {
			t.Errorf("%s: no route has it", v.name)
		}
		if strings.HasSuffix(v.name, ".read") && slices.ContainsFunc(uses, func(r route) bool { return r.access != AccessRead || r.origin != anyOrigin }) {
			t.Errorf("%s: a route with it wants more than to read", v.name)
		}
	}
}
