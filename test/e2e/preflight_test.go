package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/fakellm"
)

// A real agent whose model is denied does not start, and, started all the
// same, ends soon with the host and the rule as the reason.
func TestDeniedModel(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	n.Web("web.example.com")
	l.profile("closed", "name: closed\nnetwork: {mode: allowlist, allow: [web.example.com]}\nsecrets_bundle: default\n")

	wantRefused := func(wants ...string) {
		t.Helper()
		r := l.run("", "job", "run", "--profile", "closed", "--agent", "claude", "--task", "Say hello.")
		for _, want := range wants {
			if r.code != 1 || !strings.Contains(r.stderr, want) {
				t.Errorf("%v lacks %q", r, want)
			}
		}
		l.noSandboxes()
	}
	wantRefused("no key for its model", "agentlab secrets set env.ANTHROPIC_API_KEY")
	l.secret("env.ANTHROPIC_API_KEY", "sk-ant-test-0123456789")
	wantRefused("api.anthropic.com:443 is denied by rule mode.allowlist", "network.allow")

	j, r := l.job("--profile", "closed", "--agent", "claude", "--no-preflight", "--task", "Say hello.")
	wantModelDenied(t, l, "api.anthropic.com:443", "mode.allowlist", j.Status, j.Reason)
	if want := "denied: api.anthropic.com, DNS (rule mode.allowlist)"; !strings.Contains(r.stderr, want) {
		t.Errorf("%q is not in the progress:\n%s", want, r.stderr)
	}
	l.noSandboxes()
}

func wantModelDenied(t *testing.T, l *lab, host, rule, status, reason string) {
	t.Helper()
	if status != "FAILED" || !strings.Contains(reason, "its model host "+host+" is denied") || !strings.Contains(reason, rule) {
		t.Errorf("%s: %q", status, reason)
	}
}

// A repository that narrows the network does not cut its agent off from the
// model, unless it is strict; then the job ends soon.
func TestNarrowingKeepsModel(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	llm := fakellm.New(agentScript...)
	n.HandleHTTP("llm.example.com", 80, llm)
	l.secret("env.ANTHROPIC_BASE_URL", "http://llm.example.com")
	l.secret("env.ANTHROPIC_AUTH_TOKEN", "sk-test-anthropic")
	for _, strict := range []bool{false, true} {
		repo := sampleRepo(t)
		text := "network:\n  allow: [github.com]\n"
		if strict {
			text += "  strict: true\n"
		}
		if err := os.WriteFile(filepath.Join(repo, ".agentlab.yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		git(t, repo, "add", ".")
		git(t, repo, "commit", "-qm", "Network")
		j, r := l.job("--repo", repo, "--agent", "claude", "--task", "Fix the greeting so that its test passes, and commit.")
		switch {
		case strict:
			wantModelDenied(t, l, "llm.example.com:80", "layer.mode.allowlist", j.Status, j.Reason)
		case j.Status != "COMPLETED" || j.Result.Commits != 1:
			t.Errorf("%+v\n%v\nlog:\n%s", j, r, tail(l.ok("job", "logs", j.ID), 60))
		}
	}
	l.noSandboxes()
}
