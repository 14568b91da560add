package repocmd

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// removeStaleLocks removes the locks of git that are older than the boot of this machine:
// the git that made them ended with a crash, and with them every other one would refuse to
// work.
func (r repo) removeStaleLocks() error {
	booted, err := bootTime()
	if err != nil {
		return err
	}
	return removeLocks(filepath.Join(r.dir, ".git"), booted)
}

// removeLocks removes the locks in a git directory that were changed before a time.
func removeLocks(dir string, before time.Time) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	err = fs.WalkDir(root.FS(), ".", func(at string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && (e.Name() == "objects" || e.Name() == "lfs"):
			return filepath.SkipDir
		case !e.Type().IsRegular() || !strings.HasSuffix(e.Name(), ".lock"):
			return nil
		}
		info, err := e.Info()
		if err != nil || !info.ModTime().Before(before) {
			return err
		}
		return root.Remove(at)
	})
	if errors.Is(err, fs.ErrNotExist) { // a git that runs has removed something
		return nil
	}
	return err
}

// bootTime returns when this machine was booted, by its present clock; see proc(5).
func bootTime() (time.Time, error) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return time.Time{}, err
	}
	for line := range bytes.Lines(stat) {
		if text, ok := bytes.CutPrefix(line, []byte("btime ")); ok {
			seconds, err := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64)
			return time.Unix(seconds, 0), err
		}
	}
	return time.Time{}, errors.New("/proc/stat has no time of the boot")
}
