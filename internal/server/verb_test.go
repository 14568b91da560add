package server

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/auth"
)

// A sandbox can be asked for together with a job, which runs a task of the
// caller's own with the profile's secrets: that needs the verb of jobs too.
func TestSandboxWithJobNeedsBothVerbs(t *testing.T) {
	l := startAccess(t)
	l.err = nil
	for _, test := range []struct {
		verbs  []string
		body   string
		status int
	}{
		{[]string{"sandbox.create"}, `{"name":"a"}`, http.StatusCreated},
		{[]string{"sandbox.create"}, `{"name":"a","job":{"task":"env","agent":"shell"}}`, http.StatusForbidden},
		{[]string{"job.run"}, `{"name":"a","job":{"task":"env","agent":"shell"}}`, http.StatusForbidden},
		{[]string{"sandbox.create", "job.run"}, `{"name":"a","job":{"task":"env","agent":"shell"}}`, http.StatusCreated},
		{nil, `{"name":"a","job":{"task":"env","agent":"shell"}}`, http.StatusCreated},
	} {
		l.mu.Lock()
		l.calls = nil
		l.mu.Unlock()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+l.tcp+"/v1/sandboxes", strings.NewReader(test.body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer "+l.make(t, auth.Request{Role: agentlab.RoleWrite, Verbs: slices.Clone(test.verbs)}))
		resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != test.status {
			t.Errorf("%v, %s: %d %s, want %d", test.verbs, test.body, resp.StatusCode, text, test.status)
		}
		if test.status == http.StatusForbidden && (l.numCalls() != 0 || !strings.Contains(string(text), "job.run") && slices.Contains(test.verbs, "sandbox.create")) {
			t.Errorf("%v: %s, services %v", test.verbs, text, l.calls)
		}
	}
}
