package guestplane_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
	"github.com/agentlab-vm/agentlab/internal/guestplane/artifacts"
	"github.com/agentlab-vm/agentlab/internal/guestplane/bootstrap"
	"github.com/agentlab-vm/agentlab/internal/guestplane/guesttest"
	"github.com/agentlab-vm/agentlab/internal/guestplane/lease"
	"github.com/agentlab-vm/agentlab/internal/guestplane/messages"
	"github.com/agentlab-vm/agentlab/internal/guestplane/report"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// Two sandboxes, each with a job.
const (
	ownVMID, otherVMID = 42, 43
	ownJob, otherJob   = "job-aaaaaaaaaaaaa", "job-bbbbbbbbbbbbb"
	endedJob           = "job-ccccccccccccc" // of the own sandbox
)

// about is a call that reached a service: whom it was about.
type about struct {
	what string
	vmid int    // 0: not passed to the service
	job  string // "": not passed to the service
}

// services notes whom they are called about, and has tokens of both sandboxes:
// "own-runner", "other-upload" and so on.
type services struct {
	mu    sync.Mutex
	calls []about
}

func (s *services) note(a about) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, a)
}

func (s *services) GrantByHash(_ context.Context, hash, kind string) (agentlab.Grant, error) {
	soon := time.Now().Add(time.Hour)
	for token, g := range map[string]agentlab.Grant{
		"own-" + kind: {VMID: ownVMID, JobID: ownJob, ExpiresAt: soon}, "other-" + kind: {VMID: otherVMID, JobID: otherJob, ExpiresAt: soon},
		"expired-" + kind: {VMID: ownVMID, JobID: ownJob, ExpiresAt: time.Now()}, "ended-" + kind: {VMID: ownVMID, JobID: endedJob, ExpiresAt: soon},
		"jobless-" + kind: {VMID: ownVMID, ExpiresAt: soon},
	} {
		if guestplane.Hash(token) == hash {
			return g, nil
		}
	}
	return agentlab.Grant{}, agentlab.Errorf(agentlab.CodeNotFound, "there is no such grant")
}

func (s *services) Job(_ context.Context, id string) (agentlab.Job, error) {
	status := agentlab.JobRunning
	if id == endedJob {
		status = agentlab.JobCompleted
	}
	return agentlab.Job{ID: id, Status: status}, nil
}

func (s *services) Started(_ context.Context, vmid int) { s.note(about{"started", vmid, ""}) }

func (s *services) Exchange(_ context.Context, vmid int, hash string) (guestapi.BootstrapResponse, error) {
	whose := map[string]int{guestplane.Hash("own-once"): ownVMID, guestplane.Hash("other-once"): otherVMID}[hash]
	if whose != vmid {
		return guestapi.BootstrapResponse{}, agentlab.Errorf(agentlab.CodeDenied, "no")
	}
	s.note(about{"bootstrap", vmid, ""})
	return guestapi.BootstrapResponse{}, nil
}

func (s *services) Report(_ context.Context, vmid int, _ guestapi.Report) (guestapi.Directive, error) {
	s.note(about{"report", vmid, ""})
	return guestapi.Directive{}, nil
}

func (s *services) NarrowNetwork(_ context.Context, vmid int, _ guestapi.NetworkNarrow) error {
	s.note(about{"narrow", vmid, ""})
	return nil
}

func (s *services) Directive(_ context.Context, vmid int, _ time.Duration) (guestapi.Directive, error) {
	s.note(about{"directive", vmid, ""})
	return guestapi.Directive{}, nil
}

func (s *services) Put(_ context.Context, job, path string, r io.Reader) (agentlab.Artifact, error) {
	s.note(about{"put", 0, job})
	_, err := io.Copy(io.Discard, r)
	return agentlab.Artifact{Path: path}, err
}

func (s *services) LogSize(_ context.Context, job string) (int64, error) {
	s.note(about{"log size", 0, job})
	return 0, nil
}

func (s *services) Log(_ context.Context, job string, _ int64, _ bool) (io.ReadCloser, error) {
	s.note(about{"log", 0, job})
	return io.NopCloser(strings.NewReader("")), nil
}

func (s *services) AppendLog(_ context.Context, job string, off int64, p []byte) (int64, bool, error) {
	s.note(about{"append", 0, job})
	return off + int64(len(p)), false, nil
}

func (s *services) RepoBundle(_ context.Context, job string) (io.ReadSeekCloser, int64, error) {
	s.note(about{"repo", 0, job})
	return nopSeeker{strings.NewReader("bundle")}, 6, nil
}

func (s *services) SandboxRedactor(_ context.Context, vmid int) (*redact.Redactor, error) {
	s.note(about{"sandbox redactor", vmid, ""})
	return redact.New(), nil
}

func (s *services) Redactor(_ context.Context, job string) (*redact.Redactor, error) {
	s.note(about{"redactor", 0, job})
	return redact.New(), nil
}

func (s *services) OfSandbox(_ context.Context, vmid int, kind agentlab.MessageScopeKind) (agentlab.MessageScope, string, error) {
	s.note(about{"scope", vmid, ""})
	return agentlab.MessageScope{Kind: kind, ID: ownJob}, "job:" + ownJob, nil
}

func (s *services) Lease(_ context.Context, vmid int) (time.Time, error) {
	s.note(about{"lease", vmid, ""})
	return time.Time{}, nil
}

func (s *services) RenewFromGuest(_ context.Context, vmid int, _ time.Duration) (time.Time, error) {
	s.note(about{"renew", vmid, ""})
	return time.Time{}, nil
}

func (s *services) Post(_ context.Context, m agentlab.Message) (agentlab.Message, error) {
	s.note(about{"post", 0, m.Scope.ID})
	return m, nil
}

func (s *services) List(_ context.Context, f agentlab.MessageFilter) ([]agentlab.Message, error) {
	s.note(about{"messages", 0, f.Scope.ID})
	return nil, nil
}

func (s *services) AwaitMessages(ctx context.Context, f agentlab.MessageFilter) ([]agentlab.Message, error) {
	return s.List(ctx, f)
}

type nopSeeker struct{ *strings.Reader }

func (nopSeeker) Close() error { return nil }

// all returns the services of the plane, without limits of their routes.
func (s *services) all() (out []guestplane.Service) {
	for _, one := range []guestplane.Service{bootstrap.Service(s, s), report.Service(s), artifacts.Service(s), messages.Service(s), lease.Service(s)} {
		out = append(out, guesttest.Unlimited(one))
	}
	return out
}

func (s *services) routes() (out []guestplane.Route) {
	for _, one := range s.all() {
		out = append(out, one.Routes...)
	}
	return out
}

// claims are ways to claim another identity: in the body, the query, the
// header and the path.
func claims(r guestplane.Route) []*http.Request {
	body, err := json.Marshal(map[string]any{
		"status": "RUNNING", "phase": "agent", "message": "m", "token": "own-once",
		"vmid": otherVMID, "VMID": otherVMID, "job": otherJob, "job_id": otherJob, "JobID": otherJob, "sandbox": "other", "uid": "other",
	})
	if err != nil {
		panic(err) // strings and numbers
	}
	plainBody := `{"status":"RUNNING","phase":"agent"}`
	if r.Path == guestapi.PathBootstrap {
		plainBody = fmt.Sprintf(`{"token":"own-once","vmid":%d}`, ownVMID)
	}
	path := strings.ReplaceAll(r.Path, "{path...}", "a.txt")
	query := url.Values{"vmid": {fmt.Sprint(otherVMID)}, "job": {otherJob}, "job_id": {otherJob}, "sandbox": {"other"}, "offset": {"0"}}
	mk := func(path, body string) *http.Request {
		return httptest.NewRequest(r.Method, "http://10.77.0.1:8844"+path, strings.NewReader(body))
	}
	out := []*http.Request{mk(path, plainBody), mk(path, string(body)), mk(path+"?"+query.Encode(), plainBody)}
	h := mk(path, plainBody)
	for _, k := range []string{"X-Agentlab-Vmid", "X-Forwarded-For", "Forwarded", "X-Real-Ip", "Host", "X-Job-Id"} {
		h.Header.Set(k, "10.77.0.3")
	}
	h.Host, h.RemoteAddr = "10.77.0.3:8844", "10.77.0.3:1234"
	out = append(out, h)
	if strings.Contains(r.Path, "{path...}") {
		for _, p := range []string{otherJob + "/a.txt", "..%2f" + otherJob + "%2fa.txt", "%2e%2e/" + otherJob + "/a.txt"} {
			out = append(out, mk(strings.ReplaceAll(r.Path, "{path...}", p), plainBody))
		}
	}
	return out
}

// TestGuestCanAccessOnlyItself makes every call of the table through the
// channel of one sandbox, with every kind of token and every claim of another
// identity. No service is ever called about another sandbox or job, and
// without a token of this channel's own sandbox and of the right kind none is
// called at all.
func TestGuestCanAccessOnlyItself(t *testing.T) {
	s := &services{}
	srv := guestplane.New(guestplane.Config{Store: s, Redactors: s, Limits: guestplane.PlaneLimits{Rate: 1e6}}, s.all()...)
	handler := srv.Handler(ownVMID)
	for _, r := range s.routes() {
		if r.Method == "" || r.Path == "" || r.Serve == nil || r.Token < guestplane.Channel || r.Token > guestplane.Messenger {
			t.Fatalf("%s %s lacks a column", r.Method, r.Path)
		}
		good := map[guestplane.Token][]string{
			guestplane.Runner: {"own-runner", "ended-runner"}, guestplane.RunnerAtWork: {"own-runner"}, guestplane.UploaderAtWork: {"own-upload"},
			guestplane.Messenger: {"own-messages", "ended-messages", "jobless-messages"},
		}[r.Token]
		reached := false
		for _, token := range []string{
			"", "own-runner", "own-upload", "other-runner", "other-upload", "expired-runner", "expired-upload",
			"ended-runner", "ended-upload", "jobless-runner", "jobless-upload", "own-messages", "other-messages", "expired-messages", "ended-messages", "jobless-messages", "own-once", "other-once", "made-up",
		} {
			for i, req := range claims(r) {
				s.calls = nil
				if token != "" {
					req.Header.Set("Authorization", "Bearer "+token)
				}
				w := httptest.NewRecorder()
				handler.ServeHTTP(w, req)
				name := fmt.Sprintf("%s %s, claim %d, token %q: %d %s", r.Method, req.URL, i, token, w.Code, w.Body)
				for _, c := range s.calls {
					if c.vmid == otherVMID || c.job == otherJob || c.vmid == 0 && c.job == "" {
						t.Errorf("%s: about another: %+v", name, c)
					}
				}
				switch {
				case r.Token == guestplane.Channel: // which no bearer token replaces
					reached = reached || len(s.calls) > 0
				case !slices.Contains(good, token) && (len(s.calls) > 0 || w.Code != http.StatusUnauthorized && w.Code != http.StatusNotFound):
					t.Errorf("%s: the token should not do, called %v", name, s.calls)
				case slices.Contains(good, token):
					reached = reached || len(s.calls) > 0
				}
			}
		}
		if !reached {
			t.Errorf("%s %s: no call got through, so this shows nothing", r.Method, r.Path)
		}
	}
}

// TestBootstrapRequiresGuestChannel: the one-time token is worth nothing
// through another sandbox's channel, whatever number the guest claims.
func TestBootstrapRequiresGuestChannel(t *testing.T) {
	s := &services{}
	srv := guestplane.New(guestplane.Config{Store: s, Redactors: s}, s.all()...)
	for _, c := range []struct {
		channel, claimed int
		token            string
		want             int
	}{
		{ownVMID, ownVMID, "own-once", 200}, {otherVMID, otherVMID, "other-once", 200},
		{ownVMID, otherVMID, "own-once", 403}, {ownVMID, otherVMID, "other-once", 403}, {ownVMID, ownVMID, "other-once", 403},
		{otherVMID, ownVMID, "own-once", 403}, {otherVMID, otherVMID, "own-once", 403},
		{ownVMID, 0, "own-once", 403}, {ownVMID, -1, "own-once", 403},
	} {
		s.calls = nil
		w := httptest.NewRecorder()
		body := fmt.Sprintf(`{"token":%q,"vmid":%d}`, c.token, c.claimed)
		srv.Handler(c.channel).ServeHTTP(w, httptest.NewRequest("POST", guestapi.PathBootstrap, strings.NewReader(body)))
		if w.Code != c.want || c.want != 200 && len(s.calls) > 0 {
			t.Errorf("%+v: %d %s, called %v", c, w.Code, w.Body, s.calls)
		}
		if started := slices.Contains(s.calls, about{"started", c.channel, ""}); started != (c.want == 200) {
			t.Errorf("%+v: called %v", c, s.calls)
		}
	}
}

// A route without a token denies all calls, and one without a maximum body reads none.
func TestRouteWithoutColumns(t *testing.T) {
	called := false
	serve := func(c *guestplane.Call) (any, error) {
		called = true
		_, err := c.Read()
		return nil, err
	}
	h := guestplane.New(guestplane.Config{Store: &services{}}, guestplane.Service{Routes: []guestplane.Route{
		{Method: "GET", Path: "/v1/x", Serve: serve}, {Method: "POST", Path: "/v1/y", Token: guestplane.Channel, Serve: serve},
	}}).Handler(ownVMID)
	for _, token := range []string{"", "own-runner", "own-upload"} {
		req := httptest.NewRequest(http.MethodGet, "/v1/x", nil)
		req.Header.Set("Authorization", "Bearer "+token)
		w := httptest.NewRecorder()
		if h.ServeHTTP(w, req); called || w.Code != http.StatusUnauthorized {
			t.Errorf("with %q: %d, called %t", token, w.Code, called)
		}
	}
	w := httptest.NewRecorder()
	if h.ServeHTTP(w, httptest.NewRequest("POST", "/v1/y", strings.NewReader("x"))); !called || w.Code != http.StatusRequestEntityTooLarge {
		t.Errorf("a body: %d, called %t", w.Code, called)
	}
}

// The calls of a service with a lane do not take the places of the calls of others, and
// wait for each other.
func TestLane(t *testing.T) {
	begun, release := make(chan struct{}), make(chan struct{})
	h := guestplane.New(guestplane.Config{Store: &services{}, Limits: guestplane.PlaneLimits{InFlight: 1}},
		guestplane.Service{Name: "wide", Lane: guestplane.Limits{Parallel: 1, Wait: true}, Protocol: &guestplane.Protocol{
			Match: func(r *http.Request) bool { return strings.HasPrefix(r.URL.Path, "/wide/") },
			Serve: func(_ *guestplane.Call, w http.ResponseWriter) {
				begun <- struct{}{}
				<-release
				w.WriteHeader(http.StatusTeapot)
			},
		}},
		guestplane.Service{Name: "other", Routes: []guestplane.Route{{
			Method: "GET", Path: "/v1/x", Token: guestplane.Channel, Serve: func(*guestplane.Call) (any, error) { return nil, nil },
		}}}).Handler(ownVMID)
	get := func(path string) int {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		return w.Code
	}
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if got := get("/wide/x"); got != http.StatusTeapot {
				t.Errorf("a call with a lane: %d", got)
			}
		})
	}
	<-begun
	if got := get("/v1/x"); got != http.StatusNoContent {
		t.Errorf("a call of another service: %d", got)
	}
	release <- struct{}{}
	<-begun
	release <- struct{}{}
	wg.Wait()
}
