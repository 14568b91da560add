package e2e

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

func allowOnly(rules ...string) agentlab.Network {
	n := agentlab.Network{Mode: agentlab.NetworkAllowlist}
	for _, r := range rules {
		n.Allow = append(n.Allow, agentlab.NetworkRule{Rule: r})
	}
	return n
}

// A changed policy reaches a VM that runs: what it allows opens, what it
// forbids closes, and a connection that is open is cut.
func TestPolicyReload(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	n.Web("web.example.com")
	n.Web("other.example.com")
	n.Echo("echo.example.com")
	l.networkProfile("mine", allowOnly("web.example.com", "echo.example.com:7"))
	l.ok("sandbox", "new", "--name", "box", "--profile", "mine")
	wantWeb(l, "http://web.example.com/hello", true)
	wantWeb(l, "http://other.example.com/hello", false)

	open, cut := holdOpen(t, l, "echo.example.com")
	if line := <-open; line != "hello" {
		t.Fatalf("the connection gave %q", line)
	}
	l.networkProfile("mine", allowOnly("other.example.com"))
	if out := l.ok("policy", "reload"); !strings.Contains(out, "changed, applied") {
		t.Fatal(out)
	}
	select {
	case line := <-cut:
		t.Logf("the connection ended with %q", line)
	case <-time.After(settleLimit):
		t.Error("a connection that the new policy forbids goes on")
	}
	wantWeb(l, "http://web.example.com/hello", false)
	wantWeb(l, "http://other.example.com/hello", true)
	if out := l.ok("policy", "check", "other.example.com:443", "--sandbox", "box"); !strings.Contains(out, "allowed by rule allow:other.example.com") {
		t.Error(out)
	}
	l.ok("sandbox", "destroy", "box")
}

func wantWeb(l *lab, url string, reached bool) {
	l.Helper()
	r := l.run("", "exec", "box", "--", "curl", "-sS", "-m", "10", "-o", "/dev/null", "-w", "%{http_code}", url)
	if (r.code == 0 && r.stdout == "200") != reached {
		l.Errorf("%s: reached %v: %v", url, !reached, r)
	}
}

// holdOpen opens a connection to an echo service from inside the sandbox:
// open gives the first line that came back, cut what came at its end.
func holdOpen(t *testing.T, l *lab, host string) (open, cut <-chan string) {
	t.Helper()
	first, last := make(chan string, 1), make(chan string, 1)
	ctx, cancel := context.WithCancel(t.Context())
	cmd := exec.CommandContext(ctx, filepath.Join(l.bin, "agentlab"), "exec", "box", "--",
		"bash", "-c", `exec 3<>/dev/tcp/`+host+`/7; echo hello >&3; cat <&3; echo END`)
	cmd.Env = l.env
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s := bufio.NewScanner(out)
		s.Scan()
		first <- s.Text()
		s.Scan()
		last <- s.Text()
		_ = cmd.Wait()
	}()
	t.Cleanup(func() { cancel(); <-done })
	return first, last
}

// A repository narrows the network of its jobs, and cannot widen it.
func TestRepositoryNarrows(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	n.Web("web.example.com")
	n.Web("other.example.com")
	const try = `for h in web other; do curl -s -m 10 -o /dev/null http://$h.example.com/hello && echo "$h: yes" || echo "$h: no"; done`
	for name, c := range map[string]struct{ profile, network, want string }{
		"narrower": {"yolo-ephemeral", "network: {allow: [web.example.com]}\n", "web: yes\nother: no\n"},
		"wider":    {"mine", "network: {mode: allowlist, allow: ['*.example.com']}\n", "web: no\nother: yes\n"},
	} {
		l.networkProfile("mine", allowOnly("other.example.com"))
		repo := sampleRepo(t)
		if err := os.WriteFile(filepath.Join(repo, ".agentlab.yaml"), []byte(c.network), 0o600); err != nil {
			t.Fatal(err)
		}
		git(t, repo, "commit", "-qam", "Network")
		j, r := l.job("--repo", repo, "--profile", c.profile, "--agent", "shell", "--task", try)
		log := l.ok("job", "logs", j.ID)
		if j.Status != "COMPLETED" || !strings.Contains(log, c.want) || !strings.Contains(log, "narrowed by .agentlab.yaml") {
			t.Errorf("%s: %+v\n%v\nlog:\n%s", name, j, r, log)
		}
	}
	l.noSandboxes()
}
