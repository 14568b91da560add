package gitsafe

import (
	"crypto/rand"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// KilledAge is how old a directory of a killed process is when another one removes it.
// A younger one may not be locked yet.
const KilledAge = time.Minute

// tempPatterns are the names of the directories of TempDir in the temporary folder.
var tempPatterns = []string{"agentlab-sync-*", "agentlab-push-*", "agentlab-fetch-*", "agentlab-bundle-*", "agentlab-changes-*", "agentlab-ignore-*"}

// TempDir creates a private directory in the temporary folder, with the name of one of
// tempPatterns, and removes all that killed processes have left there.
func TempDir(pattern string) (dir string, remove func(), err error) {
	for _, p := range tempPatterns {
		RemoveKilled(os.TempDir(), p)
	}
	return LockedDir(os.TempDir(), pattern)
}

// LockedDir creates a private directory that RemoveKilled does not remove while this
// process runs.
func LockedDir(parent, pattern string) (dir string, remove func(), err error) {
	dir, err = os.MkdirTemp(parent, pattern) // mode 0700
	if err != nil {
		return "", nil, err
	}
	held, err := lockDir(dir)
	if err != nil {
		_ = os.Remove(dir)
		return "", nil, err
	}
	return dir, func() {
		_ = os.RemoveAll(dir)
		_ = held.Close()
	}, nil
}

// stagePrefix begins the names of directories beside the destination of a copy.
const stagePrefix = ".agentlab-cp-"

// StageDir creates a directory in the destination of a copy, as LockedDir does, and
// removes those that killed processes have left there.
func StageDir(parent *os.Root) (name string, remove func(), err error) {
	RemoveKilled(parent.Name(), stagePrefix+"*")
	name = stagePrefix + rand.Text()
	if err := parent.Mkdir(name, 0o700); err != nil {
		return "", nil, work.LocalFault(parent.Name(), err)
	}
	held, err := lockDir(filepath.Join(parent.Name(), name))
	if err != nil {
		_ = parent.Remove(name)
		return "", nil, work.LocalFault(parent.Name(), err)
	}
	return name, func() {
		_ = parent.RemoveAll(name)
		_ = held.Close()
	}, nil
}

// lockDir opens a directory and locks it until the result is closed.
func lockDir(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	ok, err := lock.TryFile(f)
	if err == nil && !ok {
		err = agentlab.Errorf(agentlab.CodeBusy, "%s is in use", path)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// RemoveKilled removes the directories of LockedDir whose process does not run. It leaves
// those of other users.
func RemoveKilled(parent, pattern string) {
	entries, _ := os.ReadDir(parent)
	for _, e := range entries {
		if match, err := filepath.Match(pattern, e.Name()); err != nil || !match || !e.IsDir() {
			continue
		}
		fi, err := e.Info()
		if err != nil || time.Since(fi.ModTime()) < KilledAge {
			continue
		}
		if sys, ok := fi.Sys().(*syscall.Stat_t); !ok || int(sys.Uid) != os.Geteuid() {
			continue
		}
		path := filepath.Join(parent, e.Name())
		if f, err := lockDir(path); err == nil {
			_ = os.RemoveAll(path) // the next one tries again
			_ = f.Close()
		}
	}
}
