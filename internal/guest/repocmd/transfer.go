package repocmd

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// pack writes a bundle of branches to out, without what the receiver has.
func (r repo) pack(p guestapi.RepoPack, out io.Writer) error {
	have, err := r.existing(p.Have)
	if err != nil {
		return err
	}
	var refs []string
	for _, branch := range p.Branches {
		if err := agentlab.ValidateRef(branch); err != nil {
			return err
		}
		refs = append(refs, "refs/heads/"+branch)
	}
	if p.Changes {
		made, err := r.changes(p.Dir)
		if err != nil {
			return err
		}
		if made {
			refs = append(refs, guestapi.RefChanges)
		}
	}
	var revs strings.Builder
	for _, id := range have {
		revs.WriteString("^" + id + "\n")
	}
	if len(refs) == 0 {
		return nil
	}
	// A bundle without commits is an error for git.
	n, err := r.runGit(command{in: strings.NewReader(strings.Join(refs, "\n") + "\n" + revs.String())}, "rev-list", "--count", "--stdin")
	if err != nil || n == "0" {
		return err
	}
	args := append([]string{"bundle", "create", "--quiet", "-"}, refs...)
	_, err = r.runGit(command{in: strings.NewReader(revs.String()), out: out}, append(args, "--stdin")...)
	return err
}

// existing returns the commits that the repository has.
func (r repo) existing(ids []string) (have []string, err error) {
	out, err := r.runGit(command{in: strings.NewReader(strings.Join(ids, "\n") + "\n")}, "cat-file", "--batch-check=%(objectname) %(objecttype)")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(out) {
		if id, ok := strings.CutSuffix(strings.TrimSuffix(line, "\n"), " commit"); ok {
			have = append(have, id)
		}
	}
	return have, nil
}

// changes commits the uncommitted changes of a work tree to guestapi.RefChanges,
// with a copy of its index. made is false if there are none.
func (r repo) changes(dir string) (made bool, err error) {
	if dir != "" && !filepath.IsLocal(dir) {
		return false, fmt.Errorf("%q is not in the repository", dir)
	}
	c := command{dir: filepath.Join(r.dir, dir)}
	gitDir, err := r.runGit(c, "rev-parse", "--absolute-git-dir")
	if err != nil {
		return false, err
	}
	tmp, err := os.MkdirTemp(gitDir, "agentlab-")
	if err != nil {
		return false, err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	index := filepath.Join(tmp, "index")
	if err := copyIndex(filepath.Join(gitDir, "index"), index); err != nil {
		return false, err
	}
	c.env = []string{"GIT_INDEX_FILE=" + index}
	add := []string{"add", "--all"}
	if sparse, err := r.runGit(c, "config", "--type=bool", "core.sparseCheckout"); err == nil && sparse == "true" {
		add = append(add, "--sparse") // also files that the agent has not checked out
	}
	if _, err := r.runGit(c, append(add, "--", ".")...); err != nil {
		return false, err
	}
	tree, err := r.runGit(c, "write-tree")
	if err != nil {
		return false, err
	}
	commit := []string{"commit-tree", tree, "-m", "Uncommitted changes"}
	if head, err := r.runGit(c, "rev-parse", "--verify", "--quiet", "HEAD^{commit}"); err == nil {
		if base, err := r.runGit(c, "rev-parse", head+"^{tree}"); err != nil || base == tree {
			return false, err
		}
		commit = append(commit, "-p", head)
	}
	c.env = append(c.env, "GIT_AUTHOR_NAME=AgentLab", "GIT_AUTHOR_EMAIL=agent@localhost", "GIT_COMMITTER_NAME=AgentLab", "GIT_COMMITTER_EMAIL=agent@localhost")
	id, err := r.runGit(c, commit...)
	if err != nil {
		return false, err
	}
	_, err = r.git("update-ref", guestapi.RefChanges, id)
	return err == nil, err
}

// copyIndex copies an index of git, which can be missing: the times in it save git from
// reading unchanged files. The copy has the time of the index: git compares it with that
// of files to find those that were changed right after the index.
func copyIndex(from, to string) error {
	st, err := os.Stat(from)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := os.WriteFile(to, text, 0o600); err != nil {
		return err
	}
	return os.Chtimes(to, st.ModTime(), st.ModTime())
}

// maxReceive limits the first line of the input of receive, in bytes.
const maxReceive = 8 << 20

// receive stores the commits of a bundle and sets branches to them.
func (r repo) receive(in io.Reader) (guestapi.RepoReceived, error) {
	got := guestapi.RepoReceived{Errors: map[string]string{}}
	input := bufio.NewReader(in)
	line, err := input.ReadBytes('\n')
	if err != nil || len(line) > maxReceive {
		return got, errors.New("the input is not valid: its first line is incomplete")
	}
	var p guestapi.RepoReceive
	if err := json.Unmarshal(line, &p); err != nil {
		return got, fmt.Errorf("the input is not valid: %w", err)
	}
	if err := r.unbundle(input); err != nil {
		return got, err
	}
	for _, u := range p.Updates {
		if err := r.update(u); err != nil {
			got.Errors[u.Branch] = err.Error()
		}
	}
	if p.Checkout != "" && len(got.Errors) == 0 {
		if err := r.checkout(p.Checkout); err != nil {
			return got, err
		}
	}
	if err := r.checkOutAllModules(); err != nil { // the rest works without them
		got.Modules = err.Error()
	}
	if p.Changes != "" {
		if err := r.apply(p.Dir, p.Changes); err != nil {
			return got, err
		}
	}
	return got, r.sync()
}

// unbundle stores the objects of a bundle, if there is one.
func (r repo) unbundle(in *bufio.Reader) error {
	if _, err := in.Peek(1); errors.Is(err, io.EOF) {
		return nil
	}
	f, err := os.CreateTemp(filepath.Join(r.dir, ".git"), "agentlab-bundle-")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = io.Copy(f, in)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	refs, err := r.git("bundle", "unbundle", f.Name())
	if err != nil {
		return err
	}
	var update strings.Builder
	for line := range strings.Lines(refs) {
		commit, ref, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if ref == guestapi.RefModules+commit {
			fmt.Fprintf(&update, "update %s %s\n", ref, commit)
		}
	}
	_, err = r.runGit(command{in: strings.NewReader(update.String())}, "update-ref", "--stdin")
	return err
}

// update sets a branch as a push does: it refuses to lose commits without force, and
// updates the work tree of the branch if that has no uncommitted changes.
func (r repo) update(u guestapi.RepoUpdate) error {
	if err := agentlab.ValidateRef(u.Branch); err != nil {
		return err
	}
	spec := u.Commit + ":refs/heads/" + u.Branch
	if u.Force {
		spec = "+" + spec
	}
	env, err := r.plain()
	if err != nil {
		return err
	}
	// For the other side of a push, git removes the number of settings from the environment.
	out, err := r.git("push", "--porcelain", "--no-verify", "--receive-pack="+env[len(env)-1]+" git receive-pack", ".", spec)
	if err == nil {
		return nil
	}
	for line := range strings.Lines(out) {
		if f := strings.Split(strings.TrimSpace(line), "\t"); len(f) == 3 && f[0] == "!" {
			text := strings.Trim(strings.TrimPrefix(strings.TrimPrefix(f[2], "[rejected] "), "[remote rejected] "), "()")
			if strings.HasPrefix(text, "Working directory has ") { // unstaged or staged changes
				text = "its work tree has uncommitted changes"
			}
			return errors.New(text)
		}
	}
	return err
}

// checkout checks out a branch in the main work tree, unless that has uncommitted changes
// or another work tree has the branch.
func (r repo) checkout(branch string) error {
	if err := agentlab.ValidateRef(branch); err != nil {
		return err
	}
	st, err := r.state()
	if err != nil {
		return err
	}
	for i, w := range st.Worktrees {
		if w.Branch == branch || i == 0 && w.Uncommitted > 0 {
			return nil
		}
	}
	_, err = r.git("checkout", "--quiet", branch, "--")
	return err
}

// apply applies the changes of a commit to a work tree.
func (r repo) apply(dir, commit string) error {
	if dir != "" && !filepath.IsLocal(dir) {
		return fmt.Errorf("%q is not in the repository", dir)
	}
	c := command{dir: filepath.Join(r.dir, dir)}
	var patch bytes.Buffer
	c.out = &patch
	if _, err := r.runGit(c, "diff-tree", "-p", "--binary", "--full-index", commit+"^1", commit); err != nil {
		return err
	}
	if patch.Len() == 0 {
		return nil
	}
	c.in, c.out = bytes.NewReader(patch.Bytes()), nil
	if _, err := r.runGit(c, "apply", "--check", "--reverse", "-"); err == nil {
		return nil // an earlier call has applied them
	}
	c.in = &patch
	if _, err := r.runGit(c, "apply", "--whitespace=nowarn", "-"); err != nil {
		return fmt.Errorf("the uncommitted changes do not apply: %w", err)
	}
	return nil
}
