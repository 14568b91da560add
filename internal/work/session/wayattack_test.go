package session

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// fetched returns the session with what the guest has committed.
func (w *sessionWorld) fetched() *Opened {
	w.Helper()
	s, err := w.open(w.honest)
	if err != nil {
		w.Fatal(err)
	}
	if _, err := fetchSession(w.Context(), w.app, s); err != nil {
		w.Fatal(err)
	}
	return s
}

// sync fetches and merges what the guest has committed.
func (w *sessionWorld) sync(into string) (*merged, error) {
	w.Helper()
	s := w.fetched()
	m, _, err := mergeSession(w.Context(), w.app, s, into, "trunk")
	return m, err
}

// begin commits files of the user that the guest has too.
func (w *sessionWorld) begin(files map[string]string) {
	w.Helper()
	worktest.Put(w.T, w.user, files)
	worktest.Git(w.T, w.user, "add", "-A")
	worktest.Git(w.T, w.user, "commit", "-q", "-m", "begin")
	worktest.Git(w.T, w.guest, "pull", "-q")
}

// Git overwrites ignored files in a merge, and deletes ignored directories. A sync does
// not.
func TestSyncKeepsIgnoredFiles(t *testing.T) {
	t.Parallel()
	for name, guest := range map[string]map[string]string{
		"file":           {"local.db": "guest\n"},
		"in a directory": {"notes/a": "guest\n"},
		"directory":      {"notes": "guest\n"},
		"below a file":   {"local.db/x": "guest\n"},
		"ignored now":    {".gitignore": "local.db\nnotes\n*.txt\n", "todo.txt": "guest\n"},
	} {
		for _, diverged := range []bool{false, true} {
			w := newSessionWorld(t)
			w.begin(map[string]string{".gitignore": "local.db\nnotes\n"})
			mine := map[string]string{"local.db": "years of work\n", "notes/a": "mine\n", "notes/b/c": "mine\n", "todo.txt": "mine\n"}
			worktest.Put(t, w.user, mine)
			worktest.Put(t, w.guest, guest)
			worktest.Git(t, w.guest, "add", "-A", "-f")
			worktest.Git(t, w.guest, "commit", "-q", "-m", "ignored")
			if diverged {
				worktest.Git(t, w.user, "commit", "-q", "--allow-empty", "-m", "of the user")
			}
			if m, err := w.sync(""); agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(err.Error(), "would overwrite") {
				t.Errorf("%s, diverged %v: %+v, %v", name, diverged, m, err)
			}
			got := worktest.Tree(t, w.user)
			for file, want := range mine {
				if got[file] != want {
					t.Errorf("%s, diverged %v: %s is %q", name, diverged, file, got[file])
				}
			}
		}
	}
}

// Files that this machine obeys through links and its configuration of git are held, also
// for a branch that is not checked out.
func TestSyncFollowsLinksAndConfiguration(t *testing.T) {
	t.Parallel()
	for _, into := range []string{"", "review"} {
		w := newSessionWorld(t)
		w.begin(map[string]string{
			"pkg/.vscode": "-> ../editor", "editor/tasks.json": "x", ".claude": "-> agents", "agents": "-> conf/agents", "conf/agents/settings.json": "x",
			".github/workflows": "-> ../ci", "ci/a.yml": "x", "scripts/pre-commit.sh": "true\n", "conf/git.inc": "", "tools/clean.sh": "cat\n", "plain": "x",
		})
		worktest.Git(t, w.user, "branch", "review")
		hook := filepath.Join(w.user, ".git/hooks/pre-commit")
		if err := os.MkdirAll(filepath.Dir(hook), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("../../scripts/pre-commit.sh", hook); err != nil {
			t.Fatal(err)
		}
		worktest.Git(t, w.user, "config", "include.path", "../conf/git.inc")
		worktest.Git(t, w.user, "config", "filter.x.clean", "sh ./tools/clean.sh %f")
		w.commit(map[string]string{
			"editor/tasks.json": "evil", "conf/agents/settings.json": "evil", "ci/a.yml": "evil", "scripts/pre-commit.sh": "evil", "tools/clean.sh": "evil", "plain": "y",
			"conf/git.inc": "[core]\n\tfsmonitor = false\n",
		})
		m, err := w.sync(into)
		if agentlab.CodeOf(err) != agentlab.CodeDenied || !strings.HasPrefix(err.Error(), "6 files must be confirmed") {
			t.Errorf("into %q: %+v, %v", into, m, err)
		}
	}
}

// What is merged is what was judged, although the ref moves while the question waits.
func TestSyncMergesWhatWasJudged(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	commit := w.commit(map[string]string{".env.local": "x"})
	s := w.fetched()
	a := worktest.Asking{UI: w.app, Answer: func(string) string {
		w.commit(map[string]string{".envrc": "evil"})
		worktest.Git(t, w.user, "fetch", "-q", w.guest, "+refs/heads/*:refs/remotes/agentlab/*")
		return "y"
	}}
	if m, _, err := mergeSession(t.Context(), a, s, "", ""); err != nil || m.Commit != commit {
		t.Errorf("%+v, %v", m, err)
	}
	if _, err := os.Lstat(filepath.Join(w.user, ".envrc")); err == nil {
		t.Error("a file was merged that was not judged")
	}
}

// A merge of the user that is not finished is left alone.
func TestSyncDuringAMerge(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	w.begin(map[string]string{"f": "1\n"})
	worktest.Git(t, w.user, "checkout", "-q", "-b", "mine")
	worktest.Put(t, w.user, map[string]string{"f": "2\n"})
	worktest.Git(t, w.user, "commit", "-q", "-a", "-m", "2")
	worktest.Git(t, w.user, "checkout", "-q", "trunk")
	worktest.Git(t, w.user, "commit", "-q", "--allow-empty", "-m", "3")
	worktest.Git(t, w.user, "merge", "-q", "--no-commit", "--no-ff", "mine")
	w.commit(map[string]string{"other": "1"})
	if _, err := w.sync(""); agentlab.CodeOf(err) != agentlab.CodeConflict || strings.Contains(agentlab.HintOf(err), "abort") || !strings.Contains(agentlab.HintOf(err), "git merge --continue") {
		t.Errorf("%v (%s)", err, agentlab.HintOf(err))
	}
}

// Many harmless files do not hide another one in the table.
func TestTableHasEachReason(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	files := map[string]string{".vscode/tasks.json": "x"}
	for i := range 50 {
		files[".agents/note"+string(rune('A'+i))] = "x"
	}
	w.commit(files)
	s := w.fetched()
	j, err := gitsafe.JudgeCommit(t.Context(), w.user, w.user, true, "HEAD", s.Link.Ref("trunk"))
	if err != nil {
		t.Fatal(err)
	}
	gitsafe.ListReturned(w.app, j.Found, "title")
	if text := w.notes.String(); !strings.Contains(text, ".vscode/tasks.json") || strings.Count(text, "\n") > 12 {
		t.Errorf("the table is\n%s", text)
	}
}

// A repository at a path with a colon.
func TestSyncBelowAColon(t *testing.T) {
	w := newSessionWorld(t)
	moved := filepath.Join(t.TempDir(), "a:b")
	if err := os.Rename(w.user, moved); err != nil {
		t.Fatal(err)
	}
	w.user = moved
	worktest.Git(t, w.guest, "config", "remote.origin.url", moved)
	w.commit(map[string]string{"new": "1"})
	if m, err := w.sync(""); err != nil || m == nil {
		t.Errorf("%+v, %v", m, err)
	}
}
