package e2e

import (
	"strings"
	"testing"
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
