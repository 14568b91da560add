package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/test/fakellm"
)

// A sandbox with a repository and without a task is made to be worked in: an
// agent that is started there by hand has its key, through exec and ssh, as
// long as the sandbox lives.
func TestAgentByHand(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	llm := fakellm.New(agentScript...)
	n.HandleHTTP("llm.example.com", 80, llm)
	secrets := map[string]string{"env.ANTHROPIC_BASE_URL": "http://llm.example.com", "env.ANTHROPIC_AUTH_TOKEN": "sk-test-anthropic"}
	for k, v := range secrets {
		l.secret(k, v)
	}
	r := l.run("", "sandbox", "new", "--name", "box", "--repo", sampleRepo(t), "--image", "agents")
	if r.code != 0 || !strings.Contains(r.stdout, "READY") {
		t.Fatal(r)
	}
	const hasKey = `test "$ANTHROPIC_AUTH_TOKEN" = sk-test-anthropic && echo has the key`
	if r = l.run("", "ssh", "box", "--", hasKey); r.code != 0 || r.stdout != "has the key\n" {
		t.Errorf("over ssh: %v", r)
	}
	r = l.run("", "exec", "box", "--dir", "/tmp/repo", "--", "claude", "-p", "--dangerously-skip-permissions", "Fix the greeting so that its test passes, and commit.")
	if r.code != 0 || !strings.Contains(r.stdout, "I mended the greeting") {
		t.Fatalf("%v\nrequests: %+v", r, llm.Requests())
	}
	checkModelCalls(t, llm, secrets)
	if log := l.ok("exec", "box", "--dir", "/tmp/repo", "--", "git", "log", "--oneline"); !strings.Contains(log, "Fix the greeting") {
		t.Errorf("commits:\n%s", log)
	}
	l.sshKeysGo("box")

	l.ok("sandbox", "stop", "box")
	l.ok("sandbox", "start", "box")
	if !eventually(settleLimit, func() bool { r = l.run("", "exec", "box", "--", "sh", "-c", hasKey); return r.code == 0 }) {
		t.Errorf("after a restart: %v", r)
	}
	l.ok("sandbox", "destroy", "box")
}

// sshKeysGo checks that no key of an ssh session stays on this machine.
func (l *lab) sshKeysGo(sandbox string) {
	l.Helper()
	tmp := l.TempDir()
	keys := func() []string {
		names, _ := filepath.Glob(filepath.Join(tmp, "agentlab-ssh-*"))
		return names
	}
	run := func(args ...string) *exec.Cmd {
		cmd := exec.Command(filepath.Join(l.bin, "agentlab"), append([]string{"ssh"}, args...)...)
		cmd.Env = append(l.env, "TMPDIR="+tmp)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		return cmd
	}
	session := func() *exec.Cmd {
		l.Helper()
		cmd := run(sandbox, "--", "echo up; sleep 600")
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			l.Fatal(err)
		}
		l.Cleanup(func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
		if _, err := out.Read(make([]byte, 16)); err != nil {
			l.Fatalf("the session does not begin: %v", err)
		}
		if len(keys()) != 1 {
			l.Errorf("keys of one session: %q", keys())
		}
		return cmd
	}
	for _, sig := range []syscall.Signal{syscall.SIGHUP, syscall.SIGTERM} {
		cmd := session()
		if err := cmd.Process.Signal(sig); err != nil {
			l.Fatal(err)
		}
		_ = cmd.Wait()
		if left := keys(); len(left) != 0 {
			l.Fatalf("left after %s: %q", sig, left)
		}
	}
	cmd := session()
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	_ = cmd.Wait()
	if out, err := run("--print", sandbox).CombinedOutput(); err != nil {
		l.Errorf("ssh --print: %v\n%s", err, out)
	}
	left := keys()
	if len(left) != 2 {
		l.Fatalf("of a session that was killed and of --print: %q", left)
	}
	for _, dir := range left {
		old := time.Now().Add(-time.Hour)
		if err := os.Chtimes(dir, old, old); err != nil {
			l.Fatal(err)
		}
	}
	if out, err := run(sandbox, "--", "true").CombinedOutput(); err != nil {
		l.Errorf("ssh: %v\n%s", err, out)
	}
	if left := keys(); len(left) != 0 {
		l.Errorf("left in the end: %q", left)
	}
}
