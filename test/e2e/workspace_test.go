package e2e

import (
	"encoding/json"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab/api"
)

// Seed 001: one command creates a workspace and runs a job on it, and the next job
// finds its checkout and its caches. A sandbox that loses its VM gives the workspace to
// the next one, with what it had written.
func TestJobsShareAWorkspace(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	repo := sampleRepo(t)
	j, r := l.job("--repo", repo, "--agent", "shell", "--workspace", "new:data", "--workspace-size", "1G", "--task",
		`pwd; mkdir -p "$npm_config_cache"; echo cached > "$npm_config_cache/x"; printf "*.o\n" >> .gitignore; git add .gitignore; git commit -qm ignore; echo 1 > x.o; echo mine > own; git add own; git commit -qm own; df /work | tail -1`)
	if log := l.ok("job", "logs", j.ID); j.Status != "COMPLETED" || !strings.HasPrefix(log, "/work/repo\n") {
		t.Fatalf("%+v\n%v\n%s", j, r, log)
	}
	first := j.ID
	j, r = l.job("--repo", repo, "--agent", "shell", "--workspace", "data", "--task",
		`cat "$npm_config_cache/x" x.o; test ! -e own; git show agentlab/`+first+`:own; git status --short -uno`)
	if log := l.ok("job", "logs", j.ID); j.Status != "COMPLETED" || !strings.Contains(log, "cached\n1\nmine\n") {
		t.Fatalf("%+v\n%v\n%s", j, r, log)
	}

	l.ok("sandbox", "new", "--name", "play", "--workspace", "data")
	if r := l.run("", "sandbox", "new", "--name", "other", "--workspace", "data"); r.code == 0 || !strings.Contains(r.stderr, "is used by sandbox play") {
		t.Errorf("%v", r)
	}
	if r := l.run("", "workspace", "delete", "data", "--yes"); r.code == 0 || !strings.Contains(r.stderr, "sandbox play") {
		t.Errorf("%v", r)
	}
	l.ok("exec", "play", "sh", "-c", "echo kept > /work/kept && sync")
	l.ok("sandbox", "new", "--name", "next", "--workspace", "data", "--workspace-wait", "1h", "--no-wait")
	play := l.sandbox(t, "play")
	if err := l.kill9("agentlabd", "run"); err != nil {
		t.Fatal(err)
	}
	if err := l.kill9("agentlabd", "vmm", "/"+strconv.Itoa(play.VMID)+"-"); err != nil {
		t.Fatal(err)
	}
	if !eventually(commandLimit, func() bool { return l.sandbox(t, "next").State == "READY" }) {
		t.Fatalf("%+v", l.sandbox(t, "next"))
	}
	if got := l.ok("exec", "next", "cat", "/work/kept"); got != "kept\n" {
		t.Errorf("the file is %q", got)
	}
	if r := l.run("", "exec", "next", "sh", "-c", "cd /work && sleep 1000 & sleep 1; exit 0"); r.code != 0 {
		t.Errorf("%v", r)
	}
	if r := l.run("", "workspace", "detach", "data"); r.code == 0 || !strings.Contains(r.stderr, "sleep") {
		t.Errorf("a busy workspace was detached: %v", r)
	}
	l.ok("exec", "next", "pkill", "sleep")
	l.ok("workspace", "detach", "data")
	if r := l.run("", "exec", "next", "cat", "/work/kept"); r.code == 0 {
		t.Errorf("the workspace is still there: %v", r)
	}
	l.ok("workspace", "resize", "data", "--size", "2")
	l.ok("workspace", "attach", "data", "next")
	if got := l.ok("exec", "next", "sh", "-c", "cat /work/kept; df -BM --output=size /work | tail -1"); !strings.HasPrefix(got, "kept\n") || !strings.Contains(got, "19") {
		t.Errorf("after attaching: %q", got)
	}
	l.ok("sandbox", "destroy", "next", "play")
	l.noSandboxes()
	l.ok("workspace", "check")
	l.ok("workspace", "delete", "data", "--purge", "--yes")
}

// sandbox returns a sandbox.
func (l *lab) sandbox(t *testing.T, name string) (sb api.Sandbox) {
	t.Helper()
	if r := l.run("", "--json", "sandbox", "show", name); r.code == 0 {
		if err := json.Unmarshal([]byte(r.stdout), &sb); err != nil {
			t.Fatal(err)
		}
	}
	return sb
}

// killAll kills everything, as a power cut of the host.
func (l *lab) killAll(t *testing.T) {
	t.Helper()
	for _, pid := range l.processes() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	if !eventually(settleLimit, func() bool { return len(l.processes()) == 0 }) { // a daemon that dies can still have its socket
		t.Fatal("killed processes remain")
	}
}

// Seed 001 §4: a session continues in a new sandbox, and in one that was suspended to
// disk, also after a power cut.
func TestSessionContinues(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	repo := sampleRepo(t)
	l.ok("session", "create", "fix", "--size", "1")
	l.ok("session", "resume", "fix")
	l.ok("exec", "fix", "sh", "-c", "echo hello > /work/note; nohup sh -c 'while :; do date +%s > /work/clock; sleep 1; done' > /dev/null 2>&1 &")
	pid := l.ok("exec", "fix", "pgrep", "-f", "work/clock")
	l.ok("session", "stop", "fix", "--suspend")
	if left := append(l.processes("qemu-system"), l.processes("agentlabd", "vmm")...); len(left) > 0 {
		t.Errorf("processes of a sandbox that is suspended to disk: %d", left)
	}
	l.killAll(t)
	l.ok("session", "resume", "fix")
	if got := l.ok("exec", "fix", "pgrep", "-f", "work/clock"); got != pid {
		t.Errorf("the process is %q, it was %q", got, pid)
	}
	if got := l.ok("exec", "fix", "sh", "-c", "cat /work/note; sync; echo after >> /work/note"); got != "hello\n" {
		t.Errorf("the note is %q", got)
	}
	l.ok("session", "stop", "fix")
	for i, want := range []string{"1", "2"} {
		j, r := l.job("--repo", repo, "--agent", "shell", "--session", "fix", "--task",
			`cat /work/note; echo line >> lines; git add lines; git commit -qm line; wc -l < lines`)
		if log := l.ok("job", "logs", j.ID); j.Status != "COMPLETED" || i == 0 && !strings.HasPrefix(log, "hello\nafter\n1\n") {
			t.Fatalf("%v\n%s, want %s", r, log, want)
		}
	}
	for _, want := range []string{"1", "2"} {
		j, r := l.job("--repo", repo, "--agent", "shell", "--branch", "topic", "--task", `git branch --show-current; echo line >> lines; git add lines; git commit -qm line; wc -l < lines`)
		if log := l.ok("job", "logs", j.ID); j.Status != "COMPLETED" || log != "topic\n"+want+"\n" {
			t.Fatalf("%v\n%s, want %s", r, log, want)
		}
	}
	if r := l.run("", "session", "show", "fix"); strings.Count(r.stdout, "job-") < 2 {
		t.Errorf("%v", r)
	}
	l.noSandboxes()
	l.ok("session", "delete", "fix", "--yes")
	name := regexp.MustCompile(`\S+-topic-[0-9a-f]{8}`).FindString(l.ok("session", "list"))
	l.ok("session", "delete", name, "--yes")
	l.ok("workspace", "check")
}
