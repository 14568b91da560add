package runner

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"

	"github.com/agentlab-vm/agentlab"
)

// gitDir reads and writes the few files of a .git directory that describe its
// state, without running git: that is quick, and nothing in the directory can
// make it run a program. It does not follow links out of the directory.
type gitDir struct{ root *os.Root }

var errReftable = errors.New("the repository stores its branches in an unsupported format (reftable)")

// isCommit reports whether s is a full object name.
func isCommit(s string) bool { return (len(s) == 40 || len(s) == 64) && agentlab.IsHex(s, 40) }

const (
	maxRefFile    = 1 << 10
	maxPackedRefs = 64 << 20
	maxRefs       = 20000
)

func openGitDir(worktree string) (*gitDir, error) {
	work, err := os.OpenRoot(worktree)
	if err != nil {
		return nil, err
	}
	defer func() { _ = work.Close() }()
	st, err := work.Lstat(".git")
	if err != nil {
		return nil, err
	}
	if !st.IsDir() {
		return nil, errors.New(".git is not a directory")
	}
	root, err := work.OpenRoot(".git")
	if err != nil {
		return nil, err
	}
	if _, err := root.Lstat("reftable"); err == nil {
		_ = root.Close()
		return nil, errReftable
	}
	return &gitDir{root}, nil
}

func (g *gitDir) close() { _ = g.root.Close() }

// readSmall reads a regular file of at most limit bytes.
func readSmall(root *os.Root, name string, limit int64) ([]byte, error) {
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a file", name)
	}
	p, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(p)) > limit {
		err = fmt.Errorf("%s is too large", name)
	}
	return p, err
}

// head returns the branch of HEAD ("" if it is detached) and the commit ("" if
// there is none yet).
func (g *gitDir) head() (branch, commit string, err error) {
	p, err := readSmall(g.root, "HEAD", maxRefFile)
	if err != nil {
		return "", "", err
	}
	s := strings.TrimSpace(string(p))
	target, symbolic := strings.CutPrefix(s, "ref: ")
	if !symbolic {
		if !isCommit(s) {
			return "", "", errors.New("HEAD is damaged")
		}
		return "", s, nil
	}
	branch, ok := strings.CutPrefix(target, "refs/heads/")
	if !ok || !validBranch(branch) {
		return "", "", errors.New("HEAD is not a branch")
	}
	heads, err := g.heads()
	return branch, heads[branch], err
}

func validBranch(name string) bool { return name != "" && agentlab.ValidateRef(name) == nil }

// heads returns the branches with their commits. Branches with names or
// content that git would not accept are omitted.
//
// Git may pack the branches at the same time: it writes packed-refs before it
// removes their own files, so these are read first.
func (g *gitDir) heads() (map[string]string, error) {
	out := map[string]string{}
	n := 0
	err := fs.WalkDir(g.root.FS(), "refs/heads", func(p string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		}
		if n++; n > maxRefs {
			return errors.New("there are too many branches")
		}
		name := strings.TrimPrefix(p, "refs/heads/")
		content, err := readSmall(g.root, p, maxRefFile)
		if commit := strings.TrimSpace(string(content)); err == nil && validBranch(name) && isCommit(commit) {
			out[name] = commit
		}
		return nil
	})
	if err == nil {
		err = g.packed(out)
	}
	return out, err
}

// packed adds the branches in packed-refs that are not in out.
func (g *gitDir) packed(out map[string]string) error {
	return g.eachPacked(func(ref, commit string) {
		if name, ok := strings.CutPrefix(ref, "refs/heads/"); ok && out[name] == "" && validBranch(name) {
			out[name] = commit
		}
	})
}

// eachPacked calls fn for each ref in packed-refs.
func (g *gitDir) eachPacked(fn func(ref, commit string)) error {
	p, err := readSmall(g.root, "packed-refs", maxPackedRefs)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	sc := bufio.NewScanner(strings.NewReader(string(p)))
	for sc.Scan() {
		if commit, ref, _ := strings.Cut(sc.Text(), " "); isCommit(commit) {
			fn(ref, commit)
		}
	}
	return sc.Err()
}

// stash returns the commit of the newest stashed changes; "" if there are none.
func (g *gitDir) stash() (commit string, err error) {
	const name = "refs/stash"
	p, err := readSmall(g.root, name, maxRefFile)
	if loose := strings.TrimSpace(string(p)); err == nil && isCommit(loose) {
		return loose, nil
	}
	err = g.eachPacked(func(ref, id string) {
		if ref == name {
			commit = id
		}
	})
	return commit, err
}

// branchOff makes branch at commit and HEAD point to it. Index and work tree
// stay, so commit must be the checked out one; "" is for a repository without
// commits.
func (g *gitDir) branchOff(branch, commit string) error {
	if commit != "" {
		name := "refs/heads/" + branch
		if err := g.root.MkdirAll(path.Dir(name), 0o755); err != nil {
			return err
		}
		if err := g.write(name, commit+"\n"); err != nil {
			return err
		}
	}
	return g.write("HEAD", "ref: refs/heads/"+branch+"\n")
}

func (g *gitDir) write(name, content string) error {
	tmp := name + ".lock" // git's own convention
	if err := g.root.WriteFile(tmp, []byte(content), 0o644); err != nil {
		return err
	}
	return g.root.Rename(tmp, name)
}

// dropRemote removes the remote and what refers to it from the configuration
// of a repository that was cloned from a file that no longer exists.
func (g *gitDir) dropRemote() error {
	p, err := readSmall(g.root, "config", 1<<20)
	if err != nil {
		return err
	}
	var out strings.Builder
	keep := true
	for line := range strings.Lines(string(p)) {
		if strings.HasPrefix(line, "[") {
			keep = !strings.HasPrefix(line, "[remote ") && !strings.HasPrefix(line, "[branch ")
		}
		if keep {
			out.WriteString(line)
		}
	}
	return g.write("config", out.String())
}
