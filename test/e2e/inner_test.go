package e2e

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/fakellm"
)

const innerProfile = `name: boxed
behavior:
  inner_sandbox: bubblewrap
  inner_sandbox_args: [--setenv, BOXED, "by the profile"]
secrets_bundle: default
`

// profile installs a profile of the user's own.
func (l *lab) profile(name, yaml string) {
	l.Helper()
	dir := filepath.Join(l.home, "config", "profiles")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		l.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(yaml), 0o600); err != nil {
		l.Fatal(err)
	}
}

// innerLook tells what a process in the inner sandbox can do.
const innerLook = `say() { if "${@:2}" >/dev/null 2>&1; then echo "$1 yes"; else echo "$1 no"; fi; }
say 'work in the repository:' sh -c 'echo hello > greeting.txt && sh test.sh && git commit -qam Mended'
say 'write to /tmp:' sh -c 'echo x > /tmp/x'
say 'write to the home:' sh -c 'mkdir -p ~/.cache/x && echo x > ~/.cache/x/y'
say 'write to /etc:' sudo -n sh -c 'echo x > /etc/x'
say 'write to /usr:' sh -c 'echo x > /usr/local/x'
say 'become root:' sudo -n true
say 'see the secrets of the runner:' sh -c 'test "$(echo $(ls -A /run/agentlab/secrets))" != "messages task"'
say 'see the bootstrap document:' cat /etc/agentlab/bootstrap.json
say 'see other processes:' pgrep -f agent-runner
say 'see disks:' sh -c 'ls /dev | grep -q vd'
say 'make namespaces:' unshare -U true
say 'use the network:' curl -fsS http://web.example.com/
say 'find the model key:' sh -c 'test "$ANTHROPIC_AUTH_TOKEN" = sk-test-anthropic'
echo "boxed: $BOXED"
mkdir -p out && echo built > out/result.txt`

// The agent runs in bubblewrap inside its sandbox, on the shipped images: a
// shell, and a real coding agent that does a whole job there.
func TestInnerSandbox(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	n.HandleHTTP("web.example.com", 80, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello from the web\n") }))
	llm := fakellm.New(agentScript...)
	n.HandleHTTP("llm.example.com", 80, llm)
	secrets := map[string]string{"env.ANTHROPIC_BASE_URL": "http://llm.example.com", "env.ANTHROPIC_AUTH_TOKEN": "sk-test-anthropic"}
	for k, v := range secrets {
		l.secret(k, v)
	}
	l.profile("boxed", innerProfile)

	t.Run("shell", func(t *testing.T) {
		j, r := l.job("--profile", "boxed", "--repo", sampleRepo(t), "--agent", "shell", "--task", innerLook)
		log := l.ok("job", "logs", j.ID)
		if j.Status != "COMPLETED" || j.Result.Commits != 1 {
			t.Fatalf("%+v\n%v\nlog:\n%s", j, r, log)
		}
		for what, answer := range map[string]string{
			"work in the repository": "yes", "write to /tmp": "yes", "write to the home": "yes", "write to /etc": "no", "write to /usr": "no",
			"become root": "no", "see the secrets of the runner": "no", "see the bootstrap document": "no", "see other processes": "no",
			"see disks": "no", "make namespaces": "no", "use the network": "yes", "find the model key": "yes", "boxed": "by the profile",
		} {
			if !strings.Contains(log, what+": "+answer+"\n") {
				t.Errorf("%s: want %q", what, answer)
			}
		}
		if t.Failed() {
			t.Log(log)
		}
		found := false
		for _, a := range j.Artifacts {
			found = found || a.Path == "outputs/out/result.txt"
		}
		if !found {
			t.Errorf("the outputs were not collected: %+v", j.Artifacts)
		}
	})
	t.Run("claude", func(t *testing.T) {
		j, r := l.job("--profile", "boxed", "--repo", sampleRepo(t), "--agent", "claude", "--task", "Fix the greeting so that its test passes, and commit.")
		if j.Status != "COMPLETED" || j.Result.Commits != 1 {
			t.Fatalf("%+v\n%v\nlog:\n%s\nrequests: %+v", j, r, tail(l.ok("job", "logs", j.ID), 60), llm.Requests())
		}
		checkModelCalls(t, llm, secrets)
	})
	t.Run("one that cannot be", func(t *testing.T) {
		l.profile("broken", "name: broken\nbehavior:\n  inner_sandbox: bubblewrap\n  inner_sandbox_args: [--ro-bind, /nonexistent, /opt]\n")
		j, _ := l.job("--profile", "broken", "--agent", "shell", "--task", "echo it ran")
		if j.Status != "FAILED" || !strings.Contains(j.Reason, "the inner sandbox cannot be made") || strings.Contains(l.ok("job", "logs", j.ID), "it ran") {
			t.Errorf("%s: %s", j.Status, j.Reason)
		}
	})
	l.noSandboxes()
}
