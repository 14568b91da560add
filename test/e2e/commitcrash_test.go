package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A commit is there after the VM was lost right after it: on a branch, on a detached HEAD
// and in a work tree.
func TestCommitSurvivesCrash(t *testing.T) {
	t.Parallel()
	l := &crashLab{newLab(t), filepath.Join(t.TempDir(), "app")}
	l.workProfile("interactive", "base")
	if err := os.Rename(sampleRepo(t), l.repo); err != nil {
		t.Fatal(err)
	}
	l.starts()
	vmid := l.session().SandboxVMID
	sh := func(script string) string { return l.ok("exec", "app", "--", "sh", "-ec", script) }
	for _, c := range []struct{ name, prepare, dir string }{
		{"on a branch", "", "/workspace"},
		{"on a detached HEAD", "git -C /workspace checkout -q --detach", "/workspace"},
		{"in a work tree", "git -C /workspace worktree add -q -b fix .worktrees/fix; git -C /workspace/.worktrees/fix checkout -q --detach", "/workspace/.worktrees/fix"},
	} {
		// The sync begins a transaction of the file system, which otherwise could end by
		// its time right after the commit.
		want := sh(c.prepare + "\nsync; cd " + c.dir + "; git commit -q --allow-empty -m done; git rev-parse HEAD")
		if err := l.killQEMU(vmid); err != nil {
			t.Fatal(err)
		}
		said := l.starts()
		if got := sh("cd " + c.dir + "; git rev-parse HEAD; git fsck --connectivity-only --no-dangling 2>&1"); got != want {
			t.Errorf("%s: HEAD is %q, want %q\n%s", c.name, got, want, said)
		}
	}

	// Until the next start, commands name that, and not the one for a sandbox.
	if err := l.killQEMU(vmid); err != nil {
		t.Fatal(err)
	}
	var r result
	hinted := func() bool {
		r = l.run("", "exec", "app", "--", "true")
		return strings.Contains(r.stderr, "→")
	}
	if !eventually(settleLimit, hinted) || !strings.Contains(r.stderr, "agentlab session resume app") || strings.Contains(r.stderr, "sandbox start") {
		t.Errorf("after a crash: %v", r)
	}
	l.ok("rm", "app", "--force", "--yes")
	l.noSandboxes()
}
