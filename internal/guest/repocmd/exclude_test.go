package repocmd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// Files that the host sends are no work of the agent, whatever their names, and no other
// file is hidden by them.
func TestSentFilesAreNoWork(t *testing.T) {
	l := newLab(t)
	l.ok(guestapi.RepoInit{Branch: "main"}, "init")
	commit(t, l.dir, "a.txt", "1")
	git(t, l.dir, "worktree", "add", "-q", "-b", "fix", filepath.Join(l.dir, guestapi.WorktreesDir, "fix"))
	agents := "mine\n\n# a comment of the agent\n"
	exclude := filepath.Join(l.dir, ".git", "info", "exclude")
	text, err := os.ReadFile(exclude)
	if err != nil {
		t.Fatal(err)
	}
	write(t, exclude, string(text)+agents+"ours")
	sent := []string{".env", "#.env", "!.env", "a*/.env", "b[x]?/.env.local", `c\d/.env`, " e /.env ", "f/.env.local\t", "\u00e9/.env"}
	others := []string{"sub/.env", "ab/.env", "bxy/.env.local", "#x", "f/.env.local"}
	for _, top := range []string{l.dir, filepath.Join(l.dir, guestapi.WorktreesDir, "fix")} {
		for _, name := range append(append([]string{}, sent...), others...) {
			write(t, filepath.Join(top, name), "x")
		}
	}
	counts := func(want int) {
		t.Helper()
		st := l.stateNow()
		for _, w := range st.Worktrees {
			// With every file listed: state counts an untracked directory as one.
			status := git(t, filepath.Join(l.dir, w.Dir), "status", "--porcelain", "--untracked-files=all")
			if n := len(strings.Split(status, "\n")); n != want {
				t.Errorf("%q has %d files of work, want %d:\n%s", w.Dir, n, want, status)
			}
		}
		if text, err := os.ReadFile(exclude); err != nil || !strings.Contains(string(text)+"\n", agents+"ours\n") {
			t.Errorf("the lines of the agent: %q, %v", text, err)
		}
	}
	counts(len(sent) + len(others))
	l.ok(guestapi.RepoInit{Branch: "main", Exclude: append(sent, "two\nlines/.env")}, "init")
	counts(len(others))
	before, err := os.ReadFile(exclude)
	if err != nil {
		t.Fatal(err)
	}
	l.ok(guestapi.RepoInit{Branch: "main", Exclude: append(sent, "two\nlines/.env")}, "init")
	l.ok(guestapi.RepoInit{Branch: "main"}, "init")
	if after, err := os.ReadFile(exclude); err != nil || string(after) != string(before) {
		t.Errorf("it is %q, was %q, %v", after, before, err)
	}
	l.ok(guestapi.RepoInit{Branch: "main", Exclude: sent[1:]}, "init")
	counts(len(others) + 1)
	l.ok(guestapi.RepoInit{Branch: "main", Exclude: []string{}}, "init")
	counts(len(sent) + len(others))
}
