package repocmd

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// After a crash of the machine no lock of git is left, and after that of a program all are.
func TestStaleLocks(t *testing.T) {
	l := newLab(t)
	booted, err := bootTime()
	if err != nil {
		t.Fatal(err)
	}
	names := []string{"HEAD.lock", "refs/heads/main.lock", "worktrees/w/index.lock", "refs/heads/clock", "objects/x.lock"}
	for _, name := range names {
		write(t, filepath.Join(l.dir, ".git", name), "x")
	}
	left := func() (all []string) {
		for _, name := range names {
			if _, err := os.Lstat(filepath.Join(l.dir, ".git", name)); err == nil {
				all = append(all, name)
			}
		}
		return all
	}
	if err := l.removeStaleLocks(); err != nil || len(left()) != len(names) {
		t.Errorf("of this boot: %v, %v", left(), err)
	}
	for _, name := range names {
		if err := os.Chtimes(filepath.Join(l.dir, ".git", name), time.Time{}, booted.Add(-time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.removeStaleLocks(); err != nil || len(left()) != 2 {
		t.Errorf("of an earlier boot: %v, %v", left(), err)
	}
}
