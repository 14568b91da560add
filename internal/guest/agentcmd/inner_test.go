package agentcmd

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/test/guard"
)

// innerPlan is a plan with an inner sandbox, in a repository and a home of its
// own.
func innerPlan(t *testing.T, args ...string) Plan {
	t.Helper()
	if _, err := os.Stat(bwrap); err != nil {
		t.Skip("this host has no bubblewrap (apt install bubblewrap); the test in a virtual machine, test/e2e TestInnerSandbox, always runs it")
	}
	if out, err := exec.Command(bwrap, "--unshare-user", "--ro-bind", "/", "/", "--proc", "/proc", "--unshare-pid", "true").CombinedOutput(); err != nil {
		t.Skipf("this host has no user namespaces: %s", out)
	}
	home := t.TempDir()
	for name, text := range map[string]string{".gitconfig": "[user]\n", "secret-of-the-home": "x"} {
		if err := os.WriteFile(filepath.Join(home, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return Plan{
		Dir: t.TempDir(), Env: []string{"PATH=/usr/bin:/bin", "HOME=" + home, "XDG_RUNTIME_DIR=/run/user/1000"},
		Grace: 3 * time.Second, Inner: &Inner{Args: args},
	}
}

// look runs a script in an inner sandbox to its end.
func look(t *testing.T, p Plan, script string) (Exit, string) {
	t.Helper()
	dir, end, _ := supervised(t, p, script)
	if err := <-end; err != nil {
		t.Fatal(err)
	}
	return exitOf(t, dir)
}

func TestInnerSandbox(t *testing.T) {
	p := innerPlan(t, "--setenv", "GIVEN", "by the profile", "--ro-bind", "/etc", "/opt")
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.WriteFile(outside, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	before, _ := filepath.Glob(filepath.Join(os.TempDir(), "agentlab-inner-*"))
	e, log := look(t, p, `
say() { if "${@:2}" >/dev/null 2>&1; then echo "$1 yes"; else echo "$1 no"; fi; }
say 'write to the repository:' sh -c 'echo work > work.txt'
say 'write to /tmp:' sh -c 'echo x > /tmp/x'
say 'write to the home:' sh -c 'echo x > ~/x'
say 'write to /etc:' sh -c 'echo x > /etc/agentlab-test'
say 'write to /usr:' sh -c 'echo x > /usr/agentlab-test'
say 'see the git identity:' cat ~/.gitconfig
say 'see the home:' cat ~/secret-of-the-home
say 'see files of /tmp:' ls `+outside+`
say 'see the plan:' sh -c 'ls `+"$(dirname $0)"+`/agent.json'
say 'see other processes:' test -e /proc/`+"$PPID"+`/exe -a $$ -gt 20
say 'see a disk:' ls /dev/sda /dev/vda /dev/kmsg
say 'gain privileges:' sh -c 'grep -q "NoNewPrivs:.*0" /proc/self/status'
say 'have capabilities:' sh -c 'grep -q "CapEff:.*[1-9a-f]" /proc/self/status'
say 'make namespaces:' unshare -U true
say 'see what the profile binds:' ls /opt/passwd
echo "given: $GIVEN"
pwd
`)
	want := map[string]string{
		"write to the repository": "yes", "write to /tmp": "yes", "write to the home": "yes", "write to /etc": "no", "write to /usr": "no",
		"see the git identity": "yes", "see the home": "no", "see files of /tmp": "no", "see the plan": "no", "see other processes": "no",
		"see a disk": "no", "gain privileges": "no", "have capabilities": "no", "make namespaces": "no", "see what the profile binds": "yes",
		"given": "by the profile",
	}
	for what, answer := range want {
		if !strings.Contains(log, what+": "+answer+"\n") {
			t.Errorf("%s: want %q", what, answer)
		}
	}
	if e.Code != 0 || !strings.Contains(log, "\n"+p.Dir+"\n") {
		t.Errorf("%+v\n%s", e, log)
	}
	if text, _ := os.ReadFile(filepath.Join(p.Dir, "work.txt")); string(text) != "work\n" {
		t.Errorf("the work is not in the repository: %q", text)
	}
	if after, _ := filepath.Glob(filepath.Join(os.TempDir(), "agentlab-inner-*")); len(after) > len(before) {
		t.Errorf("left: %v", after)
	}
}

// An agent's configuration is where it looks for it, though the directory that
// holds it is hidden.
func TestInnerSandboxShowsTheAgentsConfiguration(t *testing.T) {
	p := innerPlan(t)
	home := get(p.Env, "HOME")
	dir, end, _ := supervisedAfter(t, p, "cat ~/.claude/settings.json", func(dir string) {
		if err := Prepare(home, dir, `{"a":1}`, nil); err != nil {
			t.Fatal(err)
		}
	})
	if err := <-end; err != nil {
		t.Fatal(err)
	}
	if e, log := exitOf(t, dir); e.Code != 0 || log != `{"a":1}` {
		t.Errorf("%+v %q", e, log)
	}
}

// The agent gets SIGTERM and its grace, as it does without an inner sandbox.
func TestInnerSandboxStop(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		code   int
	}{
		"exits well": {"trap 'sleep 0.2; exit 7' TERM; echo ready; while :; do sleep 0.05; done", 7},
		"needs KILL": {"trap '' TERM; echo ready; while :; do sleep 0.05; done", 137},
	} {
		t.Run(name, func(t *testing.T) {
			p := innerPlan(t)
			if p.Grace = guard.Patience; c.code == 137 {
				p.Grace = 200 * time.Millisecond
			}
			dir, end, pid := supervised(t, p, c.script)
			guard.Until(t, "the agent starts", func() bool {
				p, _ := os.ReadFile(filepath.Join(dir, "log"))
				return string(p) == "ready\n"
			})
			if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if err := <-end; err != nil {
				t.Fatal(err)
			}
			if e, _ := exitOf(t, dir); e.Code != c.code {
				t.Errorf("%+v", e)
			}
		})
	}
}

// An unavailable inner sandbox is a separate error, and the agent does not run
// without it.
func TestInnerSandboxUnavailable(t *testing.T) {
	p := Plan{Env: []string{"PATH=/usr/bin:/bin", "HOME=/root"}, Inner: &Inner{Program: "/nonexistent/bwrap"}}
	if e, log := look(t, p, "echo it ran"); e.Code != ExitNotRun || !strings.Contains(e.Error, "image does not have") || strings.Contains(log, "it ran") {
		t.Errorf("%+v %q", e, log)
	}
	p = innerPlan(t, "--ro-bind", "/nonexistent/source", "/opt")
	if e, log := look(t, p, "echo it ran"); e.Code != ExitNotRun || !strings.Contains(e.Error, "cannot be made: bwrap: ") || strings.Contains(log, "it ran") {
		t.Errorf("%+v %q", e, log)
	}
	p = innerPlan(t)
	hidden := filepath.Join(get(p.Env, "HOME"), "bash")
	if err := os.Symlink("/bin/bash", hidden); err != nil {
		t.Fatal(err)
	}
	p.Env[0] = "PATH=" + filepath.Dir(hidden)
	if e, _ := look(t, p, "echo it ran"); e.Code != ExitNotRun || !strings.Contains(e.Error, "not visible") {
		t.Errorf("%+v", e)
	}
}
