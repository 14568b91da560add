package daemon

import (
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

// With too little disk space nothing is started, nothing from guests is
// stored, and this is reported.
func TestNoSpace(t *testing.T) {
	h := newHome(t)
	h.configure(t, "backend: fake\nlimits:\n  min_free_mb: 1048576\n") // more than any disk of tests has
	h.start(t)
	_, err := h.client.CreateSandbox(t.Context(), api.SandboxCreate{})
	if agentlab.CodeOf(err) != agentlab.CodeNoSpace || !strings.Contains(agentlab.HintOf(err), "min_free_mb") {
		t.Errorf("a sandbox: %v", err)
	}
	if _, err := h.client.CreateJob(t.Context(), shell("true")); agentlab.CodeOf(err) != agentlab.CodeNoSpace {
		t.Errorf("a job: %v", err)
	}
	s, err := h.client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, f := range s.Findings {
		found = found || f.Name == "disk space" && f.Level == "error" && f.Remedy != ""
	}
	if !found {
		t.Errorf("findings: %+v", s.Findings)
	}
	for e, err := range h.client.FollowEvents(t.Context(), client.EventQuery{}) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Kind == agentlab.EventSpace {
			if e.Data["full"] != true {
				t.Errorf("%+v", e)
			}
			break
		}
	}
}
