package server

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/auth"
)

// youngSandboxes knows one that was made lately.
type youngSandboxes struct {
	knownSandboxes
	at time.Time
}

func (s youngSandboxes) Get(ctx context.Context, name string) (agentlab.Sandbox, error) {
	sb, err := s.knownSandboxes.Get(ctx, name)
	sb.CreatedAt = s.at
	return sb, err
}

// A number comes free when its sandbox has been gone for long. What is on
// record of that one is not about the sandbox that has the number now, and
// nothing for a token that is bound to it.
func TestReusedVMID(t *testing.T) {
	now := time.Now()
	l := startAccess(t, func(c *Config) {
		c.Services.Sandboxes = youngSandboxes{c.Services.Sandboxes.(knownSandboxes), now}
	})
	l.err = nil
	for i, at := range []time.Time{now.Add(-24 * time.Hour), now} {
		text := []string{"earlier", "its own"}[i]
		l.commit(agentlab.Event{Kind: "x", SandboxVMID: 1, Time: at, Message: text})
		l.mu.Lock()
		l.egress = append(l.egress, agentlab.EgressEntry{ID: int64(i + 1), UID: "u", EgressRecord: agentlab.EgressRecord{Seq: 1, VMID: 1, Time: at, Last: at, Name: text}})
		l.mu.Unlock()
	}
	bound := l.make(t, auth.Request{Role: agentlab.RoleRead, Sandboxes: []agentlab.TokenSandbox{{UID: ownUID, VMID: 1, Name: "box"}}})
	for _, path := range []string{
		"/v1/events?sandbox=box", "/v1/events?sandbox=1&after=0", "/v1/events?sandbox=box&follow=true",
		"/v1/egress?sandbox=box", "/v1/egress?sandbox=box&since=2001-01-01T00:00:00Z", "/v1/egress?sandbox=box&follow=true",
	} {
		ctx, stop := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+l.tcp+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+bound)
		resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		var text strings.Builder
		buf := make([]byte, 4096)
		for !strings.Contains(text.String(), "its own") {
			n, err := resp.Body.Read(buf)
			text.Write(buf[:n])
			if err != nil && err != io.EOF {
				t.Fatal(err)
			}
			if err != nil {
				break
			}
		}
		stop()
		_ = resp.Body.Close()
		if got := text.String(); resp.StatusCode != http.StatusOK || strings.Contains(got, "earlier") || !strings.Contains(got, "its own") {
			t.Errorf("%s: %d %s", path, resp.StatusCode, got)
		}
	}
}
