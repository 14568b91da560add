package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func getuid() int { return os.Getuid() }
func textLogger(w io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// TestAccess calls every route as a foreign user, as a member of the group
// and as an administrator. What is denied reaches no service.
func TestAccess(t *testing.T) {
	levels := map[string]struct {
		peer Peer
		err  error
		upTo Access
	}{
		"foreign": {peer: Peer{UID: 4242, GID: 4242}},
		"unknown": {err: errors.New("no credentials")},
		"group":   {peer: Peer{UID: 4242, GID: 0}, upTo: AccessWrite}, // gid 0 is group root everywhere
		"root":    {peer: Peer{UID: 0, GID: 0}, upTo: AccessAdmin},
		"own":     {peer: Peer{UID: 1234, GID: 1234}, upTo: AccessAdmin},
	}
	for name, level := range levels {
		t.Run(name, func(t *testing.T) {
			h := start(t, func(c *Config) {
				c.Rules = Rules{OwnUID: 1234, Groups: map[string]Access{"root": AccessWrite}}
				c.PeerOf = func(net.Conn) (Peer, error) { return level.peer, level.err }
			})
			h.err = agentlab.Errorf(agentlab.CodeBusy, "reached")
			for _, r := range h.srv.routes() {
				before := h.numCalls()
				path := strings.NewReplacer("{job}", stubJobID, "{sandbox}", "box", "{path...}", "a", "{profile}", "p", "{image}", "i", "{token}", "t").Replace(r.path)
				status, header, body := h.do(t, r.method, path, "application/json", "{}")
				denied := status == http.StatusForbidden
				if want := r.access > level.upTo; denied != want {
					t.Errorf("%s %s (%s): status %d, want denied=%t: %s", r.method, path, r.access, status, want, body)
				}
				if denied && h.numCalls() != before {
					t.Errorf("%s %s: denied, but a service was called", r.method, path)
				}
				if denied && (header.Get("Content-Type") != problemType || !strings.Contains(body, `"code":"denied"`)) {
					t.Errorf("%s %s: not a problem: %s", r.method, path, body)
				}
			}
			status, _, _ := h.do(t, "GET", "/nowhere", "", "")
			if want := map[bool]int{true: 404, false: 403}[level.upTo > 0]; status != want {
				t.Errorf("unknown path: %d, want %d", status, want)
			}
		})
	}
}

func TestRouteTable(t *testing.T) {
	s, err := New(Config{Services: newStub().services()})
	if err != nil {
		t.Fatal(err)
	}
	ids := map[string]bool{}
	for _, r := range s.routes() {
		if ids[r.id] {
			t.Errorf("%s is there twice", r.id)
		}
		ids[r.id] = true
		if r.method == get && r.access != AccessRead && r.origin != localOnly {
			t.Errorf("%s: GET wants %s", r.id, r.access)
		}
		if r.method != get && r.access == AccessRead && r.id != "validate-profile" {
			t.Errorf("%s: %s wants only read", r.id, r.method)
		}
		r.access = 0
		if s.register(r) == nil {
			t.Errorf("%s was registered without access", r.id)
		}
	}
}

func TestRulesWithoutGroup(t *testing.T) {
	if got := (Rules{OwnUID: 1}).Level(Peer{UID: 2, GID: 0}); got != 0 {
		t.Errorf("foreign user has %s", got)
	}
	if got := (Rules{OwnUID: 1, Groups: map[string]Access{"no-such-group-here": AccessAdmin}}).Level(Peer{UID: 2, GID: 0}); got != 0 {
		t.Errorf("member of no group has %s", got)
	}
}

// TestErrors maps each code to its status, and keeps causes from callers.
func TestErrors(t *testing.T) {
	cases := []struct {
		err    error
		status int
		code   agentlab.Code
	}{
		{agentlab.Errorf(agentlab.CodeInvalid, "m"), 400, "invalid"},
		{agentlab.Errorf(agentlab.CodeDenied, "m"), 403, "denied"},
		{agentlab.Errorf(agentlab.CodeNotFound, "m"), 404, "not_found"},
		{agentlab.Errorf(agentlab.CodeExists, "m"), 409, "exists"},
		{agentlab.Errorf(agentlab.CodeConflict, "m"), 409, "conflict"},
		{agentlab.Errorf(agentlab.CodePreflight, "m"), 422, "preflight"},
		{agentlab.Errorf(agentlab.CodeLimit, "m"), 429, "limit"},
		{agentlab.Errorf(agentlab.CodeInternal, "m"), 500, "internal"},
		{agentlab.Errorf(agentlab.CodeSchema, "m"), 500, "schema"},
		{agentlab.Errorf(agentlab.CodeUnknownOutcome, "m"), 500, "unknown_outcome"},
		{agentlab.Errorf(agentlab.CodeUnsupported, "m"), 501, "unsupported"},
		{agentlab.Errorf(agentlab.CodeBusy, "m"), 503, "busy"},
		{agentlab.Errorf(agentlab.CodeUnavailable, "m"), 503, "unavailable"},
		{agentlab.Errorf(agentlab.CodeTimeout, "m"), 504, "timeout"},
		{agentlab.Errorf(agentlab.CodeNoSpace, "m"), 507, "no_space"},
		{errors.New("secret-of-the-daemon"), 500, "internal"},
		{fmt.Errorf("around: %w", agentlab.Errorf(agentlab.CodeNotFound, "m").WithHint("h").WithField("f")), 404, "not_found"},
		{&agentlab.Error{Code: agentlab.CodeInvalid, Message: "m", Err: errors.New("secret-of-the-daemon")}, 400, "invalid"},
	}
	seen := map[agentlab.Code]bool{}
	h := start(t, nil)
	for _, c := range cases {
		seen[c.code] = true
		h.mu.Lock()
		h.err = c.err
		h.mu.Unlock()
		status, header, body := h.do(t, "GET", "/v1/sandboxes/box", "", "")
		var p api.Error
		if err := json.Unmarshal([]byte(body), &p); err != nil {
			t.Fatalf("%v: %v in %s", c.err, err, body)
		}
		if status != c.status || p.Status != c.status || p.Code != string(c.code) || p.Title == "" || header.Get("Content-Type") != problemType {
			t.Errorf("%v: %d %+v", c.err, status, p)
		}
		if strings.Contains(body, "secret-of") {
			t.Errorf("%v: the cause is in the answer: %s", c.err, body)
		}
		var want *agentlab.Error
		if errors.As(c.err, &want) && (p.Detail != want.Message || p.Hint != want.Hint || p.Field != want.Field) {
			t.Errorf("%v: %+v", c.err, p)
		}
	}
	for code := range statusOf {
		if !seen[code] {
			t.Errorf("%s is not tested", code)
		}
	}
	if !strings.Contains(h.logged.String(), "secret-of-the-daemon") {
		t.Error("the cause of an internal error is not in the log")
	}
}

func TestPanic(t *testing.T) {
	h := start(t, nil)
	h.panics = true
	status, _, body := h.do(t, "GET", "/v1/jobs", "", "")
	if status != 500 || !strings.Contains(body, `"code":"internal"`) || strings.Contains(body, "secret-of") {
		t.Errorf("%d %s", status, body)
	}
	if !strings.Contains(h.logged.String(), "secret-of-the-daemon") {
		t.Error("the panic is not in the log")
	}
}

func TestBadRequests(t *testing.T) {
	big := `{"task":"` + strings.Repeat("x", maxJSONBytes) + `"}`
	cases := []struct {
		name, method, path, contentType, body string
		status                                int
		code, field                           string
	}{
		{"unknown field", "POST", "/v1/jobs", "application/json", `{"task":"t","nonsense":1}`, 400, "invalid", "nonsense"},
		{"wrong case", "POST", "/v1/jobs", "application/json", `{"Task":"t"}`, 400, "invalid", "task"},
		{"missing field", "POST", "/v1/jobs", "application/json", `{}`, 400, "invalid", "task"},
		{"missing nested field", "POST", "/v1/sandboxes", "application/json", `{"job":{}}`, 400, "invalid", "job.task"},
		{"wrong type", "POST", "/v1/jobs", "application/json", `{"task":1}`, 400, "invalid", "task"},
		{"not JSON", "POST", "/v1/jobs", "application/json", `{"task":`, 400, "invalid", "body"},
		{"two documents", "POST", "/v1/jobs", "application/json", `{"task":"t"}{}`, 400, "invalid", "body"},
		{"no body", "POST", "/v1/jobs", "application/json", ``, 400, "invalid", ""},
		{"a form", "POST", "/v1/jobs", "application/x-www-form-urlencoded", `task=t`, 400, "invalid", "body"},
		{"too large", "POST", "/v1/jobs", "application/json", big, 400, "invalid", ""},
		{"no workspace", "POST", "/v1/jobs", "application/json", `{"task":"t","workspace_wait_seconds":60}`, 400, "invalid", "workspace"},
		{"out of range", "POST", "/v1/sandboxes/box/stop", "application/json", `{"grace_seconds":-1}`, 400, "invalid", "grace_seconds"},
		{"zero lease", "POST", "/v1/sandboxes/box/lease/renew", "application/json", `{"ttl_minutes":0}`, 400, "invalid", "ttl_minutes"},
		{"unknown parameter", "GET", "/v1/jobs?nonsense=1", "", "", 400, "invalid", "nonsense"},
		{"unknown status", "GET", "/v1/jobs?status=GONE", "", "", 400, "invalid", "status"},
		{"bad limit", "GET", "/v1/sandboxes?limit=0", "", "", 400, "invalid", "limit"},
		{"huge limit", "GET", "/v1/sandboxes?limit=99999999999999999999", "", "", 400, "invalid", "limit"},
		{"bad cursor", "GET", "/v1/sandboxes?cursor=x", "", "", 400, "invalid", "cursor"},
		{"bad job cursor", "GET", "/v1/jobs?cursor=x", "", "", 400, "invalid", "cursor"},
		{"no upgrade", "POST", "/v1/sandboxes/box/exec", "application/json", `{"command":["true"]}`, 400, "invalid", "Upgrade"},
		{"port 0", "POST", "/v1/sandboxes/box/dial?port=0", "", "", 400, "invalid", "port"},
		{"no port", "POST", "/v1/sandboxes/box/dial", "", "", 400, "invalid", "port"},
		{"unknown route", "GET", "/v2/jobs", "", "", 404, "not_found", ""},
		{"unknown method", "PATCH", "/v1/jobs", "", "", 400, "invalid", ""},
		{"unknown sandbox", "GET", "/v1/sandboxes/nobody", "", "", 404, "not_found", ""},
		{"image without name", "POST", "/v1/images", "application/json", `{"name":""}`, 400, "invalid", "name"},
	}
	h := start(t, nil)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			status, header, body := h.do(t, c.method, c.path, c.contentType, c.body)
			var p api.Error
			if err := json.Unmarshal([]byte(body), &p); err != nil {
				t.Fatalf("%v in %.200s", err, body)
			}
			if status != c.status || p.Code != c.code || p.Field != c.field || p.Detail == "" || header.Get("Content-Type") != problemType {
				t.Errorf("%d %+v", status, p)
			}
		})
	}
	if h.wasCalled("job.create") {
		t.Error("a bad request reached the service")
	}
}

// TestGoodRequests are the forms of seed 000 §11.1 and the optional bodies.
func TestGoodRequests(t *testing.T) {
	h := start(t, nil)
	for _, c := range []struct {
		method, path, body string
		status             int
	}{
		{"POST", "/v1/sandboxes", `{"name":"box","profile":"yolo-ephemeral","job":{"task":"t","ttl_minutes":120},"keepalive":false,"workspace":null}`, 201},
		{"POST", "/v1/jobs", `{"repo_url":"https://x/y","ref":"main","profile":"p","task":"t","mode":"dangerous","ttl_minutes":9223372036854775807}`, 201},
		{"POST", "/v1/sandboxes/box/stop", ``, 202},
		{"POST", "/v1/sandboxes/box/destroy", ``, 202},
		{"POST", "/v1/sandboxes/1/lease/renew", `{"ttl_minutes":240}`, 200},
		{"DELETE", "/v1/images/base", ``, 204},
	} {
		if status, _, body := h.do(t, c.method, c.path, "application/json", c.body); status != c.status {
			t.Errorf("%s %s: %d %s", c.method, c.path, status, body)
		}
	}
	if h.grace != defaultGrace {
		t.Errorf("grace %s", h.grace)
	}
	if h.sandbx.Job == nil || h.sandbx.Job.TTL != 2*time.Hour || *h.sandbx.Keepalive {
		t.Errorf("sandbox request %+v", h.sandbx)
	}
	if agentlab.ValidateTTL(h.job.TTL) == nil {
		t.Errorf("an absurd TTL became %s", h.job.TTL)
	}
}

func TestSlowHeader(t *testing.T) {
	h := start(t, func(c *Config) { c.HeaderTimeout = 50 * time.Millisecond })
	conn, err := net.Dial("unix", h.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_, _ = conn.Write([]byte("GET /v1/health HT"))
	_ = conn.SetReadDeadline(time.Now().Add(guard.Patience))
	if _, err := io.ReadAll(conn); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a caller may hold a connection open with half a header")
	}
}
