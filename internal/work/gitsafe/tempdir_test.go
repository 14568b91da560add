package gitsafe

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The next command removes what killed ones have left, and nothing that is used.
func TestTempDirRemovesWhatKilledCommandsLeft(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	used, remove, err := TempDir("agentlab-sync-*")
	if err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-2 * KilledAge)
	if err := os.Chtimes(used, old, old); err != nil {
		t.Fatal(err)
	}
	target := t.TempDir()
	left := map[string]bool{used: true, target: true}
	for name, stays := range map[string]bool{"agentlab-sync-1": false, "agentlab-bundle-2": false, "agentlab-other-3": true, "agentlab-sync-new": true} {
		dir := filepath.Join(tmp, name)
		if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "guest.bundle"), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		if !strings.HasSuffix(name, "new") {
			if err := os.Chtimes(dir, old, old); err != nil {
				t.Fatal(err)
			}
		}
		left[dir] = stays
	}
	if err := os.Symlink(target, filepath.Join(tmp, "agentlab-sync-link")); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		dir := filepath.Join(tmp, "agentlab-sync-of-another-user")
		if err := errors.Join(os.Mkdir(dir, 0o700), os.Chtimes(dir, old, old), os.Lchown(dir, 12345, 12345)); err != nil {
			t.Fatal(err)
		}
		left[dir] = true
	}
	_, removeOther, err := TempDir("agentlab-push-*")
	if err != nil {
		t.Fatal(err)
	}
	removeOther()
	for name, want := range left {
		if _, err := os.Stat(name); (err == nil) != want {
			t.Errorf("%s: %v, want it left: %t", name, err, want)
		}
	}
	remove()
	if _, err := os.Stat(used); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// A copy removes what a killed one has left beside the same destination, whose name is
// not a pattern.
func TestStageDirRemovesWhatKilledCopiesLeft(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a[b]*")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	parent, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer parent.Close()
	used, remove, err := StageDir(parent)
	if err != nil {
		t.Fatal(err)
	}
	defer remove()
	old := time.Now().Add(-2 * KilledAge)
	for _, name := range []string{stagePrefix + "killed", "mine"} {
		if err := errors.Join(parent.MkdirAll(name+"/top", 0o700), parent.Chtimes(name, old, old)); err != nil {
			t.Fatal(err)
		}
	}
	if err := parent.Chtimes(used, old, old); err != nil {
		t.Fatal(err)
	}
	_, removeOther, err := StageDir(parent)
	if err != nil {
		t.Fatal(err)
	}
	removeOther()
	for name, want := range map[string]bool{used: true, "mine": true, stagePrefix + "killed": false} {
		if _, err := parent.Stat(name); (err == nil) != want {
			t.Errorf("%s: %v, want it left: %t", name, err, want)
		}
	}
}
