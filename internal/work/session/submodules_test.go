package session

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// userModules is a repository with the submodule lib/a, which has deep/b.
func userModules(t *testing.T) (repo string) {
	t.Helper()
	add := func(repo, module, at string) {
		worktest.Git(t, repo, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", module, at)
		worktest.Git(t, repo, "-c", "protocol.file.allow=always", "submodule", "--quiet", "update", "--init", "--recursive")
		worktest.Git(t, repo, "commit", "-q", "-m", "submodule")
	}
	b, a, repo := worktest.Repo(t), worktest.Repo(t), worktest.Repo(t)
	add(a, b, "deep/b")
	add(repo, a, "lib/a")
	return repo
}

func TestSubmodulesAreSent(t *testing.T) {
	t.Parallel()
	repo := userModules(t)
	src, err := gitsafe.FindCommit(t.Context(), repo, "")
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, m := range src.Modules {
		paths = append(paths, m.Path)
	}
	if !slices.Equal(paths, []string{"lib/a", "lib/a/deep/b"}) || len(src.Unsent) != 0 {
		t.Fatalf("found %q, missing %v", paths, src.Unsent)
	}
	file, err := gitsafe.PackBundle(t.Context(), t.TempDir(), src, nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = file.Close()
	clone := filepath.Join(t.TempDir(), "clone")
	worktest.Git(t, repo, "clone", "-q", file.Name(), clone)
	heads := worktest.Git(t, repo, "bundle", "list-heads", file.Name())
	for _, at := range paths {
		commit := worktest.Git(t, filepath.Join(repo, at), "rev-parse", "HEAD")
		if !strings.Contains(heads, commit+" "+guestapi.RefModules+commit) {
			t.Errorf("%s is not among %s", at, heads)
		}
		if got := worktest.Git(t, clone, "show", commit+":a.txt"); got != "one" {
			t.Errorf("%s: the clone has %q", at, got)
		}
	}
	// From a folder below, too.
	if err := os.Mkdir(filepath.Join(repo, "sub"), 0o750); err != nil {
		t.Fatal(err)
	}
	if src, err := gitsafe.FindCommit(t.Context(), filepath.Join(repo, "sub"), ""); err != nil || len(src.Modules) != 2 {
		t.Errorf("from a folder: %v, %v", src.Modules, err)
	}
}

// Submodules that do not come along are named with what to do about it.
func TestUnsentSubmodulesAreNamed(t *testing.T) {
	t.Parallel()
	notes := func(repo string) string {
		t.Helper()
		src, err := gitsafe.FindCommit(t.Context(), repo, "")
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		gitsafe.WarnUnsent(t.Context(), worktest.UI{Out: &out}, src)
		return out.String()
	}
	repo := userModules(t)
	if got := notes(repo); got != "" {
		t.Errorf("nothing is missing, but: %s", got)
	}
	worktest.Git(t, filepath.Join(repo, "lib/a"), "submodule", "--quiet", "deinit", "--all")
	if got := notes(repo); !strings.Contains(got, "submodule lib/a/deep/b is not sent") || !strings.Contains(got, "git submodule update --init") {
		t.Errorf("below a submodule: %s", got)
	}
	worktest.Git(t, repo, "submodule", "--quiet", "deinit", "--all", "--force")
	if got := notes(repo); !strings.Contains(got, "submodule lib/a is not sent: it is not checked out\n  → git submodule update --init --recursive -- lib/a\n") {
		t.Errorf("not initialised: %s", got)
	}
	// A folder that leads elsewhere is not taken for the submodule.
	secret := worktest.Repo(t)
	worktest.Git(t, repo, "update-index", "--add", "--cacheinfo", "160000,"+worktest.Git(t, secret, "rev-parse", "HEAD")+",lib/a")
	worktest.Git(t, repo, "commit", "-q", "-m", "evil")
	if err := os.RemoveAll(filepath.Join(repo, "lib/a")); err != nil {
		t.Fatal(err)
	}
	worktest.Put(t, repo, map[string]string{"lib/a": "-> " + secret})
	src, err := gitsafe.FindCommit(t.Context(), repo, "")
	if err != nil || len(src.Modules) != 0 || len(src.Unsent) != 1 {
		t.Errorf("a link to another repository: %+v, %v", src.Modules, err)
	}
}

func TestLFSFilesAreNamed(t *testing.T) {
	repo := worktest.Repo(t)
	pointer := "version https://git-lfs.github.com/spec/v1\noid sha256:" + strings.Repeat("a", 64) + "\nsize 12345\n"
	worktest.Put(t, repo, map[string]string{"assets/big.bin": pointer})
	worktest.Git(t, repo, "add", ".")
	worktest.Git(t, repo, "commit", "-q", "-m", "looks like a pointer, but nothing uses LFS")
	if l, err := gitsafe.FindLFS(t.Context(), repo, "HEAD"); err != nil || len(l.Files) != 0 {
		t.Errorf("without attributes: %v, %v", l.Files, err)
	}
	worktest.Put(t, repo, map[string]string{"assets/.gitattributes": "*.bin filter=lfs diff=lfs merge=lfs -text\n"})
	worktest.Git(t, repo, "add", "assets/.gitattributes")
	worktest.Git(t, repo, "commit", "-q", "-m", "LFS")
	worktest.Git(t, repo, "config", "remote.origin.url", "https://example.com/org/repo.git")
	src, err := gitsafe.FindCommit(t.Context(), repo, "")
	if err == nil {
		src.Lfs, err = gitsafe.FindLFS(t.Context(), repo, src.Commit)
	}
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	gitsafe.WarnUnsent(t.Context(), worktest.UI{Out: &out}, src)
	for _, want := range []string{"not sending the content of 1 Git LFS file (assets/big.bin),", "git -c lfs.url=https://example.com/org/repo.git/info/lfs lfs pull"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in %q", want, out.String())
		}
	}
}

// The name of a submodule is the repository's: a command that the user copies
// must not hold another one.
func TestSubmoduleFixIsQuoted(t *testing.T) {
	for name, want := range map[string]string{"lib/a": "lib/a", "$(touch x)": "'$(touch x)'", "a'; x": `'a'\''; x'`} {
		var m gitsafe.Submodule
		if _, fix := m.Locate(t.Context(), t.TempDir(), name); fix != "git submodule update --init --recursive -- "+want {
			t.Errorf("%q: %s", name, fix)
		}
	}
}

// The commands that a sync prints for commits in a submodule of the session bring them here,
// and rm names the submodule.
func TestCommitsOfSubmodules(t *testing.T) {
	user := userModules(t)
	guest := filepath.Join(t.TempDir(), "guest")
	worktest.Git(t, user, "-c", "protocol.file.allow=always", "clone", "-q", "--recurse-submodules", user, guest)
	inner := filepath.Join(guest, "lib/a/deep/b")
	worktest.Put(t, inner, map[string]string{"new": "1"})
	for _, dir := range []string{inner, filepath.Join(guest, "lib/a"), guest} {
		worktest.Git(t, dir, "add", "-A")
		worktest.Git(t, dir, "commit", "-q", "-m", "of the agent")
	}
	st := guestapi.RepoState{
		Worktrees: []guestapi.RepoWorktree{{}, {Dir: ".worktrees/fix"}}, Elsewhere: 3, Stashes: new(int),
		ModuleWork: map[string]int{"lib/a": 1, ".worktrees/fix/lib/a/deep/b": 2},
	}
	left := strings.Join(onlyInSession(t.Context(), Link{Path: user}, st), "; ")
	if left != "2 commits in the submodule /workspace/.worktrees/fix/lib/a/deep/b; 1 commit in the submodule /workspace/lib/a" {
		t.Errorf("rm: %s", left)
	}
	var notes bytes.Buffer
	noteModules(worktest.UI{Out: &notes}, &Opened{Session: api.Session{Name: "app"}, Guest: st})
	var script strings.Builder
	for line := range strings.Lines(notes.String()) {
		if command, ok := strings.CutPrefix(line, "  → "); ok {
			script.WriteString(strings.ReplaceAll(command, "/workspace/.worktrees/fix", "/workspace"))
		}
	}
	program := strings.ReplaceAll(script.String(), "agentlab exec app -- git -C /workspace", "git -C "+guest)
	cmd := exec.Command("sh", "-ec", program)
	cmd.Dir = user
	if out, err := cmd.CombinedOutput(); err != nil || strings.Count(program, "\n") != 4 {
		t.Fatalf("%s: %v: %s", program, err, out)
	}
	// Now a merge and 'git submodule update' check them out, without the remotes.
	worktest.Git(t, user, "fetch", "-q", guest, "HEAD")
	worktest.Git(t, user, "merge", "-q", "--ff-only", "FETCH_HEAD")
	for _, dir := range []string{user, filepath.Join(user, "lib/a")} {
		worktest.Git(t, dir, "submodule", "--quiet", "update")
	}
	if got := worktest.Git(t, filepath.Join(user, "lib/a/deep/b"), "show", "HEAD:new"); got != "1" {
		t.Errorf("new is %q", got)
	}
}
