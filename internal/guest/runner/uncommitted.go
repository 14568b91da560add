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
	"syscall"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// Limits on the uncommitted work that is sent.
const (
	maxChangedFile  = 64 << 20  // bytes of one file
	maxChangedBytes = 256 << 20 // bytes of all files
	maxChangedFiles = 50000
	maxStatus       = 64 << 20 // bytes of output of git status: the names, and at least 113 for each
)

// commitChanges makes the commit t.changes, on top of the result, of the
// uncommitted changes: changed and new files, without ignored ones.
// It returns how many files differ, and which could not be taken. It reads the
// work tree with the scratch repository's configuration and index, so it runs no filter or
// hook and the agent's repository stays as it is.
//
// The index is the agent's. If git cannot read it, or if it has a conflict
// that the work tree does not resolve, it is replaced by an index of the
// result.
func (t *scratchRepo) commitChanges(ctx context.Context, of string) (files int, left []string, err error) {
	files, left, err = t.commitIndex(ctx, of)
	if _, isGit := errors.AsType[*gitError](err); !isGit {
		return files, left, err
	}
	if err := t.newIndex(ctx); err != nil {
		return 0, left, err
	}
	return t.commitIndex(ctx, of)
}

// newIndex replaces the index by one of the result.
func (t *scratchRepo) newIndex(ctx context.Context) error {
	if err := os.Remove(filepath.Join(t.path, "index")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if t.primary == "" {
		return nil
	}
	_, err := t.g.run(ctx, t.work, t.env, "read-tree", t.primary)
	return err
}

// commitIndex is commitChanges with the existing index. It runs as few git
// processes as possible: each takes long in an emulated guest.
func (t *scratchRepo) commitIndex(ctx context.Context, of string) (files int, left []string, err error) {
	st, err := t.status(ctx)
	if err != nil {
		return 0, nil, err
	}
	changed, err := t.withoutLFS(ctx, st.changed)
	if err != nil {
		return 0, nil, err
	}
	changed, left = t.selectFiles(changed)
	if len(changed) == 0 && len(st.gone) == 0 && !st.staged {
		return 0, left, nil
	}
	// Removed files first: a link or file may be where their folder was.
	if err := t.updateIndex(ctx, st.gone, "--force-remove"); err != nil {
		return 0, left, err
	}
	if err := t.updateIndex(ctx, changed, "--add", "--remove", "--replace"); err != nil {
		return 0, left, err
	}
	tree, err := t.g.run(ctx, t.work, t.env, "write-tree")
	if err != nil {
		return 0, left, err
	}
	args, before := []string{"commit-tree", tree, "-m", "Uncommitted changes of " + of}, t.base
	if t.primary != "" {
		args, before = append(args, "-p", t.primary), t.primary
	}
	var count countNUL
	err = t.g.stream(ctx, t.work, t.env, &count, "diff-tree", "-r", "-z", "--name-only", "--no-renames", before, tree)
	if err != nil || count.n == 0 {
		return 0, left, err
	}
	changes, err := t.g.run(ctx, t.work, t.env, args...)
	if err != nil {
		return 0, left, err
	}
	ref := filepath.Join(t.path, guestapi.RefChanges)
	if err := errors.Join(os.MkdirAll(filepath.Dir(ref), 0o700), os.WriteFile(ref, []byte(changes+"\n"), 0o600)); err != nil {
		return 0, left, err
	}
	t.changes, t.tree = changes, tree
	return count.n, left, nil
}

// updateIndex runs git update-index for names, if there are any.
func (t *scratchRepo) updateIndex(ctx context.Context, names []string, options ...string) error {
	if len(names) == 0 {
		return nil
	}
	args := append(append([]string{"update-index"}, options...), "-z", "--stdin")
	_, err := t.g.runInput(ctx, t.work, t.env, strings.NewReader(strings.Join(names, "\x00")), args...)
	return err
}

// status is what git status reports.
type status struct {
	staged  bool     // the index differs from the result
	changed []string // files that differ between the index and the work tree, and new ones
	gone    []string // files in the index that are not in the work tree
}

// status compares the result, the index and the work tree.
func (t *scratchRepo) status(ctx context.Context) (status, error) {
	out := nameList{left: maxStatus}
	// "dirty" checks only the commit of a submodule: to check its work tree,
	// git would use the submodule's own configuration.
	err := t.g.stream(ctx, t.work, t.env, &out, "status", "--porcelain=v2", "-z", "--untracked-files=all", "--no-renames", "--ignore-submodules=dirty")
	if err != nil {
		return status{}, err
	}
	return parseStatus(out.all())
}

// parseStatus reads entries of git-status(1), "Porcelain Format Version 2",
// without renames.
func parseStatus(entries []string) (st status, err error) {
	for _, e := range entries {
		// Each kind has a fixed number of fields before the path, which may
		// contain spaces.
		fields := map[string]int{"1": 8, "u": 10, "?": 1}[e[:min(1, len(e))]]
		f := strings.SplitN(e, " ", fields+1)
		switch {
		case fields == 0 || len(f) <= fields || len(f) > 2 && (len(f[1]) != 2 || f[2] == ""):
			return status{}, fmt.Errorf("git status says %.100q", e)
		case f[0] == "?":
			st.changed = append(st.changed, f[1])
			continue
		}
		st.staged = st.staged || f[1][0] != '.'
		switch {
		case f[2][0] == 'S': // for a submodule, only staged changes count
		case f[0] == "1" && f[1][1] == 'D':
			st.gone = append(st.gone, f[fields])
		case f[1][1] != '.':
			st.changed = append(st.changed, f[fields])
		}
	}
	return st, nil
}

// selectFiles returns the names of removed files, and of files that can be
// read within the limits.
func (t *scratchRepo) selectFiles(names []string) (keep, left []string) {
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
		tooMuch := size > maxChangedFile || total+size > maxChangedBytes || len(keep) == maxChangedFiles
		if err != nil || tooMuch && !t.local {
			left = append(left, name)
			continue
		}
		total += size
		keep = append(keep, name)
	}
	return keep, left
}

// readable returns the size of a file or link; a missing one has size 0.
func readable(root *os.Root, name string) (int64, error) {
	if strings.HasSuffix(name, "/") {
		return 0, errors.New("another repository")
	}
	st, err := root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return 0, nil
	case err != nil:
		return 0, err
	case st.IsDir(): // instead of a file
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
		return 0, fmt.Errorf("git status prints more than %d bytes", maxStatus)
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

// countNUL counts names that end in NUL.
type countNUL struct{ n int }

func (c *countNUL) Write(p []byte) (int, error) {
	c.n += bytes.Count(p, []byte{0})
	return len(p), nil
}
