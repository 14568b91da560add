package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// workProfile is the profile "interactive" with an image, and with fewer resources: all
// VMs of the tests run at once.
func (l *lab) workProfile(name, image string) {
	l.Helper()
	text := "name: " + name + "\nimage: " + image + `
network: {mode: nat}
resources: {cores: 2, memory_mb: 2048}
storage: {workspace: none}
behavior: {mode: dangerous, keepalive_default: true, ttl_minutes_default: 600}
secrets_bundle: default
`
	l.ok("daemon", "start")
	if _, err := l.client().PutProfile(l.Context(), name, text); err != nil {
		l.Fatal(err)
	}
}

// in runs agentlab in a directory and expects success.
func (l *lab) in(dir string, args ...string) string {
	l.Helper()
	r := l.run(dir, args...)
	if r.code != 0 {
		l.Fatalf("agentlab %v: %v", args, r)
	}
	return r.stdout
}

// sandboxOf returns the name of the current sandbox of a session.
func (l *lab) sandboxOf(session string) string {
	l.Helper()
	var s api.Session
	if err := json.Unmarshal([]byte(l.ok("--json", "session", "show", session)), &s); err != nil {
		l.Fatal(err)
	}
	return s.Sandbox
}

// guest runs a script in the repository of a session.
func (l *lab) guest(session, script string) string {
	l.Helper()
	return strings.TrimSpace(l.ok("exec", l.sandboxOf(session), "--dir", guestapi.ProjectDir, "--", "bash", "-euc", script))
}

// The work of a session comes back through git: seed 004, user story 1 (scenarios 1 and
// 2) and user story 3 (scenarios 1 and 3).
func TestSessionRepository(t *testing.T) {
	t.Parallel()
	own := newDotfiles(t)
	l := newLab(t, "GIT_CONFIG_GLOBAL="+own.config())
	l.workProfile("work", "base")
	repo := filepath.Join(t.TempDir(), "My App")
	if err := os.Rename(sampleRepo(t), repo); err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(repo, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("local.txt", "not committed\n")
	l.in(repo, "start", "--profile", "work", "--agent", "none", "--detach", "--with-changes")
	if got := git(t, repo, "status", "--porcelain"); got != "?? local.txt" {
		t.Errorf("the start has changed the work tree: %q", got)
	}
	const session = "my-app"
	if got := l.guest(session, "pwd -P; git log --format=%s; git status --porcelain; cat local.txt"); got != "/work/repo\nA greeting with a slip\n?? local.txt\nnot committed" {
		t.Errorf("the session began with:\n%s", got)
	}

	l.guest(session, "git config user.name Agent; git config user.email agent@localhost; echo hello > greeting.txt; git commit -qam Fix; echo more >> greeting.txt; rm local.txt")
	if out := l.in(repo, "diff"); !strings.Contains(out, "+more") {
		t.Errorf("diff: %q", out)
	}
	var got struct {
		Fetched []struct{ Branch, Commit string }
		Merged  struct {
			Branch      string
			FastForward bool `json:"fast_forward"`
		}
		Uncommitted int
	}
	if err := json.Unmarshal([]byte(l.in(repo, "--json", "sync")), &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Fetched) != 1 || got.Merged.Branch != "main" || !got.Merged.FastForward || got.Uncommitted != 1 {
		t.Errorf("sync: %+v", got)
	}
	if log := git(t, repo, "log", "-1", "--format=%s %an"); log != "Fix Agent" {
		t.Errorf("after sync: %q", log)
	}
	l.in(repo, "apply", "--force")
	if p, _ := os.ReadFile(filepath.Join(repo, "greeting.txt")); string(p) != "hello\nmore\n" {
		t.Errorf("after apply: %q", p)
	}
	git(t, repo, "commit", "-qam", "More")

	// Both sides have commits: git merges. The remote is an ordinary one.
	l.guest(session, "git checkout -q greeting.txt; echo new > new.txt; git add new.txt; git commit -qm New")
	l.in(repo, "sync")
	if log := git(t, repo, "log", "-1", "--format=%P"); len(strings.Fields(log)) != 2 {
		t.Errorf("no merge: %q", log)
	}
	if err := os.Symlink("agentlab", filepath.Join(l.bin, "git-remote-agentlab")); err != nil && !os.IsExist(err) {
		t.Fatal(err)
	}
	l.git(repo, "push", "-q", "agentlab", "main")
	l.git(repo, "fetch", "-q", "agentlab")
	if a, b := git(t, repo, "rev-parse", "main"), l.guest(session, "cat new.txt greeting.txt >/dev/null; git rev-parse HEAD"); a != b || git(t, repo, "rev-parse", "agentlab/main") != a {
		t.Errorf("after the push the session is at %s, not %s", b, a)
	}

	l.checkDotfiles(own, repo, session)
	l.checkEditors(session)
	l.checkWorktrees(repo, session)
	l.checkRemoval(repo, session)
}

// git runs git with the programs of the test on the PATH.
func (l *lab) git(dir string, args ...string) string {
	l.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir, cmd.Env = dir, l.env
	out, err := cmd.CombinedOutput()
	if err != nil {
		l.Fatalf("git %q: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// checkWorktrees has two branches in one VM.
func (l *lab) checkWorktrees(repo, session string) {
	l.Helper()
	l.in(repo, "worktree", "add", "fix/1")
	l.guest(session, "cd .worktrees/fix/1; echo x > x; git add x; git commit -qm X; echo y > y")
	if list := l.in(repo, "worktree", "list"); !strings.Contains(list, "/workspace/.worktrees/fix/1") {
		l.Errorf("work trees:\n%s", list)
	}
	if got := l.guest(session, "git status --porcelain"); got != "" {
		l.Errorf("the main work tree has changes: %q", got)
	}
	l.in(repo, "sync", "--worktree", "fix/1", "--into", "fix/1")
	if got := git(l, repo, "show", "fix/1:x"); got != "x" {
		l.Errorf("the work of the work tree: %q", got)
	}
	if r := l.run(repo, "worktree", "rm", "fix/1"); r.code == 0 || !strings.Contains(r.stderr, "uncommitted") {
		l.Errorf("a work tree with changes was removed: %v", r)
	}
	l.in(repo, "worktree", "rm", "--force", "fix/1")
}

// checkRemoval stops, loses and deletes a session.
func (l *lab) checkRemoval(repo, session string) {
	l.Helper()
	l.guest(session, "echo kept > /home/agent/kept; echo last > last; git add last; git commit -qm Last")
	l.in(repo, "stop")
	l.in(repo, "start", "--agent", "none", "--detach")
	if got := l.guest(session, "cat /home/agent/kept"); got != "kept" {
		l.Errorf("after stop and start: %q", got)
	}
	if r := l.run(repo, "rm", "--yes"); r.code == 0 || !strings.Contains(r.stderr, "commits of main") {
		l.Errorf("unsynced work was deleted: %v", r)
	}
	l.in(repo, "sync")
	l.in(repo, "rm", "--yes")
	if got := git(l, repo, "remote"); got != "" {
		l.Errorf("remotes are left: %q", got)
	}
	if got := git(l, repo, "show", "HEAD:last"); got != "last" {
		l.Errorf("the last commit is lost: %q", got)
	}
}
