package session

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// Carried changes have only files that differ for the user: not the unencrypted form of
// files with a filter, and not local versions of files that git was told to ignore.
func TestCarriedChangesHaveNoSecrets(t *testing.T) {
	repo := worktest.Repo(t)
	worktest.Git(t, repo, "config", "filter.crypt.clean", "tr a-z b-za")
	worktest.Git(t, repo, "config", "filter.crypt.smudge", "tr b-za a-z")
	worktest.Git(t, repo, "config", "filter.crypt.required", "true")
	worktest.Put(t, repo, map[string]string{".gitattributes": "*.key filter=crypt\n", "some.key": "secret\n", "local.yml": "password: none\n", "file": "1\n", "gone": "1\n"})
	old := time.Now().Add(-time.Hour)
	for _, name := range []string{"some.key", "local.yml"} {
		if err := os.Chtimes(filepath.Join(repo, name), old, old); err != nil {
			t.Fatal(err)
		}
	}
	worktest.Git(t, repo, "add", "-A")
	worktest.Git(t, repo, "commit", "-q", "-m", "secrets")
	if got := worktest.Git(t, repo, "show", "HEAD:some.key"); got != "tfdsfu" {
		t.Fatalf("the filter does not work: %q", got)
	}
	worktest.Git(t, repo, "update-index", "--skip-worktree", "local.yml")
	worktest.Put(t, repo, map[string]string{"local.yml": "password: hunter2\n", "file": "2\n", "new dir/x": "x\n", "new.key": "secret\n"})
	worktest.Git(t, repo, "rm", "-q", "gone")
	before := worktest.Git(t, repo, "ls-files", "--stage", "-v")
	worktest.Git(t, repo, "init", "-q", "nested")
	worktest.Git(t, filepath.Join(repo, "nested"), "commit", "-q", "--allow-empty", "-m", "of its own")
	var notes strings.Builder
	app := worktest.UI{Out: &notes}
	commit, err := carriedChanges(t.Context(), app, &Link{Path: repo, Remote: remoteName}, StartOptions{WithChanges: true})
	if err != nil {
		t.Fatal(err)
	}
	if got := worktest.Git(t, repo, "diff", "--name-status", "--no-renames", "HEAD", commit); got != "M\tfile\nD\tgone\nA\tnew dir/x" {
		t.Errorf("carried:\n%s", got)
	}
	if !strings.Contains(notes.String(), "repositories of their own: nested/") {
		t.Errorf("notes: %s", &notes)
	}
	if after := worktest.Git(t, repo, "ls-files", "--stage", "-v"); after != before {
		t.Errorf("the index has changed:\n%s", after)
	}
}
