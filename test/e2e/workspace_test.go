package e2e

import (
	"encoding/json"
	"strconv"
	"strings"
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
	if err := l.kill9("agentlabd", "run"); err != nil {
		t.Fatal(err)
	}
	if err := l.kill9("agentlabd", "vmm", "/"+strconv.Itoa(l.sandbox(t, "play").VMID)+"-"); err != nil {
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
