package runner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// Limits on the uncommitted work that is sent.
const (
	maxChangedFile  = 64 << 20  // bytes of one file
	maxChangedBytes = 256 << 20 // bytes of all files
	maxChangedFiles = 50000
	maxChangedNames = 16 << 20 // bytes of all names
)

// uncommitted makes a commit, on top of the result, of what is in the work
// tree but not committed: changed and new files, without ignored ones. It
// reads the work tree with the twin's configuration and with an index of its
// own, so it runs no filter or hook and the agent's repository stays as it is.
func (t *twin) uncommitted(ctx context.Context, c *collected, jobID string) error {
	index := filepath.Join(t.path, "index-changes")
	env := append(t.env[:len(t.env):len(t.env)], "GIT_INDEX_FILE="+index)
	names, err := t.changedNames(ctx, env, index)
	if err != nil {
		return err
	}
	names, left := t.fitting(names)
	if len(left) > 0 {
		c.warn("%d uncommitted file(s) are not sent, because they cannot be read, are no files or are too large: %.200q", len(left), strings.Join(left[:min(3, len(left))], " "))
	}
	if len(names) > 0 { // else the index is as the work tree; each git takes long in an emulated guest
		in := strings.NewReader(strings.Join(names, "\x00"))
		if _, err := t.g.runInput(ctx, t.work, env, in, "update-index", "--add", "--remove", "-z", "--stdin"); err != nil {
			return err
		}
	}
	tree, err := t.g.run(ctx, t.work, env, "write-tree")
	if err != nil {
		return err
	}
	args, before := []string{"commit-tree", tree, "-m", "Uncommitted changes of " + jobID}, t.base
	if t.primary != "" {
		args, before = append(args, "-p", t.primary), t.primary
	}
	var files countNUL
	if err := t.g.stream(ctx, t.work, env, &files, "diff-tree", "-r", "-z", "--name-only", "--no-renames", before, tree); err != nil {
		return err
	}
	if c.Result.Uncommitted = files.n; files.n == 0 {
		return nil
	}
	if t.changes, err = t.g.run(ctx, t.work, env, args...); err != nil {
		return err
	}
	_, err = t.g.run(ctx, t.work, env, "update-ref", guestapi.RefChanges, t.changes)
	return err
}

// changedNames lists the files that differ between the index and the work
// tree, and the new ones. The index is a copy of the borrowed one, which holds
// what is staged; an index that git cannot read is made from the result.
func (t *twin) changedNames(ctx context.Context, env []string, index string) ([]string, error) {
	var names nameList
	list := func() error {
		names = nameList{left: maxChangedNames}
		for _, args := range [][]string{
			{"diff-files", "--name-only", "-z", "--ignore-submodules=all"},
			{"ls-files", "-z", "--others", "--exclude-standard"},
		} {
			if err := t.g.stream(ctx, t.work, env, &names, args...); err != nil {
				return err
			}
		}
		return nil
	}
	borrowed := filepath.Join(t.path, "index")
	if err := copyFile(borrowed, index); err == nil {
		err := list()
		if _, isGit := errors.AsType[*gitError](err); !isGit {
			return names.all(), err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err := os.Remove(index); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if t.primary != "" {
		if _, err := t.g.run(ctx, t.work, env, "read-tree", t.primary); err != nil {
			return nil, err
		}
	}
	err := list()
	return names.all(), err
}

// copyFile copies a file with its time, which tells git how fresh an index is.
func copyFile(from, to string) error {
	st, err := os.Stat(from)
	if err != nil {
		return err
	}
	p, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, p, 0o600)
	}
	return errors.Join(err, os.Chtimes(to, st.ModTime(), st.ModTime()))
}

// fitting keeps the names of files that are gone, and of files that can be
// read within the limits.
func (t *twin) fitting(names []string) (keep, left []string) {
	root, err := os.OpenRoot(t.work)
	if err != nil {
		return nil, names
	}
	defer func() { _ = root.Close() }()
	total, seen := int64(0), map[string]bool{}
	for _, name := range names {
		if seen[name] {
			continue
		}
		seen[name] = true
		size, err := readable(root, name)
		if err != nil || size > maxChangedFile || total+size > maxChangedBytes || len(keep) == maxChangedFiles {
			left = append(left, name)
			continue
		}
		total += size
		keep = append(keep, name)
	}
	return keep, left
}

// readable returns the size of a file or link; nothing at all is of size 0.
func readable(root *os.Root, name string) (int64, error) {
	if strings.HasSuffix(name, "/") {
		return 0, errors.New("another repository")
	}
	st, err := root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return 0, nil
	case err != nil:
		return 0, err
	case st.IsDir(): // in the place of a file
		return 0, nil
	case st.Mode()&fs.ModeSymlink != 0:
		return st.Size(), nil
	}
	f, err := openOutput(root, name)
	if err != nil {
		return 0, err
	}
	return st.Size(), f.Close()
}

// nameList collects names that end in NUL.
type nameList struct {
	buf  bytes.Buffer
	left int
}

func (n *nameList) Write(p []byte) (int, error) {
	if n.left -= len(p); n.left < 0 {
		return 0, fmt.Errorf("their names are more than %d bytes", maxChangedNames)
	}
	return n.buf.Write(p)
}

func (n *nameList) all() []string {
	s := strings.TrimSuffix(n.buf.String(), "\x00")
	if s == "" {
		return nil
	}
	return strings.Split(s, "\x00")
}

// countNUL counts what ends in NUL.
type countNUL struct{ n int }

func (c *countNUL) Write(p []byte) (int, error) {
	c.n += bytes.Count(p, []byte{0})
	return len(p), nil
}
