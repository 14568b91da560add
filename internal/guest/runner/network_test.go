package runner

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

func TestRepositoryNarrowsTheNetwork(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want []guestapi.NetworkNarrow
	}{
		"nothing":      {"outputs: [dist/**]\n", nil},
		"allow":        {"network:\n  allow: [github.com, '*.npmjs.org:443']\n  ports: [443]\n", []guestapi.NetworkNarrow{{Mode: "allowlist", Allow: []string{"github.com", "*.npmjs.org:443"}, Ports: []string{"443"}}}},
		"deny":         {"network:\n  deny: [tracker.example]\n", []guestapi.NetworkNarrow{{Mode: "nat", Deny: []string{"tracker.example"}}}},
		"off":          {"network: {mode: off}\n", []guestapi.NetworkNarrow{{Mode: "off"}}},
		"strict":       {"network: {allow: [github.com], strict: true}\n", []guestapi.NetworkNarrow{{Mode: "allowlist", Allow: []string{"github.com"}, Strict: true}}},
		"even nothing": {"network: {mode: allowlist}\n", []guestapi.NetworkNarrow{{Mode: "allowlist"}}},
	} {
		t.Run(name, func(t *testing.T) {
			url := newGitServer(t, "").add(t, "repo", newRepo(t, map[string]string{projectFile: c.text}))
			s := gitSandbox(t, url, "", 0, "true")
			if rep := s.finish(); rep.Status != "COMPLETED" {
				t.Errorf("%+v", rep)
			}
			if got := s.Narrowed(); !reflect.DeepEqual(got, c.want) {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}

// The agent is not started under a policy that was not narrowed.
func TestAgentWaitsForTheNarrowPolicy(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		err  error
		want string
	}{
		"refused":     {"network: {allow: [x]}\n", agentlab.Errorf(agentlab.CodeInvalid, "\"x\" is not a network rule"), "is not a network rule"},
		"unsupported": {"network: {mode: off}\n", agentlab.Errorf(agentlab.CodeUnsupported, "no"), projectFile},
		"unknown key": {"network: {layers: []}\n", nil, "network.layers"},
		"no list":     {"network: {allow: github.com}\n", nil, "a list is expected"},
	} {
		t.Run(name, func(t *testing.T) {
			url := newGitServer(t, "").add(t, "repo", newRepo(t, map[string]string{projectFile: c.text}))
			s := gitSandbox(t, url, "", 0, "touch ../ran")
			s.FailNarrow(c.err)
			if rep := s.finish(); rep.Status != "FAILED" || !strings.Contains(rep.Message, c.want) || rep.ExitCode != nil {
				t.Errorf("%+v", rep)
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(s.cfg.ClonePath), "ran")); err == nil {
				t.Error("the agent ran")
			}
		})
	}
}
