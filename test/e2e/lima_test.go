package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/limactl"
)

// reachTask tries the network of the host in the ways of Lima's own network.
const reachTask = `
for address in 10.0.2.2 192.168.5.2 169.254.169.254; do
    if curl -sm 5 "http://$address/"; then echo "reached $address"; fi
done`

// withLima gives the daemon, which has not started, two backends: mac, which is Lima and the
// default, and local, which is QEMU. Its user is one that limactl accepts.
func (l *lab) withLima() {
	l.Helper()
	path := limactl.Build(l, "../..")
	var err error
	if l.attr, err = limactl.UserAttr(); err != nil {
		l.Fatal(err)
	}
	text := fmt.Sprintf("backend: mac\nbackends:\n  local: {driver: qemu}\n  mac: {driver: lima, limactl: %s}\n", path)
	dir := filepath.Join(l.home, "config")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		l.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(text), 0o600); err != nil {
		l.Fatal(err)
	}
}

// One daemon drives two backends: the same job runs in an instance of Lima and in a
// microVM, each with a workspace, and both guests have the same network policy.
func TestLima(t *testing.T) {
	l := newLab(t)
	l.withLima()
	repo := sampleRepo(t)
	for _, name := range []string{"mac", "local"} {
		j, r := l.job("--backend", name, "--workspace", "new:on-"+name, "--repo", repo, "--agent", "shell", "--task", mendTask+reachTask)
		if r.code != 0 || j.Status != "COMPLETED" || j.Backend != name {
			t.Fatalf("%s: %+v\n%v", name, j, r)
		}
		if log := l.ok("job", "logs", j.ID); !strings.Contains(log, "the work is done") || strings.Contains(log, "reached") {
			t.Errorf("%s: log is %q", name, log)
		}
		if r := l.run(repo, "job", "fetch", j.ID); r.code != 0 {
			t.Errorf("%s: fetch: %v", name, r)
		}
	}
	l.noSandboxes()
	if r := l.run(repo, "workspace", "export", "on-mac", "--out", filepath.Join(t.TempDir(), "work.tar.zst")); r.code != 0 || !strings.Contains(r.stderr, "entries") {
		t.Errorf("export: %v", r)
	}
	if left, _ := filepath.Glob(filepath.Join(l.home, "state", "backends", "*", "lima", "home", "[a-z]*")); len(left) > 0 {
		t.Errorf("instances are left: %q", left)
	}
}

// The session of a repository is in an instance of Lima: its work comes back with sync, and
// the next start has the workspace of the last one in a new instance.
func TestLimaSession(t *testing.T) {
	l := newLab(t)
	l.withLima()
	l.workProfile("work", "base")
	repo := filepath.Join(t.TempDir(), "app")
	if err := os.Rename(sampleRepo(t), repo); err != nil {
		t.Fatal(err)
	}
	start := []string{"start", "--backend", "mac", "--profile", "work", "--agent", "none", "--detach"}
	l.in(repo, start...)
	if got := l.guest("app", "git config user.name Agent; git config user.email agent@localhost; echo hello > greeting.txt; git commit -qam Fix; echo more > left.txt; pwd -P"); got != "/work/repo" {
		t.Errorf("the repository is in %q", got)
	}
	l.in(repo, "sync")
	if got := git(t, repo, "show", "HEAD:greeting.txt"); got != "hello" {
		t.Errorf("after sync the file is %q", got)
	}
	for _, args := range [][]string{{"session", "fork", "app", "--name", "copy"}, {"workspace", "snapshot", "create", "app", "--name", "one", "--attached", "crash"}, {"session", "stop", "app", "--suspend"}} {
		if r := l.run(repo, args...); r.code == 0 {
			t.Errorf("%v on Lima: %v", args, r)
		}
	}
	l.guest("app", "touch /home/agent/of-first")
	l.in(repo, "session", "stop", "app")
	l.in(repo, "workspace", "snapshot", "create", "app", "--name", "one")
	l.in(repo, start...)
	if got := l.guest("app", "cat greeting.txt left.txt; git log -1 --format=%s; ls /home/agent/of-first 2>&1 || true"); !strings.HasPrefix(got, "hello\nmore\nFix\nls: cannot access") {
		t.Errorf("the next start has %q", got)
	}
	const odd = `cd /work; mkdir -p "odd names"; ln -s ../left.txt "odd names/link"; ln repo/left.txt hard; truncate -s 3G holes; printf end >> holes
chmod 640 hard; touch -d '2001-02-03 04:05:06.789' -h "odd names/link" hard; printf 'a\nb' > "$(printf 'two\nlines')"; mkfifo pipe`
	l.guest("app", odd)
	l.in(repo, "session", "stop", "app")
	if r := l.run(repo, "workspace", "move", "app", "--to", "local"); r.code != 0 || !strings.Contains(r.stderr, "workspace app") {
		t.Fatalf("move: %v", r)
	}
	l.in(repo, "start", "--profile", "work", "--agent", "none", "--detach")
	want := "hello\nmore\n2 640 left.txt\n../left.txt\n3221225475 end\nfifo"
	got := l.guest("app", `cat greeting.txt left.txt; stat -c '%h %a %n' left.txt; cd /work; readlink 'odd names/link'; echo "$(stat -c %s holes) $(tail -c 3 holes)"; stat -c %F pipe`)
	if got != want || !strings.Contains(l.ok("--json", "sandbox", "show", l.sandboxOf("app")), `"backend": "local"`) {
		t.Errorf("on the other backend there is %q", got)
	}
	l.in(repo, "rm", "--yes", "--force")
	l.noSandboxes()
}
