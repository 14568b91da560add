package guestplane_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
	"github.com/agentlab-vm/agentlab/internal/guestplane/guesttest"
	"github.com/agentlab-vm/agentlab/internal/guestplane/messages"
)

// messenger makes calls about messages with the token of one sandbox.
func messenger(tb testing.TB, c *guesttest.Controller, p *guestplane.Plane) func(method, query, token, body string) (int, string) {
	tb.Helper()
	h := p.Handler(c.VMID)
	return func(method, query, token, body string) (int, string) {
		req := httptest.NewRequestWithContext(context.Background(), method, "http://controller"+guestapi.PathMessages+"?"+query, io.NopCloser(strings.NewReader(body)))
		req.Header.Set("Authorization", "Bearer "+token)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req)
		return w.Code, w.Body.String()
	}
}

// The channel sets scope and author, whatever a guest sends, and secrets are
// removed from every part of a message.
func TestMessagesOfAGuest(t *testing.T) {
	c := guesttest.New(t, guestapi.BootstrapResponse{Job: &guestapi.Job{}, Env: map[string]string{"K": secret}}, artifact.Limits{})
	call := messenger(t, c, c.Plane(guestplane.Config{}))
	token := c.Response().Messages.Token
	escaped := ""
	for _, r := range secret {
		escaped += fmt.Sprintf(`\u%04x`, r)
	}
	status, body := call("POST", "", token, `{"author":"user:0","scope_id":"job-x","text":"it is `+secret+`","json":{"a":["`+escaped+`"],"`+secret+`":{"b":1.50}}}`)
	if status != http.StatusOK {
		t.Fatal(status, body)
	}
	status, body = call("GET", "scope=job", token, "")
	var list guestapi.MessageList
	if err := json.Unmarshal([]byte(body), &list); err != nil || status != http.StatusOK || len(list.Messages) != 1 {
		t.Fatal(status, body, err)
	}
	m := list.Messages[0]
	if strings.Contains(body, secret) || m.Author != "job:"+c.JobID || m.Kind != "note" || !strings.Contains(string(m.JSON), "1.50") {
		t.Errorf("%s", body)
	}
	for name, bad := range map[string][3]string{
		"runner's token":  {"GET", "scope=job", c.Response().Runner.Token},
		"no session":      {"GET", "scope=session", token},
		"unknown scope":   {"GET", "scope=host", token},
		"negative number": {"GET", "after=-1", token},
	} {
		if status, body := call(bad[0], bad[1], bad[2], ""); status < 400 || status >= 500 {
			t.Errorf("%s: %d %s", name, status, body)
		}
	}
}

// A guest that floods gets errors: by the rate of its calls, and by the limits of
// its author.
func TestMessageFlood(t *testing.T) {
	c := guesttest.New(t, guestapi.BootstrapResponse{Job: &guestapi.Job{}}, artifact.Limits{})
	c.MaxPosts = 2
	slow := messages.Service(c)
	slow.Routes[0].Limits = guestplane.Limits{Rate: 0.5, Burst: 5}
	call := messenger(t, c, c.PlaneOf(slow))
	want := []int{200, 200, 429, 429, 429, 429}
	for i, w := range want {
		if status, body := call("POST", "", c.Response().Messages.Token, `{"text":"x"}`); status != w {
			t.Errorf("message %d: %d %s", i, status, body)
		}
	}
	if status, _ := call("POST", "", c.Response().Messages.Token, strings.Repeat("x", 1<<20)); status != http.StatusTooManyRequests {
		t.Errorf("over the rate, a large body: %d", status)
	}
}

// FuzzMessages posts anything: no 5xx, no secret, and what is stored is read back.
func FuzzMessages(f *testing.F) {
	for _, s := range []string{`{"text":"x"}`, `{"scope":"workspace","kind":"a b","json":{"a":1e999}}`, `{"json":[1]}`, `{"text":"\u001b[2J\ud800"}`, `{"text":"` + secret + `"}`, `{"json":{"a":{"a":null}}}`} {
		f.Add(s, "scope=job&after=0")
	}
	c := guesttest.New(f, guestapi.BootstrapResponse{Job: &guestapi.Job{}, Env: map[string]string{"K": secret}}, artifact.Limits{})
	call := messenger(f, c, c.Unlimited())
	token := c.Response().Messages.Token
	f.Fuzz(func(t *testing.T, body, query string) {
		if status, answer := call("POST", "", token, body); status >= 500 || strings.Contains(answer, secret) {
			t.Errorf("post: %d %s", status, answer)
		}
		query = strings.ReplaceAll(strings.Map(printable, query), "wait", "")
		if status, answer := call("GET", query, token, ""); status >= 500 || strings.Contains(answer, secret) {
			t.Errorf("read: %d %s", status, answer)
		}
	})
}

// detached is a sandbox that loses its workspace while its guest waits for messages.
type detached struct {
	*guesttest.Controller
	lost atomic.Bool
}

func (d *detached) OfSandbox(ctx context.Context, vmid int, kind agentlab.MessageScopeKind) (agentlab.MessageScope, string, error) {
	if d.lost.Load() {
		return agentlab.MessageScope{}, "", agentlab.Errorf(agentlab.CodeNotFound, "this sandbox has no %s", kind)
	}
	return d.Controller.OfSandbox(ctx, vmid, kind)
}

func (d *detached) AwaitMessages(_ context.Context, f agentlab.MessageFilter) ([]agentlab.Message, error) {
	d.lost.Store(true)
	return []agentlab.Message{{ID: 1, Scope: f.Scope, Text: "of another sandbox"}}, nil
}

// A guest does not get the messages of the sandbox that has its workspace now.
func TestMessagesAfterAWorkspaceIsLost(t *testing.T) {
	c := guesttest.New(t, guestapi.BootstrapResponse{Job: &guestapi.Job{}}, artifact.Limits{})
	d := &detached{Controller: c}
	h := c.PlaneOf(messages.Service(d)).Handler(c.VMID)
	req := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://controller"+guestapi.PathMessages+"?scope=workspace&wait=1", nil)
	req.Header.Set("Authorization", "Bearer "+c.Response().Messages.Token)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	if w.Code != http.StatusNotFound || strings.Contains(w.Body.String(), "of another") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}
