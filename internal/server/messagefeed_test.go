package server

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/auth"
)

// The messages of a job, a workspace and a session are also below their own paths, and a
// token that is restricted to a sandbox reads there those of its job only.
func TestMessagesByPath(t *testing.T) {
	l := startAccess(t)
	l.err = nil
	token := l.make(t, auth.Request{Role: "read"})
	bound := l.make(t, auth.Request{Role: "read", Sandboxes: []agentlab.TokenSandbox{{UID: ownUID, VMID: 1, Name: "box"}}})
	get := func(path, token string) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+l.tcp+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(body)
	}
	for path, query := range map[string]string{
		"/v1/jobs/" + stubJobID + "/messages": "job=" + stubJobID,
		"/v1/workspaces/data/messages":        "workspace=data",
		"/v1/sessions/fix/messages":           "session=fix",
	} {
		_, want := get("/v1/messages?"+query, token)
		if status, got := get(path+"?limit=5", token); status != http.StatusOK || got != want || !strings.Contains(got, "items") {
			t.Errorf("%s: %d %s, want %s", path, status, got, want)
		}
		status, _ := get(path, bound)
		if ofJob := strings.Contains(path, "/jobs/"); ofJob != (status == http.StatusOK) {
			t.Errorf("%s with a restricted token: %d", path, status)
		}
	}
}
