package repocmd

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// git runs git in dir with a configuration of its own.
func git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %q: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func commit(t *testing.T, dir, name, text string) string {
	t.Helper()
	write(t, filepath.Join(dir, name), text)
	git(t, dir, "add", name)
	git(t, dir, "commit", "-qm", name)
	return git(t, dir, "rev-parse", "HEAD")
}

// lab is the repository of a session, and one of a host.
type lab struct {
	*testing.T
	repo
	host string
}

func newLab(t *testing.T) lab {
	t.Helper()
	home := t.TempDir()
	t.Setenv("HOME", home)
	write(t, filepath.Join(home, ".gitconfig"), "[user]\n\tname = T\n\temail = t@localhost\n")
	l := lab{T: t, repo: newRepo(filepath.Join(t.TempDir(), "repo")), host: t.TempDir()}
	git(t, l.host, "init", "-q", "-b", "main")
	return l
}

// call runs a command of the guest.
func (l lab) call(in any, args ...string) (string, error) {
	l.Helper()
	var input bytes.Buffer
	switch in := in.(type) {
	case []byte:
		input.Write(in)
	case nil:
	default:
		if err := json.NewEncoder(&input).Encode(in); err != nil {
			l.Fatal(err)
		}
	}
	var out bytes.Buffer
	err := l.run(args, &input, &out)
	return out.String(), err
}

func (l lab) ok(in any, args ...string) string {
	l.Helper()
	out, err := l.call(in, args...)
	if err != nil {
		l.Fatalf("%q: %v", args, err)
	}
	return out
}

// send sends commits of the host as a bundle.
func (l lab) send(p guestapi.RepoReceive, revs ...string) guestapi.RepoReceived {
	l.Helper()
	if len(revs) == 0 {
		return l.sendFile(p, os.DevNull)
	}
	file := filepath.Join(l.TempDir(), "bundle")
	git(l.T, l.host, append([]string{"bundle", "create", "-q", file}, revs...)...)
	return l.sendFile(p, file)
}

func (l lab) sendFile(p guestapi.RepoReceive, bundle string) guestapi.RepoReceived {
	l.Helper()
	line, err := json.Marshal(p)
	if err != nil {
		l.Fatal(err)
	}
	text, err := os.ReadFile(bundle)
	if err != nil {
		l.Fatal(err)
	}
	var got guestapi.RepoReceived
	if err := json.Unmarshal([]byte(l.ok(append(append(line, '\n'), text...), "receive")), &got); err != nil {
		l.Fatal(err)
	}
	return got
}

func (l lab) stateNow() (st guestapi.RepoState) {
	l.Helper()
	if err := json.Unmarshal([]byte(l.ok(nil, "state")), &st); err != nil {
		l.Fatal(err)
	}
	return st
}

// The identity of the user precedes the one of the system, and replaces none of the
// repository.
func TestUserIdentity(t *testing.T) {
	system := filepath.Join(t.TempDir(), "gitconfig")
	if err := os.WriteFile(system, []byte("[user]\nname = AgentLab agent\nemail = agent@agentlab.invalid\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("GIT_CONFIG_SYSTEM", system)
	t.Setenv("GIT_CONFIG_NOSYSTEM", "0")
	l := newLab(t)
	l.ok(guestapi.RepoInit{Branch: "main"}, "init")
	for _, name := range []string{"Ada", "Bob"} {
		l.ok(guestapi.RepoInit{Branch: "main", UserName: name, UserEmail: strings.ToLower(name) + "@example.com"}, "init")
		if got := git(t, l.dir, "config", "user.name") + git(t, l.dir, "config", "user.email"); got != "Adaada@example.com" {
			t.Errorf("%s: %q", name, got)
		}
	}
}

func TestReceive(t *testing.T) {
	l := newLab(t)
	first := commit(t, l.host, "a", "1")
	for range 2 { // it is idempotent
		l.ok(guestapi.RepoInit{Branch: "main", Origin: "https://host.example/a/b.git"}, "init")
	}
	up := func(commit string) guestapi.RepoReceive {
		return guestapi.RepoReceive{Updates: []guestapi.RepoUpdate{{Branch: "main", Commit: commit}}}
	}
	if got := l.send(up(first), "main"); len(got.Errors) > 0 {
		t.Fatal(got)
	}
	if p, _ := os.ReadFile(filepath.Join(l.dir, "a")); string(p) != "1" {
		t.Errorf("the file is %q", p)
	}
	if st := l.stateNow(); st.Branches["main"] != first || len(st.Worktrees) != 1 || st.Worktrees[0] != (guestapi.RepoWorktree{Branch: "main", Head: first}) {
		t.Errorf("%+v", st)
	}
	second := commit(t, l.host, "a", "2")
	write(t, filepath.Join(l.dir, "a"), "changed")
	if got := l.send(up(second), "main"); !strings.Contains(got.Errors["main"], "uncommitted changes") {
		t.Errorf("a work tree with changes was updated: %v", got)
	}
	git(t, l.dir, "checkout", "-q", "a")
	if got := l.send(up(second)); len(got.Errors) > 0 { // the objects are there
		t.Error(got)
	}
	git(t, l.dir, "commit", "-q", "--allow-empty", "-m", "of the agent")
	third := commit(t, l.host, "a", "3")
	if got := l.send(up(third), "main"); !strings.Contains(got.Errors["main"], "non-fast-forward") {
		t.Errorf("commits were lost: %v", got)
	}
	p := up(third)
	p.Updates[0].Force = true
	if got := l.send(p, "main"); len(got.Errors) > 0 {
		t.Error(got)
	}
	if got := l.send(up("")); !strings.Contains(got.Errors["main"], "current branch") {
		t.Errorf("the current branch was deleted: %v", got)
	}
	if got := l.send(guestapi.RepoReceive{Updates: []guestapi.RepoUpdate{{Branch: "../x", Commit: third}}}); got.Errors["../x"] == "" {
		t.Error("a name that is not one of a branch was set")
	}
	if got := git(t, l.dir, "config", "remote.origin.url"); got != "https://host.example/a/b.git" {
		t.Error(got)
	}
}

// A branch is checked out only in a work tree without changes.
func TestReceiveChecksOut(t *testing.T) {
	l := newLab(t)
	head := commit(t, l.host, "a", "1")
	l.ok(guestapi.RepoInit{Branch: "main"}, "init")
	l.send(guestapi.RepoReceive{Updates: []guestapi.RepoUpdate{{Branch: "main", Commit: head}}}, "main")
	send := func(branch, want string) {
		t.Helper()
		l.send(guestapi.RepoReceive{Updates: []guestapi.RepoUpdate{{Branch: branch, Commit: head}}, Checkout: branch})
		if st := l.stateNow(); st.Worktrees[0].Branch != want || st.Branches[branch] != head {
			t.Errorf("%s: %+v, want %s", branch, st, want)
		}
	}
	send("topic", "topic")
	write(t, filepath.Join(l.dir, "a"), "changed")
	send("second", "topic")
	git(t, l.dir, "checkout", "-q", "a")
	l.ok(nil, "worktree", "add", "third")
	send("third", "topic")
	if _, err := l.call([]byte(`{"checkout":"--detach"}`+"\n"), "receive"); err == nil {
		t.Error("an option was accepted")
	}
}

func TestReceiveChanges(t *testing.T) {
	l := newLab(t)
	write(t, filepath.Join(l.host, "gone"), "x")
	git(t, l.host, "add", "gone")
	head := commit(t, l.host, "a", "1\n")
	l.ok(guestapi.RepoInit{Branch: "main"}, "init")
	write(t, filepath.Join(l.host, "a"), "2\n")
	write(t, filepath.Join(l.host, "new"), "\x00binary")
	if err := os.Remove(filepath.Join(l.host, "gone")); err != nil {
		t.Fatal(err)
	}
	git(t, l.host, "add", "-A")
	changes := git(t, l.host, "commit-tree", git(t, l.host, "write-tree"), "-p", "HEAD", "-m", "changes")
	git(t, l.host, "update-ref", guestapi.RefChanges, changes)
	p := guestapi.RepoReceive{Updates: []guestapi.RepoUpdate{{Branch: "main", Commit: head}}, Changes: changes}
	if got := l.send(p, "main", guestapi.RefChanges); len(got.Errors) > 0 {
		t.Fatal(got)
	}
	for range 2 { // the second time they are there already
		if got := git(t, l.dir, "status", "--porcelain"); got != "M a\n D gone\n?? new" {
			t.Errorf("%q", got)
		}
		if got := l.send(p, "main", guestapi.RefChanges); len(got.Errors) > 0 {
			t.Fatal(got)
		}
	}
}

// Programs are found by their working directory, shells apart from others.
func TestPrograms(t *testing.T) {
	l := newLab(t)
	inside := filepath.Join(l.dir, "a")
	write(t, filepath.Join(inside, "x"), "")
	other := filepath.Join(l.dir, guestapi.WorktreesDir, "fix")
	write(t, filepath.Join(other, "x"), "")
	for _, dir := range []string{inside, other, l.host} {
		for _, args := range [][]string{{"sleep", "300"}, {"sh"}} {
			cmd := exec.Command(args[0], args[1:]...)
			cmd.Dir = dir
			if _, err := cmd.StdinPipe(); err != nil { // it waits
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
			})
		}
	}
	for dir, want := range map[string]guestapi.RepoPrograms{
		"a": {Names: []string{"sleep"}, Shells: 1}, "": {Names: []string{"sleep"}, Shells: 2}, ".": {Names: []string{"sleep"}, Shells: 1},
	} {
		if got, err := l.programs(dir); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %+v, %v", dir, got, err)
		}
	}
	if _, err := l.programs("../x"); err == nil {
		t.Error("a directory outside of the repository was accepted")
	}
	for cmdline, want := range map[string]string{
		"node\x00/usr/bin/claude\x00-c\x00": "claude", "-bash\x00": "bash", "tmux: server\x00": "tmux", "python3\x00-m\x00http.server\x00": "python3", "": "",
	} {
		if got := programName(cmdline); got != want {
			t.Errorf("%q: got %q, want %q", cmdline, got, want)
		}
	}
}

func TestPack(t *testing.T) {
	l := newLab(t)
	head := commit(t, l.host, "a", "1")
	l.ok(guestapi.RepoInit{Branch: "main"}, "init")
	l.send(guestapi.RepoReceive{Updates: []guestapi.RepoUpdate{{Branch: "main", Commit: head}}}, "main")
	ask := guestapi.RepoPack{Branches: []string{"main"}, Have: []string{head, strings.Repeat("ab", 20)}, Changes: true}
	if out := l.ok(ask, "pack"); out != "" {
		t.Errorf("%d bytes without anything new", len(out))
	}
	fetch := func() {
		t.Helper()
		file := filepath.Join(t.TempDir(), "bundle")
		write(t, file, l.ok(ask, "pack"))
		git(t, l.host, "fetch", "-q", file, "refs/*:refs/got/*")
	}
	second := commit(t, l.dir, "b", "2")
	fetch()
	if got := git(t, l.host, "rev-parse", "refs/got/heads/main"); got != second {
		t.Error(got)
	}
	write(t, filepath.Join(l.dir, "a"), "changed")
	write(t, filepath.Join(l.dir, "untracked"), "new")
	before := git(t, l.dir, "status", "--porcelain")
	fetch()
	if got := git(t, l.host, "diff", "--name-status", "refs/got/heads/main", "refs/got/agentlab/changes"); got != "M\ta\nA\tuntracked" {
		t.Errorf("%q", got)
	}
	if after := git(t, l.dir, "status", "--porcelain"); after != before {
		t.Errorf("the index has changed: %q, before %q", after, before)
	}
	for _, p := range []guestapi.RepoPack{{Branches: []string{"--all"}}, {Branches: []string{"missing"}}, {Changes: true, Dir: "../.."}} {
		if _, err := l.call(p, "pack"); err == nil {
			t.Errorf("%+v was accepted", p)
		}
	}
}

// Uncommitted changes of a sparse work tree are packed: also a new file outside, and
// nothing that is not checked out counts as removed.
func TestPackSparse(t *testing.T) {
	l := newLab(t)
	l.ok(guestapi.RepoInit{Branch: "main"}, "init")
	commit(t, l.dir, "a", "1")
	head := commit(t, l.dir, "dir/b", "1")
	git(t, l.dir, "sparse-checkout", "set", "--no-cone", "/a")
	write(t, filepath.Join(l.dir, "new"), "new")
	file := filepath.Join(t.TempDir(), "bundle")
	write(t, file, l.ok(guestapi.RepoPack{Branches: []string{"main"}, Have: []string{head}, Changes: true}, "pack"))
	git(t, l.host, "fetch", "-q", l.dir, "main")
	git(t, l.host, "fetch", "-q", file, guestapi.RefChanges+":refs/got")
	if got := git(t, l.host, "diff", "--name-status", head, "refs/got"); got != "A\tnew" {
		t.Errorf("%q", got)
	}
}

func TestWorktrees(t *testing.T) {
	l := newLab(t)
	head := commit(t, l.host, "a", "1")
	l.ok(guestapi.RepoInit{Branch: "main"}, "init")
	l.send(guestapi.RepoReceive{Updates: []guestapi.RepoUpdate{{Branch: "main", Commit: head}}}, "main")
	l.ok(nil, "worktree", "add", "feature/x", "main")
	write(t, filepath.Join(l.dir, ".worktrees/feature/x/new"), "new")
	st := l.stateNow()
	if want := (guestapi.RepoWorktree{Dir: ".worktrees/feature/x", Branch: "feature/x", Head: head, Uncommitted: 1}); len(st.Worktrees) != 2 || st.Worktrees[1] != want || st.Worktrees[0].Uncommitted != 0 {
		t.Errorf("%+v", st)
	}
	ask := guestapi.RepoPack{Branches: []string{"feature/x"}, Have: []string{head}, Changes: true, Dir: ".worktrees/feature/x"}
	if out := l.ok(ask, "pack"); !strings.Contains(out, guestapi.RefChanges) {
		t.Error("no changes of the work tree")
	}
	if _, err := l.call(nil, "worktree", "remove", "feature/x"); err == nil {
		t.Error("a work tree with changes was removed")
	}
	l.ok(nil, "worktree", "remove", "--force", "feature/x")
	if st := l.stateNow(); len(st.Worktrees) != 1 || st.Branches["feature/x"] != head {
		t.Errorf("%+v", st)
	}
	for _, args := range [][]string{{"worktree"}, {"worktree", "add"}, {"worktree", "move", "x"}, {"x"}, {}, {"state", "x"}, {"worktree", "add", "-x"}} {
		if _, err := l.call(nil, args...); err == nil {
			t.Errorf("%q was accepted", args)
		}
	}
}

// Work that is on no branch and in no listed work tree is counted, and not removed.
func TestWorkElsewhere(t *testing.T) {
	l := newLab(t)
	l.ok(guestapi.RepoInit{Branch: "main"}, "init")
	commit(t, l.dir, "a", "1")
	if st := l.stateNow(); st.Elsewhere != 0 {
		t.Errorf("%+v", st)
	}
	write(t, filepath.Join(l.dir, "a"), "2")
	git(t, l.dir, "stash", "-q")
	write(t, filepath.Join(l.dir, "a"), "3")
	git(t, l.dir, "stash", "-q")
	if st := l.stateNow(); st.Elsewhere != 2 || *st.Stashes != 2 {
		t.Errorf("stashes: %+v", st)
	}
	git(t, l.dir, "stash", "clear")
	outside := filepath.Join(t.TempDir(), "outside")
	git(t, l.dir, "worktree", "add", "-q", "--detach", outside)
	if st := l.stateNow(); st.Elsewhere != 0 {
		t.Errorf("a work tree without changes: %+v", st)
	}
	commit(t, outside, "b", "1")
	write(t, filepath.Join(outside, "new"), "x")
	if st := l.stateNow(); st.Elsewhere != 2 || *st.Stashes != 0 {
		t.Errorf("a commit and a file in a work tree outside: %+v", st)
	}
	if err := os.RemoveAll(outside); err != nil {
		t.Fatal(err)
	}
	if st := l.stateNow(); st.Elsewhere != 1 {
		t.Errorf("a commit of a work tree whose files are missing: %+v", st)
	}
	saved := filepath.Join(filepath.Dir(l.dir), guestapi.SavedDir, "job-a")
	if err := os.MkdirAll(saved, 0o755); err != nil {
		t.Fatal(err)
	}
	if st := l.stateNow(); st.Elsewhere != 2 {
		t.Errorf("a checkout that was set aside: %+v", st)
	}
	if err := os.RemoveAll(filepath.Dir(saved)); err != nil {
		t.Fatal(err)
	}
	git(t, l.dir, "config", "status.showUntrackedFiles", "no")
	write(t, filepath.Join(l.dir, "untracked"), "x")
	if st := l.stateNow(); st.Worktrees[0].Uncommitted != 1 {
		t.Errorf("an untracked file that the configuration hides: %+v", st)
	}
	l.ok(nil, "worktree", "add", "fix")
	tree := filepath.Join(l.dir, ".worktrees/fix")
	git(t, tree, "checkout", "-q", "--detach")
	head := commit(t, tree, "c", "1")
	if _, err := l.call(nil, "worktree", "remove", "fix"); err == nil || !strings.Contains(err.Error(), "on no branch") {
		t.Errorf("a work tree with a commit of its own: %v", err)
	}
	git(t, l.dir, "branch", "-q", "kept", head)
	l.ok(nil, "worktree", "remove", "fix")
	if err := os.RemoveAll(filepath.Join(l.dir, ".git")); err != nil {
		t.Fatal(err)
	}
	if _, err := l.call(nil, "state"); err == nil {
		t.Error("files without a repository are reported as nothing")
	}
}

// A change in the second in which git wrote the index, which has the same size, is found.
func TestPackChangeRightAfterIndex(t *testing.T) {
	l := newLab(t)
	l.ok(guestapi.RepoInit{Branch: "main"}, "init")
	name, now := filepath.Join(l.dir, "a"), time.Now().Add(-time.Minute).Truncate(time.Second)
	write(t, name, "1")
	git(t, l.dir, "config", "core.trustctime", "false")
	if err := os.Chtimes(name, now, now); err != nil {
		t.Fatal(err)
	}
	git(t, l.dir, "add", "a")
	git(t, l.dir, "commit", "-qm", "x")
	file, err := os.OpenFile(name, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteString("2"); err != nil {
		t.Fatal(err)
	}
	_ = file.Close()
	for _, n := range []string{name, filepath.Join(l.dir, ".git/index")} {
		if err := os.Chtimes(n, now, now); err != nil {
			t.Fatal(err)
		}
	}
	ask := guestapi.RepoPack{Have: []string{git(t, l.dir, "rev-parse", "HEAD")}, Changes: true}
	if out := l.ok(ask, "pack"); !strings.Contains(out, guestapi.RefChanges) {
		t.Error("the change is missing")
	}
}
