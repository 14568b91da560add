package job_test

import (
	"context"
	"reflect"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// The requests of a repository are untrusted text: they become a further layer
// of the policy, or are rejected as a whole.
func TestNarrowNetwork(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		j := w.run(agentlab.JobRequest{Profile: "listed", Task: "hang"})
		w.eventually("running", func() bool { return w.sandbox(j.ID).State == agentlab.SandboxRunning })
		sb := w.sandbox(j.ID)
		profile := w.profiles.get("listed").Network
		many := make([]string, 1001)
		for i := range many {
			many[i] = "a.example"
		}
		for name, n := range map[string]guestapi.NetworkNarrow{
			"no mode":      {},
			"unknown mode": {Mode: "host"},
			"a preset":     {Mode: "allowlist", Allow: []string{"preset:github"}},
			"a file":       {Mode: "allowlist", Allow: []string{"file:/etc/passwd"}},
			"private":      {Mode: "allowlist", Allow: []string{"10.0.0.0/8"}},
			"ignored":      {Mode: "nat", Allow: []string{"evil.example"}},
			"injection":    {Mode: "allowlist", Allow: []string{"a.example; flush ruleset"}},
			"controls":     {Mode: "nat", Deny: []string{"a.example\x1b[2J"}},
			"too many":     {Mode: "allowlist", Allow: many},
		} {
			err := w.jobs.NarrowNetwork(ctx, sb.VMID, n)
			wantCode(t, err, agentlab.CodeInvalid)
			if strings.ContainsAny(err.Error(), "\x1b\n") {
				t.Errorf("%s: %q", name, err)
			}
			if got := w.sandbox(j.ID).Network; !reflect.DeepEqual(got, profile) {
				t.Errorf("%s: the policy is %+v", name, got)
			}
		}
		if err := w.jobs.NarrowNetwork(ctx, sb.VMID, guestapi.NetworkNarrow{Mode: "nat", Deny: []string{"github.com"}, Ports: []string{"443"}}); err != nil {
			t.Fatal(err)
		}
		want := profile
		want.Layers = []agentlab.Network{{Mode: "nat", Deny: []agentlab.NetworkRule{{Rule: "github.com", Source: "the repository"}}, Ports: []string{"443"}}}
		got, err := w.host.Network(backend.RefOf(sb))
		if err != nil || !reflect.DeepEqual(got, want) || !reflect.DeepEqual(w.sandbox(j.ID).Network, want) {
			t.Errorf("in force %+v, %v; row %+v", got, err, w.sandbox(j.ID).Network)
		}
		wantCode(t, w.jobs.NarrowNetwork(ctx, 4711, guestapi.NetworkNarrow{Mode: "off"}), agentlab.CodeNotFound)
		if _, err := w.jobs.Cancel(ctx, j.ID); err != nil {
			t.Fatal(err)
		}
		w.final(j.ID)
	})
}
