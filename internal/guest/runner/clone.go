package runner

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/repocmd"
)

// repo describes a cloned repository. It is stored as a fact.
type repo struct {
	Path   string
	None   bool   // the job has no repository: Path is an empty directory
	Base   string // commit that was checked out; "" if there is none
	Sent   string // commit that the receiver of the result has, if that is not Base: the work continues that of an earlier job
	Branch string // the branch that was created for the work
	Heads  map[string]string
	Made   bool     // created by the runner, which may delete it
	Setup  []string // commands that prepare the checkout, as the commit has them: a command may change the project file

	Services string // Compose file to start, relative to Path

	Modules map[string]string // commits of the checked-out submodules by path
	Lender  string            // for a submodule: the repository whose objects it borrows
}

// workBranch returns the branch of a job, in the clone, in the bundle and on
// the remote.
func workBranch(j *guestapi.Job) string { return agentlab.WorkBranch(j.Branch, j.ID) }

// errPathInUse is a clone path that is used for something else.
type errPathInUse string

func (e errPathInUse) Error() string { return string(e) + " exists and is not empty" }

// errNoRepo is a directory on a workspace that is not a checkout, for example that of a
// job without a repository.
type errNoRepo string

func (e errNoRepo) Error() string { return string(e) + " is not a repository" }

// checkout makes a checkout of the job's repository: a clone, or on a workspace the
// checkout of an earlier job, updated.
func (r *Runner) checkout(ctx context.Context) (repo, error) {
	job := r.job
	rp := repo{Path: cmp.Or(job.ClonePath, r.defaultPath()), Branch: workBranch(job)}
	if !filepath.IsAbs(rp.Path) || filepath.Clean(rp.Path) == "/" {
		return rp, fmt.Errorf("the clone path %q is not absolute", rp.Path)
	}
	rp.Path = filepath.Clean(rp.Path)
	rp.Made = !r.onWorkspace(rp.Path)
	switch {
	case job.Salvage:
		return r.takeLeft(ctx, rp)
	case job.Prepared != "":
		return r.takePrepared(rp)
	case job.Reuse && !r.claimed(rp.Path):
		got, err := r.reuse(ctx, rp)
		if err == nil || ctx.Err() != nil {
			return got, err
		}
		if err := r.leaveSetup(rp, err); err != nil {
			return rp, err
		}
	}
	job.Reuse = false
	if err := r.takePath(rp); err != nil {
		return rp, err
	}
	if job.RepoURL == "" && !job.Bundled {
		if job.Prepare {
			return rp, errNotPrepared
		}
		rp.None, rp.Branch = true, ""
		return rp, os.MkdirAll(rp.Path, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(rp.Path), 0o755); err != nil {
		return rp, err
	}
	// In a temporary directory until it is complete: a git process of a
	// killed runner must not write into the clone of the next runner.
	tmp, err := os.MkdirTemp(filepath.Dir(rp.Path), tmpClone)
	if err != nil {
		return rp, err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	if !rp.Made {
		if used, err := inUse(rp.Path); err != nil {
			return rp, err
		} else if used {
			return r.updateOrSetAside(ctx, rp, tmp)
		}
	}
	c := &cloner{r: r, path: filepath.Join(tmp, "repo")}
	modules, err := c.clone(ctx)
	if err != nil {
		return rp, err
	}
	if rp.Modules, err = r.checkoutModules(ctx, c.path, modules, nil); err != nil {
		return rp, err
	}
	if err := r.setUpClone(&rp, c.path); err != nil {
		return rp, err
	}
	if err := r.placeLFS(ctx, c.path); err != nil {
		return rp, err
	}
	// An empty directory, for example of a job without a repository: Go's Rename refuses
	// to replace it.
	if err := os.Remove(rp.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return rp, err
	}
	return rp, os.Rename(c.path, rp.Path)
}

// updateOrSetAside updates what is at the path of the checkout. What is not a repository,
// or damaged, is set aside for a new one.
func (r *Runner) updateOrSetAside(ctx context.Context, rp repo, tmp string) (repo, error) {
	got, err := r.update(ctx, rp, tmp)
	what := "the damaged checkout"
	switch _, noRepo := errors.AsType[errNoRepo](err); {
	case err == nil || ctx.Err() != nil:
		return got, err
	case noRepo:
		what = "the directory without a repository"
	case !r.damaged(ctx, rp.Path):
		return got, err
	}
	r.logf("%v", err)
	if err := r.setAside(what, rp.Path, filepath.Base(rp.Path)); err != nil {
		return rp, err
	}
	return r.checkout(ctx)
}

// takePath ensures that the path of the checkout is free, or an earlier job's on the
// same workspace.
func (r *Runner) takePath(rp repo) error {
	if rp.Made {
		return r.lockWorkdir(rp.Path)
	}
	if err := r.checkWorkspace(filepath.Dir(rp.Path)); err != nil {
		return err
	}
	r.sweepTmp(rp.Path) // of a VM that was killed
	return nil
}

// Patterns of temporary directories.
const (
	tmpClone  = "agentlab-clone-*"
	tmpBundle = "agentlab-repo-*"
	tmpResult = "agentlab-result-*"

	tmpCheckpoint = "agentlab-checkpoint-*"
)

// sweepTmp removes temporary directories that killed runners left.
func (r *Runner) sweepTmp(clonePath string) {
	for pattern, dir := range map[string]string{
		tmpClone: filepath.Dir(clonePath), tmpBundle: r.cfg.TmpDir, tmpResult: r.cfg.TmpDir, tmpCheckpoint: r.cfg.TmpDir,
	} {
		names, _ := filepath.Glob(filepath.Join(dir, pattern))
		for _, n := range names {
			_ = os.RemoveAll(n) // best effort
		}
	}
}

// fileWorkdirLock records that the runner created the clone path, so that the next
// runner may delete it.
const fileWorkdirLock = "claim.json"

func (r *Runner) lockWorkdir(path string) error {
	if r.claimed(path) {
		return os.RemoveAll(path)
	}
	if used, err := inUse(path); err != nil {
		return err
	} else if used {
		return errPathInUse(path)
	}
	return r.dir.save(fileWorkdirLock, path)
}

func (r *Runner) claimed(path string) bool {
	var claimed string
	ok, err := r.dir.load(fileWorkdirLock, &claimed)
	return err == nil && ok && claimed == path
}

// inUse reports whether something other than an empty directory is at path.
func inUse(path string) (bool, error) {
	entries, err := os.ReadDir(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return len(entries) > 0, err
}

// setUpClone records the state of the clone and creates the work branch. It
// writes two small files instead of running git twice.
func (r *Runner) setUpClone(rp *repo, path string) error {
	g, err := openGitDir(path)
	if err != nil {
		return err
	}
	defer g.close()
	if _, rp.Base, err = g.head(); err != nil {
		return err
	}
	if r.job.Bundled {
		if err := g.dropRemote(); err != nil {
			return err
		}
	}
	if err := g.branchOff(rp.Branch, rp.Base); err != nil {
		return fmt.Errorf("cannot create the branch %s: %w", rp.Branch, err)
	}
	rp.Heads, err = g.heads()
	return err
}

// permanentFaults are git's messages about faults that another try does not solve. The
// list only saves time: after other faults, the runner tries again.
var permanentFaults = []string{
	"not found", "does not exist", "not our ref", "Authentication failed", "could not read Username", "Permission denied",
	"not allowed", "Host key verification failed", "Access denied", "The requested URL returned error: 40", "unable to find remote helper",
}

func (e *gitError) permanent() bool {
	return slices.ContainsFunc(permanentFaults, func(s string) bool { return strings.Contains(e.stderr, s) })
}

const cloneTries = 3

// cloner clones the job's repository.
type cloner struct {
	r    *Runner
	path string // of the clone
	// borrow is the directory of a repository whose objects are not fetched again.
	// If it is set, the clone has no work tree.
	borrow string
}

// clone clones the repository, and returns the commits of the submodules that the
// controller's bundle contains.
func (c *cloner) clone(ctx context.Context) (modules map[string]bool, err error) {
	if c.r.job.Bundled {
		return c.fromBundle(ctx)
	}
	return nil, c.fromURL(ctx)
}

// fromURL clones over the network. Errors that may be network errors are
// retried.
func (c *cloner) fromURL(ctx context.Context) error {
	for try := 1; ; try++ {
		err := c.once(ctx)
		failed, isGit := errors.AsType[*gitError](err)
		if err == nil || ctx.Err() != nil || !isGit || try == cloneTries || failed.permanent() {
			return err
		}
		c.r.logf("cloning failed, trying again: %v", err)
		if !sleep(ctx, time.Duration(10*try)*c.r.cfg.Timing.FirstRetry) {
			return err
		}
		if err := os.RemoveAll(c.path); err != nil {
			return err
		}
	}
}

func (c *cloner) once(ctx context.Context) error {
	job := c.r.job
	ref := job.Ref
	var depth []string
	if job.Depth > 0 {
		depth = []string{"--depth", strconv.Itoa(job.Depth)}
	}
	ref = strings.TrimPrefix(strings.TrimPrefix(ref, "refs/heads/"), "refs/tags/")
	switch {
	case ref == "":
		return c.from(ctx, c.r.git.environ(), job.RepoURL, depth)
	case isCommit(ref) || strings.HasPrefix(ref, "refs/"):
		return c.ref(ctx, ref, depth)
	}
	err := c.from(ctx, c.r.git.environ(), job.RepoURL, append(depth, "--branch", ref))
	if _, isGit := errors.AsType[*gitError](err); isGit && agentlab.IsHex(ref, 7) {
		// No branch or tag: an abbreviated commit, which only the whole
		// history can resolve.
		if err := c.from(ctx, c.r.git.environ(), job.RepoURL, []string{"--no-checkout"}); err != nil {
			return err
		}
		return c.detach(ctx, ref)
	}
	return err
}

// from runs git clone.
func (c *cloner) from(ctx context.Context, env []string, url string, more []string) error {
	args := []string{"clone", "--progress", "--template=", "--no-recurse-submodules"}
	for _, kv := range repocmd.DurableConfig {
		args = append(args, "--config="+kv[0]+"="+kv[1])
	}
	args = append(args, more...)
	if c.borrow != "" { // "if able": git does not borrow from a shallow repository
		args = append(args, "--no-checkout", "--reference-if-able", c.borrow)
	}
	_, err := c.r.git.run(ctx, filepath.Dir(c.path), env, append(args, "--", url, c.path)...)
	if err == nil {
		repocmd.SyncRefs(filepath.Join(c.path, ".git"))
	}
	return err
}

// detach makes HEAD a commit.
func (c *cloner) detach(ctx context.Context, commit string) error {
	if c.borrow == "" {
		return c.r.detach(ctx, c.path, commit)
	}
	_, err := c.r.git.run(ctx, c.path, c.r.git.environ(), "update-ref", "--no-deref", "HEAD", commit+"^{commit}")
	return err
}

func (r *Runner) detach(ctx context.Context, path, commit string) error {
	_, err := r.git.run(ctx, path, r.git.environ(), "checkout", "--quiet", "--detach", commit, "--")
	return err
}

// ref clones a commit, or a ref that is neither branch nor tag.
func (c *cloner) ref(ctx context.Context, ref string, depth []string) error {
	if err := c.from(ctx, c.r.git.environ(), c.r.job.RepoURL, append([]string{"--no-checkout"}, depth...)); err != nil {
		return err
	}
	if isCommit(ref) && len(depth) == 0 {
		if err := c.detach(ctx, ref); err == nil || ctx.Err() != nil {
			return err
		}
	}
	args := append([]string{"fetch", "--quiet", "--no-tags"}, depth...)
	if _, err := c.r.git.run(ctx, c.path, c.r.git.environ(), append(args, "--", "origin", ref)...); err != nil {
		return err
	}
	return c.detach(ctx, "FETCH_HEAD")
}

// fromBundle clones the repository from the controller's bundle.
func (c *cloner) fromBundle(ctx context.Context) (modules map[string]bool, err error) {
	r := c.r
	tmp, err := os.MkdirTemp(r.cfg.TmpDir, tmpBundle)
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	name := filepath.Join(tmp, "repo.bundle")
	if err := r.api.retry(ctx, r.cfg.Timing.Patience, func() error { return r.download(ctx, name) }); err != nil {
		return nil, fmt.Errorf("the repository bundle cannot be fetched: %w", err)
	}
	refs, err := bundleRefs(name)
	if err != nil {
		return nil, err
	}
	branch, detached, err := bundleRef(refs, r.job.Ref)
	if err != nil {
		return nil, err
	}
	var args []string
	if branch != "" {
		args = append(args, "--branch", branch)
	}
	if detached {
		args = append(args, "--no-checkout")
	}
	if err := c.from(ctx, r.git.environ([2]string{"protocol.file.allow", "always"}, streamBlobs), name, args); err != nil {
		return nil, err
	}
	if err := r.storeLFS(ctx, c.path, refs); err != nil {
		return nil, err
	}
	if detached {
		if err := c.detach(ctx, r.job.Ref); err != nil {
			return nil, err
		}
	}
	return bundleModules(refs), nil
}

func (r *Runner) download(ctx context.Context, name string) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return &localError{err}
	}
	err = r.api.do(ctx, "GET", r.api.base+guestapi.PathRepo, r.api.token, nil, 0, &downloadFile{File: f, report: r.control.progress})
	if cerr := f.Close(); err == nil && cerr != nil {
		err = &localError{cerr}
	}
	return err
}

// bundleRefs returns the refs in the header of a bundle.
func bundleRefs(name string) (map[string]string, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	refs := map[string]string{}
	sc := bufio.NewScanner(f)
	for sc.Scan() && sc.Text() != "" {
		if commit, name, ok := strings.Cut(sc.Text(), " "); ok && isCommit(commit) {
			refs[name] = commit
		}
	}
	return refs, sc.Err()
}

// bundleRef returns how to check ref out of a bundle with these refs: as a branch
// or tag of that name, as the bundle's HEAD (""), or as a commit in it.
func bundleRef(refs map[string]string, ref string) (branch string, detached bool, err error) {
	short := strings.TrimPrefix(strings.TrimPrefix(ref, "refs/heads/"), "refs/tags/")
	switch {
	case ref != "" && refs["refs/heads/"+short] != "" || ref != "" && refs["refs/tags/"+short] != "":
		return short, false, nil
	case refs["HEAD"] == "":
		return "", false, errors.New("the repository bundle has no HEAD, so it is unknown which commit to begin with")
	case agentlab.IsHex(ref, 7) && !strings.HasPrefix(refs["HEAD"], ref):
		return "", true, nil
	}
	return "", false, nil // the sender of the bundle has chosen the commit
}
