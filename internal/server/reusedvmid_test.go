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

// A number comes free when its sandbox has been gone for long. What is on
// record of that one is not about the sandbox that has the number now, and
// nothing for a token that is bound to it.
func TestReusedVMID(t *testing.T) {
	now := time.Now()
	l := startAccess(t)
	l.err = nil
	for _, e := range []struct{ kind, uid, text string }{{"x", otherUID, "earlier"}, {agentlab.EventSandboxCreated, ownUID, "created"}, {"x", ownUID, "its own"}} {
		l.commit(agentlab.Event{Kind: e.kind, SandboxVMID: 1, Time: now, Message: e.text})
		l.mu.Lock()
		l.egress = append(l.egress, agentlab.EgressEntry{ID: int64(len(l.egress) + 1), UID: e.uid, EgressRecord: agentlab.EgressRecord{Seq: 1, VMID: 1, Time: now, Last: now, Name: e.text}})
		l.mu.Unlock()
		now = now.Add(-2 * time.Hour) // the clock is set back after each
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
