package e2e

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/agentlab-vm/agentlab/test/sample"
	"github.com/agentlab-vm/agentlab/test/smalldisk"
)

// Two jobs at once, each in its own VM, each with its own work.
func TestTwoJobsAtOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	repo := sampleRepo(t)
	l.ok("daemon", "start")
	var ids []string
	for i := range 2 {
		ids = append(ids, l.submit("--repo", repo, "--agent", "shell", "--task",
			fmt.Sprintf("echo job%d > who.txt; git add who.txt; git commit -qm job%d; echo done", i, i)))
	}
	for i, id := range ids {
		j := l.finish(id)
		if j.Status != "COMPLETED" {
			t.Fatalf("job %d: %s (%s)", i, j.Status, j.Reason)
		}
		if r := l.run(repo, "job", "fetch", id); r.code != 0 {
			t.Fatal(r)
		}
		if got := git(t, repo, "show", "refs/agentlab/"+id+":who.txt"); got != fmt.Sprintf("job%d", i) {
			t.Errorf("job %d left %q", i, got)
		}
	}
	l.noSandboxes()
}

// Many sandboxes at once, made in parallel from one template, each itself: 200 in
// a full run.
func TestManySandboxesAtOnce(t *testing.T) {
	t.Parallel()
	many := 6
	if sample.Full() {
		many = 200
	}
	l := newLab(t)
	l.config(fmt.Sprintf("limits:\n  max_sandboxes: %d\n", many))
	l.ok("daemon", "start")
	began := time.Now()
	var wg sync.WaitGroup
	names := make([]string, many)
	results := make([]result, many)
	for i := range many {
		names[i] = fmt.Sprintf("many-%d", i)
		wg.Go(func() {
			results[i] = l.run("", "sandbox", "new", "--name", names[i])
		})
	}
	wg.Wait()
	var ids []string
	for i, name := range names {
		if results[i].code != 0 {
			t.Fatalf("%s: %v", name, results[i])
		}
		if got := strings.TrimSpace(l.ok("exec", name, "hostname")); got != name {
			t.Errorf("%s calls itself %q", name, got)
		}
		ids = append(ids, l.ok("exec", name, "--", "cat", "/etc/machine-id", "/etc/ssh/ssh_host_ed25519_key.pub"))
	}
	t.Logf("%d sandboxes answer after %s", many, time.Since(began).Round(time.Second))
	slices.Sort(ids)
	if len(slices.Compact(ids)) != many {
		t.Error("two sandboxes have the same machine id or host key")
	}
	for i := range many {
		wg.Go(func() { l.run("", "sandbox", "destroy", names[i]) })
	}
	wg.Wait()
	l.noSandboxes()
}

// The ways into a sandbox: exec with input, output, code and signals; ssh
// with a verified key; a copy through ssh; a terminal that outlives us.
func TestAccess(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.ok("sandbox", "new", "--name", "play")
	if r := l.run("", "exec", "play", "--", "sh", "-c", "echo out; echo err >&2; exit 7"); r.code != 7 || r.stdout != "out\n" || r.stderr != "err\n" {
		t.Errorf("exec: %v", r)
	}
	if r := l.runInput("", strings.NewReader(strings.Repeat("x", 1<<20)), "exec", "-i", "play", "wc", "-c"); strings.TrimSpace(r.stdout) != "1048576" {
		t.Errorf("exec -i: %v", r)
	}
	if r := l.run("", "exec", "play", "no-such-program"); r.code != 127 {
		t.Errorf("exec of nothing: %v", r)
	}
	if r := l.run("", "exec", "--user", "root", "--dir", "/tmp", "-e", "A=b c", "play", "--", "sh", "-c", `id -u; pwd; echo "$A"`); r.stdout != "0\n/tmp\nb c\n" {
		t.Errorf("exec with options: %v", r)
	}
	if r := l.run("", "exec", "-t", "play", "--", "sh", "-c", "test -t 1 && stty size"); r.code != 0 || !strings.Contains(r.stdout, "24 80") {
		t.Errorf("exec -t: %v", r)
	}
	if r := l.run("", "ssh", "play", "--", "echo $USER; exit 5"); r.code != 5 || strings.TrimSpace(r.stdout) != "agent" {
		t.Errorf("ssh: %v", r)
	}
	if got := l.attach("play", "echo from the $((1+1))nd terminal; exit\n"); !strings.Contains(got, "from the 2nd terminal") {
		t.Errorf("attach: %q", got)
	}
	if out := l.ok("sandbox", "logs", "play"); out == "" {
		t.Error("the console is empty")
	}
	if got := l.ok("exec", "play", "hostname"); got != "play\n" {
		t.Errorf("hostname is %q", got)
	}
	l.ok("exec", "play", "--", "sh", "-c", "echo kept > /home/agent/kept")
	l.ok("sandbox", "stop", "play")
	l.ok("sandbox", "start", "play")
	if got := l.ok("exec", "play", "cat", "/home/agent/kept"); got != "kept\n" {
		t.Errorf("after stop and start: %q", got)
	}
	if got := l.ok("exec", "play", "--", "sh", "-c", "hostname; cut -d. -f1-3 /proc/net/fib_trie | grep -m1 -o '10.77.0'"); got != "play\n10.77.0\n" {
		t.Errorf("name and network after stop and start: %q", got)
	}
	l.ok("sandbox", "destroy", "play")
}

// attach joins the sandbox's terminal from a terminal, types and returns
// what was shown until the shell had ended.
func (l *lab) attach(name, typed string) string {
	l.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(l.bin, "agentlab"), "attach", name)
	cmd.Env = l.env
	tty, err := pty.Start(cmd)
	if err != nil {
		l.Fatal(err)
	}
	defer func() { _ = tty.Close() }()
	if _, err := tty.WriteString(typed); err != nil {
		l.Fatal(err)
	}
	out, _ := io.ReadAll(tty) // ends with an error when the terminal's other side closes
	_ = cmd.Wait()
	return string(out)
}

// Without QEMU, and with a full disk, a sandbox fails with code and remedy,
// and leaves nothing.
func TestHostFaults(t *testing.T) {
	t.Parallel()
	t.Run("no QEMU", func(t *testing.T) {
		l := newLab(t)
		l.config("qemu:\n  binary: /no/such/qemu\n")
		r := l.run("", "sandbox", "new")
		if r.code != 1 || !strings.Contains(r.stderr, "QEMU") && !strings.Contains(r.stderr, "qemu") || !strings.Contains(r.stderr, "→") {
			t.Errorf("%v", r)
		}
		l.eventually("status has the remedy", func() bool { // it does not wait long for the first check
			r = l.run("", "status")
			return r.code == 1 && strings.Contains(r.stdout, "correct qemu.binary")
		})
	})
	t.Run("disk full", func(t *testing.T) {
		prepare(t)
		l := newLabIn(t, newHome(t)) // the templates of the tests are not on the small disk
		l.config("qemu:\n  template_cache_gb: 0\n")
		state := filepath.Join(l.home, "state")
		if err := os.Mkdir(state, 0o700); err != nil {
			t.Fatal(err)
		}
		smalldisk.Tmpfs(t, state, "4m")
		l.ok("daemon", "start")
		fill, err := os.Create(filepath.Join(state, "fill"))
		if err != nil {
			t.Fatal(err)
		}
		block := make([]byte, 4096)
		for err == nil {
			_, err = fill.Write(block)
		}
		_ = fill.Close()
		r := l.run("", "sandbox", "new")
		if r.code != 1 || !strings.Contains(r.stderr, "space") && !strings.Contains(r.stderr, "full") {
			t.Errorf("%v", r)
		}
		_ = os.Remove(filepath.Join(state, "fill"))
		// It answers, and that the disk is small is an error still.
		if r := l.run("", "status"); r.code != 1 || !strings.Contains(r.stdout, "free disk space") {
			t.Errorf("%v", r)
		}
	})
}

// config writes the configuration of the home.
func (l *lab) config(text string) {
	l.Helper()
	dir := filepath.Join(l.home, "config")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		l.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(text), 0o600); err != nil {
		l.Fatal(err)
	}
}
