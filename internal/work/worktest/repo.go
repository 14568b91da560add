package worktest

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Put writes files below dir; an empty text removes one, "-> X" makes a link.
func Put(t *testing.T, dir string, texts map[string]string) {
	t.Helper()
	for _, name := range slices.Backward(slices.Sorted(maps.Keys(texts))) { // files before their directory
		p, text := filepath.Join(dir, name), texts[name]
		_ = os.Remove(p)
		target, isLink := strings.CutPrefix(text, "-> ")
		err := os.MkdirAll(filepath.Dir(p), 0o750)
		switch {
		case err != nil || text == "":
		case isLink:
			err = os.Symlink(target, p)
		default:
			err = os.WriteFile(p, []byte(text), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Git runs git as a user would, in a fixed environment.
func Git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_AUTHOR_NAME=T", "GIT_AUTHOR_EMAIL=t@example.com",
		"GIT_COMMITTER_NAME=T", "GIT_COMMITTER_EMAIL=t@example.com")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// Repo creates a repository with one commit on the branch trunk.
func Repo(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	Git(t, dir, "init", "-q", "-b", "trunk")
	if err := os.WriteFile(filepath.Join(dir, "a.txt"), []byte("one\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	Git(t, dir, "add", ".")
	Git(t, dir, "commit", "-q", "-m", "first")
	return dir
}

// Files returns the contents of the regular files below dir, by their paths.
func Files(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		p, err := os.ReadFile(path) //nolint:gosec // a directory of the test
		out[path] = string(p)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}
