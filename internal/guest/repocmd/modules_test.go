package repocmd

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// moduleHost makes a repository of the host with the submodule lib/a, which has deep/b.
// All objects are in it. It returns a function that commits another content of lib/a.
func (l lab) moduleHost() (next func(text string) (head, a string)) {
	l.Helper()
	inner, outer := l.TempDir(), l.TempDir()
	for _, dir := range []string{inner, outer} {
		git(l.T, dir, "init", "-q", "-b", "main")
	}
	b := commit(l.T, inner, "file", "b")
	git(l.T, outer, "update-index", "--add", "--cacheinfo", "160000,"+b+",deep/b")
	write(l.T, filepath.Join(l.host, ".gitmodules"), "[submodule \"evil\"]\n\tpath = lib/a\n\turl = ext::false\n")
	git(l.T, l.host, "add", ".gitmodules")
	git(l.T, l.host, "fetch", "-q", inner, "main")
	return func(text string) (head, a string) {
		l.Helper()
		a = commit(l.T, outer, "file", text)
		git(l.T, l.host, "fetch", "-q", "--no-recurse-submodules", outer, "main")
		git(l.T, l.host, "update-index", "--add", "--cacheinfo", "160000,"+a+",lib/a")
		git(l.T, l.host, "commit", "-qm", text)
		for _, id := range []string{a, b} {
			git(l.T, l.host, "update-ref", guestapi.RefModules+id, id)
		}
		return git(l.T, l.host, "rev-parse", "HEAD"), a
	}
}

// Submodules that the host sends are checked out at their commits in each work tree, and
// follow later commits unless the agent has worked in them.
func TestReceiveModules(t *testing.T) {
	l := newLab(t)
	next := l.moduleHost()
	l.ok(guestapi.RepoInit{Branch: "main"}, "init")
	send := func(head, a string) {
		t.Helper()
		p := guestapi.RepoReceive{Updates: []guestapi.RepoUpdate{{Branch: "main", Commit: head}}}
		revs := []string{"main"}
		for line := range strings.Lines(git(t, l.host, "for-each-ref", "--format=%(refname)", guestapi.RefModules)) {
			revs = append(revs, strings.TrimSpace(line))
		}
		if got := l.send(p, revs...); len(got.Errors) > 0 || got.Modules != "" {
			t.Fatal(got)
		}
		if st := l.stateNow(); !slices.Contains(st.Modules, a) {
			t.Errorf("%s is not among %v", a, st.Modules)
		}
	}
	send(next("one"))
	l.wantFiles(map[string]string{"lib/a/file": "one", "lib/a/deep/b/file": "b"})
	if st := l.stateNow(); st.Worktrees[0].Uncommitted != 0 || st.Elsewhere != 0 {
		t.Errorf("%+v", st)
	}
	l.ok(nil, "worktree", "add", "topic/x", "main")
	l.wantFiles(map[string]string{".worktrees/topic/x/lib/a/file": "one", ".worktrees/topic/x/lib/a/deep/b/file": "b"})
	send(next("two"))
	l.wantFiles(map[string]string{"lib/a/file": "two", ".worktrees/topic/x/lib/a/file": "one"})
	l.ok(nil, "worktree", "remove", "topic/x")

	mine := commit(t, filepath.Join(l.dir, "lib/a"), "mine", "1")
	if st := l.stateNow(); st.Elsewhere != 1 || st.ModuleWork["lib/a"] != 1 || len(st.ModuleWork) != 1 || st.Worktrees[0].Uncommitted != 1 {
		t.Errorf("a commit in a submodule: %+v", st)
	}
	git(t, l.dir, "commit", "-qam", "submodule of the agent")
	if st := l.stateNow(); st.Elsewhere != 1 || st.Worktrees[0].Uncommitted != 0 {
		t.Errorf("a commit in a submodule that is recorded: %+v", st)
	}
	git(t, l.dir, "reset", "-q", "HEAD~1")
	write(t, filepath.Join(l.dir, "lib/a/deep/b/file"), "changed")
	send(next("three"))
	if got := git(t, filepath.Join(l.dir, "lib/a"), "rev-parse", "HEAD"); got != mine {
		t.Errorf("the submodule of the agent is at %s", got)
	}
	l.wantFiles(map[string]string{"lib/a/mine": "1", "lib/a/deep/b/file": "changed"})
	l.ok(nil, "worktree", "add", "fix", "main")
	commit(t, filepath.Join(l.dir, ".worktrees/fix/lib/a"), "mine", "1")
	git(t, filepath.Join(l.dir, ".worktrees/fix"), "commit", "-qam", "of the agent")
	if _, err := l.call(nil, "worktree", "remove", "fix"); err == nil {
		t.Error("commits in a submodule were removed")
	}
}

// What a repository says of its submodules leads nowhere but into it.
func TestHostileModules(t *testing.T) {
	for _, p := range []string{".git/modules/x", ".GIT/x", "a/.git", "../x", "/x", "a/../../x", "a//b", "", "."} {
		if modulePath(p) == nil {
			t.Errorf("the path %q was taken", p)
		}
	}
	top, outside := t.TempDir(), t.TempDir()
	root, err := os.OpenRoot(top)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = root.Close() }()
	if err := os.Symlink(outside, filepath.Join(top, "lib")); err != nil {
		t.Fatal(err)
	}
	m := &Modules{root: root, Top: top, Git: func(string, io.Reader, io.Writer, ...string) error { return nil }}
	for _, at := range []string{"lib", "lib/a"} {
		if err := m.checkOutOne(at, strings.Repeat("ab", 20)); err == nil {
			t.Errorf("%s was taken for the folder of a submodule", at)
		}
	}
	if entries, _ := os.ReadDir(outside); len(entries) != 0 {
		t.Errorf("%v was written outside", entries)
	}
}
