package e2e

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/api"
)

// goldenWorkspace writes bytes in one VM and reads them in the next one, after a
// restore, and in a copy. The guests are real: each finds the disk by its serial number.
func (p *pveLab) goldenWorkspace(t *testing.T) {
	// in runs a script in a new sandbox with a workspace.
	in := func(workspace, script string) string {
		t.Helper()
		p.ok("sandbox", "new", "--name", "play", "--workspace", workspace)
		out := p.ok("exec", "play", "sh", "-c", script)
		p.ok("sandbox", "destroy", "play")
		return out
	}
	p.ok("workspace", "create", "data", "--size", "1")
	in("data", "echo first > /work/note && sync")
	p.ok("workspace", "snapshot", "create", "data", "--name", "one")
	if got := in("data", "cat /work/note; echo second > /work/note; sync"); got != "first\n" {
		t.Errorf("the second sandbox read %q", got)
	}
	p.ok("workspace", "fork", "data", "--name", "copy")
	p.ok("workspace", "snapshot", "restore", "data", "--name", "one", "--yes")
	if got := in("data", "cat /work/note"); got != "first\n" {
		t.Errorf("after the restore it is %q", got)
	}
	if got := in("copy", "cat /work/note"); got != "second\n" {
		t.Errorf("the copy has %q", got)
	}
	if out := p.ok("workspace", "fsck", "data"); !strings.Contains(out, "is clean") {
		t.Errorf("fsck: %s", out)
	}
	p.noSandboxes()
	p.ok("workspace", "check")
	for _, name := range []string{"data", "copy"} {
		p.ok("workspace", "delete", name, "--purge", "--yes")
	}
	p.clean()
}

// goldenSalvage loses the VM of a job after its commits, and extracts them from its
// disk.
func (p *pveLab) goldenSalvage(t *testing.T) {
	repo := sampleRepo(t)
	id := p.submit("--repo", repo, "--agent", "shell", "--task", "echo 1 > f1; git add f1; git commit -qm lost; sync; echo committed; sleep 1000")
	if !eventually(commandLimit, func() bool { return strings.Contains(p.run("", "job", "logs", id).stdout, "committed") }) {
		t.Fatalf("the agent does not run: %s", p.run("", "job", "show", id))
	}
	vmid := p.vmOf(t, id)
	p.node.PowerOff(vmid)
	if j := p.finish(id); j.Status != "FAILED" {
		t.Fatalf("%+v", j)
	}
	var j api.Job
	r := p.run("", "--json", "job", "salvage", id)
	if err := json.Unmarshal([]byte(r.stdout), &j); err != nil || j.Status != "COMPLETED" || j.Result.Commits != 1 {
		t.Fatalf("%+v\n%v", j, r)
	}
	got, _, r := p.fetchWork(repo, j.ID)
	if got.Ref == "" || git(t, repo, "log", "--format=%s", "-1", got.Ref) != "lost" {
		t.Errorf("%+v\n%v", got, r)
	}
	p.ok("sandbox", "destroy", "--purge", strconv.Itoa(vmid))
	p.noSandboxes()
	p.clean()
}
