package runner

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
)

// update updates the checkout of an earlier job to what the job asks for. The new git
// directory is made in tmp and takes the place of the old one in one step, with a
// HEAD and an index for the work tree as it is. Then git switches to the base. It
// removes and overwrites only files that a commit has. A killed update is repeated.
func (r *Runner) update(ctx context.Context, rp repo, tmp string) (repo, error) {
	old, err := r.openOld(ctx, rp.Path, filepath.Join(tmp, "old"))
	if err != nil {
		return rp, fmt.Errorf("the checkout of an earlier job at %s cannot be updated: %w", rp.Path, err)
	}
	overwrite := "--no-overwrite-ignore"
	if r.job.Reuse { // its branches are no work, and its ignored files are those of setup
		old.heads, old.save, overwrite = nil, false, "--overwrite-ignore"
	}
	c := &cloner{r: r, path: filepath.Join(tmp, "repo"), borrow: old.path}
	modules, err := c.clone(ctx)
	if err != nil {
		return rp, err
	}
	g, err := openGitDir(c.path)
	if err != nil {
		return rp, err
	}
	defer g.close()
	if err := r.fillGitDir(ctx, g, &rp, c.path, old); err != nil {
		return rp, err
	}
	if r.job.Reuse {
		if err := r.keepGitFiles(ctx, filepath.Join(rp.Path, ".git"), filepath.Join(c.path, ".git")); err != nil {
			return rp, err
		}
	}
	if err := keepLFS(rp.Path, c.path); err != nil {
		return rp, err
	}
	if err := exchange(filepath.Join(c.path, ".git"), filepath.Join(rp.Path, ".git")); err != nil {
		return rp, err
	}
	if rp.Base != "" {
		_, err = r.git.run(ctx, rp.Path, r.git.environ(noLFS...), "checkout", "--quiet", overwrite, "--no-track", "-B", rp.Branch, rp.Base, "--")
		if err != nil {
			return rp, fmt.Errorf("the checkout of an earlier job at %s cannot be updated: %w", rp.Path, err)
		}
	}
	if err := r.placeLFS(ctx, rp.Path); err != nil {
		return rp, err
	}
	rp.Modules, err = r.checkoutModules(ctx, rp.Path, modules, func(at string) error { return r.moveAside(rp.Path, at) })
	return rp, err
}

// oldCheckout is the checkout of an earlier job: a git directory that borrows its
// objects, and whose index has the state of its work tree.
type oldCheckout struct {
	*scratchRepo
	heads   map[string]string
	shallow string // the file of that name
	at      string // commit of the work tree; "" if there is none
	save    bool   // no branch has that commit
}

// openOld reads the checkout of an earlier job and commits its uncommitted changes. It
// fails if a tracked file has changes that git cannot read.
func (r *Runner) openOld(ctx context.Context, at, scratch string) (*oldCheckout, error) {
	if st, err := os.Lstat(at); err != nil || !st.IsDir() {
		return nil, errors.Join(err, errPathInUse(at))
	}
	g, err := openGitDir(at)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errNoRepo(at)
	} else if err != nil {
		return nil, err
	}
	defer g.close()
	if p, err := readSmall(g.root, "objects/info/alternates", 1<<16); err == nil && strings.TrimSpace(string(p)) != "" {
		return nil, errors.New("it borrows objects of another repository: run git repack -a -d in it, and remove .git/objects/info/alternates")
	}
	old := &oldCheckout{}
	branch, head, err := g.head()
	if err != nil {
		return nil, err
	}
	if old.heads, err = g.heads(); err != nil {
		return nil, err
	}
	if p, err := readSmall(g.root, "shallow", maxShallow); err == nil {
		old.shallow = string(p)
	}
	if old.scratchRepo, err = r.newScratchRepo(repo{Path: at, Base: head, Heads: old.heads}, scratch); err != nil {
		return nil, err
	}
	old.local = true
	var refs strings.Builder
	for name, commit := range old.heads { // git derives what it has to fetch from the refs
		refs.WriteString(commit + " refs/heads/" + name + "\n")
	}
	if err := os.WriteFile(filepath.Join(old.path, "packed-refs"), []byte(refs.String()), 0o600); err != nil {
		return nil, err
	}
	if err := old.commitAll(ctx, "the workspace before "+r.job.ID); err != nil {
		return nil, err
	}
	old.at, old.save = head, branch == "" && head != ""
	if old.changes != "" {
		old.at, old.save = old.changes, true
	}
	return old, nil
}

// commitAll commits the uncommitted changes of the work tree. The index of the earlier
// job may be wrong about what has changed, so all tracked files are read.
func (o *oldCheckout) commitAll(ctx context.Context, of string) error {
	if err := o.newIndex(ctx); err != nil {
		return err
	}
	if err := lfsStore(o.work).Uncheckout(o.lfsGit(ctx), o.work); err != nil { // the update runs no filter
		return err
	}
	if o.primary != "" {
		_, err := o.g.run(ctx, o.work, o.env, "update-index", "-q", "--refresh", "--ignore-submodules")
		if _, changed := errors.AsType[*gitError](err); err != nil && !changed {
			return err
		}
	}
	if _, _, err := o.commitChanges(ctx, of); err != nil {
		return err
	}
	out := nameList{left: maxStatus}
	if err := o.g.stream(ctx, o.work, o.env, &out, "diff-files", "-z", "--name-only", "--ignore-submodules=all"); err != nil {
		return err
	}
	if left := out.all(); len(left) > 0 {
		return fmt.Errorf("changes of %s cannot be read, and would be lost (%.100q): commit them or remove the file", agentlab.Plural(len(left), "tracked file"), left[0])
	}
	return nil
}

// maxShallow bounds the file "shallow" of a git directory.
const maxShallow = 16 << 20

// fillGitDir moves what the new git directory at clone needs of the old checkout into
// it: objects, branches, and the state of the work tree. It determines the base.
func (r *Runner) fillGitDir(ctx context.Context, g *gitDir, rp *repo, clone string, old *oldCheckout) (err error) {
	if _, rp.Base, err = g.head(); err != nil {
		return err
	}
	if r.job.Bundled {
		if err := g.dropRemote(); err != nil {
			return err
		}
	}
	sent := rp.Base
	if at := old.heads[rp.Branch]; at != "" && r.job.Branch != "" && r.job.Ref == "" {
		rp.Base = at // the work on the branch continues
	}
	if err := r.mergeShallow(ctx, g, clone, old); err != nil {
		return err
	}
	// Where the history is cut, the receiver may have other commits than the checkout.
	if _, err := g.root.Lstat("shallow"); errors.Is(err, fs.ErrNotExist) && sent != rp.Base {
		rp.Sent = sent
	}
	for _, objects := range []string{filepath.Join(rp.Path, ".git/objects"), filepath.Join(old.path, "objects")} {
		if err := linkObjects(ctx, objects, filepath.Join(clone, ".git/objects")); err != nil {
			return err
		}
	}
	if err := ignoreMissing(g.root.Remove("objects/info/alternates")); err != nil {
		return err
	}
	if rp.Base == "" {
		rp.Base = old.at // the remote has nothing
	}
	if err := r.keepBranches(ctx, g, rp, clone, old); err != nil {
		return err
	}
	head := old.at + "\n"
	if old.at == "" {
		head = "ref: refs/heads/" + branchSaved + "none\n"
	}
	if err := g.write("HEAD", head); err != nil {
		return err
	}
	// Without an index nothing is tracked.
	return ignoreMissing(os.Rename(filepath.Join(old.path, "index"), filepath.Join(clone, ".git/index")))
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// mergeShallow makes the boundaries of the history in the new git directory those of
// the new and the old one together, without those behind which the other continues.
func (r *Runner) mergeShallow(ctx context.Context, g *gitDir, clone string, old *oldCheckout) error {
	p, err := readSmall(g.root, "shallow", maxShallow)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	before, now := commitLines(old.shallow), commitLines(string(p))
	if len(before)+len(now) == 0 {
		return nil
	}
	ends, err := r.historyEnds(ctx, clone, r.git.environ(), before, now)
	if err != nil {
		return err
	}
	more, err := r.historyEnds(ctx, old.work, old.env, now, before)
	if err != nil {
		return err
	}
	if ends = append(ends, more...); len(ends) > 0 {
		return g.write("shallow", strings.Join(ends, "\n")+"\n")
	}
	return ignoreMissing(g.root.Remove("shallow"))
}

// historyEnds returns the commits at which the history ends in the repository in dir
// too: it does not have them, or they are among its own boundaries.
func (r *Runner) historyEnds(ctx context.Context, dir string, env, commits, own []string) (ends []string, err error) {
	if len(commits) == 0 {
		return nil, nil
	}
	out := bounded.Head{Max: 2 * maxShallow}
	err = r.git.exec(ctx, dir, env, strings.NewReader(strings.Join(commits, "\n")+"\n"), &out, "cat-file", "--batch-check=%(objectname)")
	for line := range strings.Lines(out.String()) {
		commit, missing := strings.CutSuffix(strings.TrimSpace(line), " missing")
		if isCommit(commit) && (missing || slices.Contains(own, commit)) {
			ends = append(ends, commit)
		}
	}
	return ends, err
}

// commitLines returns the lines that are names of commits.
func commitLines(s string) (out []string) {
	for line := range strings.Lines(s) {
		if c := strings.TrimSpace(line); isCommit(c) {
			out = append(out, c)
		}
	}
	return out
}

// keepBranches adds the old branches, and the work that no branch has. A branch whose
// commits would be lost because the new one of that name is elsewhere gets another
// name. It sets the branches of rp.
func (r *Runner) keepBranches(ctx context.Context, g *gitDir, rp *repo, clone string, old *oldCheckout) error {
	heads, err := g.heads()
	if err != nil {
		return err
	}
	if rp.Base != "" {
		heads[rp.Branch] = rp.Base
	}
	saved := branchSaved + r.job.ID + "/"
	for _, again := old.heads[saved+"changes"]; again; _, again = old.heads[saved+"changes"] {
		saved = strings.TrimSuffix(saved, "/") + "-again/" // the update was killed, and the work tree may be half of one
	}
	keep := func(name, commit string) error {
		if err := g.root.MkdirAll(path.Dir("refs/heads/"+name), 0o755); err != nil {
			return err
		}
		return g.write("refs/heads/"+name, commit+"\n")
	}
	for name, commit := range old.heads {
		to := name
		if at, taken := heads[name]; taken {
			if at == commit {
				continue
			}
			_, err := r.git.run(ctx, clone, r.git.environ(), "merge-base", "--is-ancestor", commit, at)
			if err == nil {
				continue
			}
			if failed, isGit := errors.AsType[*gitError](err); !isGit || failed.code != 1 {
				return err
			}
			to = saved + name
		}
		if err := keep(to, commit); err != nil {
			if err := keep(saved+name, commit); err != nil { // it is the directory of another branch, or below one
				return err
			}
			to = saved + name
		}
		if to != name {
			r.logf("the branch %.100q of an earlier job has other commits than the repository's: they are kept as the branch %s", name, to)
		}
	}
	if old.save {
		r.logf("uncommitted work of an earlier job is kept as the branch %schanges", saved)
		if err := keep(saved+"changes", old.at); err != nil {
			return err
		}
	}
	if rp.Heads, err = g.heads(); err == nil && rp.Base != "" {
		rp.Heads[rp.Branch] = rp.Base
	}
	return err
}

// linkObjects links the objects in one directory of objects into another on the same
// file system. It follows no symbolic link and takes no other file: those can refer
// to programs, to other directories, or to objects that are wrong.
func linkObjects(ctx context.Context, from, to string) error {
	src, err := os.OpenRoot(from)
	if err != nil {
		return err
	}
	defer func() { _ = src.Close() }()
	dirs, err := fs.ReadDir(src.FS(), ".")
	if err != nil {
		return err
	}
	for _, d := range dirs {
		pack := d.Name() == "pack"
		if !d.IsDir() || !pack && (len(d.Name()) != 2 || !agentlab.IsHex(d.Name(), 2)) {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Join(to, d.Name()), 0o755); err != nil {
			return err
		}
		files, err := fs.ReadDir(src.FS(), d.Name())
		if err != nil {
			return err
		}
		for _, f := range files {
			if !f.Type().IsRegular() || !isObjectFile(f.Name(), pack) {
				continue
			}
			name := filepath.Join(d.Name(), f.Name())
			err := os.Link(filepath.Join(from, name), filepath.Join(to, name))
			if err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
		}
	}
	return nil
}

// isObjectFile reports whether name is that of a file in a directory of objects.
func isObjectFile(name string, pack bool) bool {
	if !pack {
		return (len(name) == 38 || len(name) == 62) && agentlab.IsHex(name, 38)
	}
	name, ok := strings.CutPrefix(name, "pack-")
	base, ext, _ := strings.Cut(name, ".")
	return ok && isCommit(base) && (ext == "pack" || ext == "idx" || ext == "rev")
}

// moveAside moves a submodule of an earlier job out of the checkout: its repository
// may do anything when git is used in it, and may have commits of value.
func (r *Runner) moveAside(checkout, at string) error {
	return r.setAside(fmt.Sprintf("the submodule %.100q", at), filepath.Join(checkout, at), at)
}

// setAside moves a directory of the workspace to one of the same name for this job,
// below guestapi.SavedDir. what describes it.
func (r *Runner) setAside(what, dir, name string) error {
	root, err := os.OpenRoot(r.cfg.Workspace)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	from, err := filepath.Rel(r.cfg.Workspace, dir)
	if err != nil {
		return err
	}
	to := path.Join(guestapi.SavedDir, r.job.ID, name)
	for i := 2; ; i++ {
		if _, err := root.Lstat(to); errors.Is(err, fs.ErrNotExist) {
			break
		}
		to = path.Join(guestapi.SavedDir, fmt.Sprintf("%s-%d", r.job.ID, i), name)
	}
	if err := root.MkdirAll(path.Dir(to), 0o755); err != nil {
		return err
	}
	r.logf("%s of an earlier job is kept in %s", what, filepath.Join(r.cfg.Workspace, to))
	return root.Rename(from, to)
}

// damaged reports whether git cannot read the commits of the checkout of an earlier job,
// for example because its VM was lost while git wrote them.
func (r *Runner) damaged(ctx context.Context, at string) bool {
	g, err := openGitDir(at)
	if err != nil {
		return false
	}
	defer g.close()
	if st, err := g.root.Lstat("HEAD"); errors.Is(err, fs.ErrNotExist) || err == nil && st.Mode().IsRegular() && st.Size() == 0 {
		return true
	}
	_, head, err := g.head()
	if err != nil {
		return false
	}
	heads, err := g.heads()
	if err != nil {
		return false
	}
	tmp, err := os.MkdirTemp(r.cfg.TmpDir, tmpResult)
	if err != nil {
		return false
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	t, err := r.newScratchRepo(repo{Path: at, Base: head, Heads: heads}, filepath.Join(tmp, "git"))
	if err != nil {
		return false
	}
	commits := slices.Sorted(maps.Values(heads))
	if head != "" {
		commits = append(commits, head)
	}
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timing.GitTimeout)
	defer cancel()
	_, err = r.git.run(ctx, t.work, t.env, append([]string{"fsck", "--connectivity-only", "--no-dangling"}, commits...)...)
	e, isGit := errors.AsType[*gitError](err)
	return isGit && e.code > 0 && ctx.Err() == nil // a signal says nothing about the checkout
}
