package runner

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Names of the artifacts.
const (
	artBundle = agentlab.ArtifactResult
	artDiff   = "changes.diff"
	artLog    = agentlab.ArtifactLog
	artReport = "report.json"
)

// collected is the result of the agent's work.
type collected struct {
	Result    guestapi.Result
	Files     []upload // in upload order
	Warnings  []string
	Truncated bool // changes.diff is incomplete
	Lost      bool // a part of the work cannot be read
}

// lose is warn about a part of the work that cannot be read.
func (c *collected) lose(format string, args ...any) {
	c.Lost = true
	c.warn(format, args...)
}

func (c *collected) warn(format string, args ...any) {
	c.Warnings = append(c.Warnings, fmt.Sprintf(format, args...))
}

// collect gathers the results of a job whose agent has ended. A result
// that cannot be read becomes a warning, and the rest is still collected. tmp is an empty
// directory for files.
func (r *Runner) collect(ctx context.Context, rp repo, tmp string) *collected {
	c := &collected{Result: guestapi.Result{BaseCommit: rp.Base, Branch: rp.Branch}}
	if r.job.Agent == agentlab.AgentNone {
		return c // no work was done yet
	}
	if !rp.None && rp.Path != "" {
		r.collectGit(ctx, rp, tmp, c)
		r.collectModules(ctx, rp, tmp, c)
	}
	if rp.Path != "" {
		r.collectOutputs(ctx, rp.Path, c)
	}
	return c
}

// scratchRepo is a second git directory for the agent's work tree. It borrows the
// agent's objects and index and copies the commits of its branches, but not
// its configuration, so the runner never runs a filter, hook, monitor,
// external diff or include of the agent or the repository.
type scratchRepo struct {
	g        *git
	env      []string
	path     string // of the git directory
	work     string
	borrowed []string // object directories from which the repository borrows in addition
	base     string   // commit, or the empty tree
	sent     string   // commit that the receiver has; "" if it has none
	noBase   bool
	primary  string // commit of the result
	changes  string // commit of the uncommitted changes; "" if there are none
	tree     string // of changes
	branches map[string]string
	stash    string // branch of the stashed changes; "" if there are none
	local    bool   // its commits stay in this sandbox: no limit on the uncommitted changes
}

// stashBranch is the branch in bundles with what the agent has stashed and not applied.
const stashBranch = "agentlab-stash"

const (
	emptyTree    = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
	emptyTree256 = "6ef19b41225c5369f1c104d45d8d85efa9b057b53b14b4b9b939dd74decc5321"
)

func (r *Runner) collectGit(ctx context.Context, rp repo, tmp string, c *collected) {
	t, err := r.newScratchRepo(rp, filepath.Join(tmp, "git"))
	if err != nil {
		c.lose("the repository can no longer be read: %v", err)
		return
	}
	c.Result.HeadCommit = t.primary
	r.collectChanges(ctx, t, c)
	if len(t.branches) > 0 || t.changes != "" {
		r.collectCommits(ctx, t, tmp, c)
	}
	r.collectDiff(ctx, t, tmp, c)
}

// newScratchRepo selects the result: the commit of HEAD if it has changed, otherwise
// the work branch, otherwise the first other branch that has changed. The
// bundle contains all changed branches. borrowed are object directories from
// which the repository borrows besides the agent's.
func (r *Runner) newScratchRepo(rp repo, path string, borrowed ...string) (*scratchRepo, error) {
	src, err := openGitDir(rp.Path)
	if err != nil {
		return nil, err
	}
	defer src.close()
	t := &scratchRepo{g: r.git, path: path, work: rp.Path, borrowed: borrowed, base: rp.Base, sent: cmp.Or(rp.Sent, rp.Base), branches: map[string]string{}}
	if rp.Lender != "" { // git does not follow a relative path in the alternates of alternates
		t.borrowed = append(t.borrowed, filepath.Join(rp.Lender, ".git", "objects"))
	}
	current, head, err := src.head()
	if err != nil {
		return nil, err
	}
	heads, err := src.heads()
	if err != nil {
		return nil, err
	}
	var moved []string
	for name, commit := range heads {
		if commit != rp.Heads[name] && commit != rp.Base {
			moved = append(moved, name)
			t.branches[name] = commit
		}
	}
	slices.Sort(moved)
	work := heads[rp.Branch]
	switch {
	case head != "" && head != rp.Base && (current == "" || heads[current] != rp.Heads[current]):
		t.primary = head
	case work != "" && work != rp.Base:
		t.primary = work
	case len(moved) > 0:
		t.primary = heads[moved[0]]
	default:
		t.primary = rp.Base
	}
	if t.primary != rp.Base {
		t.branches[rp.Branch] = t.primary
	} else {
		delete(t.branches, rp.Branch)
	}
	if rp.Made || r.job.Salvage { // those on a workspace remain there
		stash, err := src.stash()
		if err != nil {
			return nil, err
		}
		if heads[stashBranch] == "" && stash != "" {
			t.branches[stashBranch], t.stash = stash, stashBranch
		}
	}
	if t.noBase = rp.Base == ""; t.noBase {
		t.base = emptyTree
		if len(t.primary) == 64 {
			t.base = emptyTree256
		}
	}
	return t, t.make(src)
}

// make writes the git directory.
func (t *scratchRepo) make(src *gitDir) error {
	if err := os.RemoveAll(t.path); err != nil {
		return err
	}
	for _, d := range []string{"objects/info", "refs/heads"} {
		if err := os.MkdirAll(filepath.Join(t.path, d), 0o700); err != nil {
			return err
		}
	}
	config := "[core]\n\trepositoryformatversion = 0\n\tbare = false\n"
	if len(t.base) == 64 {
		config = "[core]\n\trepositoryformatversion = 1\n\tbare = false\n[extensions]\n\tobjectformat = sha256\n"
	}
	files := map[string]string{
		"config": config, "HEAD": "ref: refs/heads/none\n",
		"objects/info/alternates": strings.Join(append([]string{filepath.Join(t.work, ".git", "objects")}, t.borrowed...), "\n") + "\n",
	}
	if t.primary != "" {
		files["HEAD"] = t.primary + "\n"
	}
	for name, commit := range t.branches {
		files["refs/heads/"+name] = commit + "\n"
	}
	if p, err := readSmall(src.root, "shallow", maxShallow); err == nil {
		files["shallow"] = string(p)
	}
	for name, content := range files {
		p := filepath.Join(t.path, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o700); err != nil {
			return err
		}
		if err := os.WriteFile(p, []byte(content), 0o600); err != nil {
			return err
		}
	}
	if err := t.copyIndex(src); err != nil {
		return err
	}
	t.env = append(t.g.environ([2]string{"core.bare", "false"}, [2]string{"core.quotePath", "true"}, [2]string{"core.bigFileThreshold", bigFile}),
		"GIT_DIR="+t.path, "GIT_WORK_TREE="+t.work, "GIT_OPTIONAL_LOCKS=0")
	return nil
}

// copyIndex copies the index, which only saves work: it lists which files are
// unchanged. Its modification time is copied too: git reads a file again that is
// as new as the index.
func (t *scratchRepo) copyIndex(src *gitDir) error {
	st, err := src.root.Lstat("index")
	if err != nil {
		return nil //nolint:nilerr // git makes a new one
	}
	p, err := readSmall(src.root, "index", 512<<20)
	if err != nil {
		return nil //nolint:nilerr // as above
	}
	name := filepath.Join(t.path, "index")
	if err := os.WriteFile(name, p, 0o600); err != nil {
		return err
	}
	return os.Chtimes(name, st.ModTime(), st.ModTime())
}

// dropStash leaves out the stashed changes, which may be damaged. It returns false if
// there are none.
func (t *scratchRepo) dropStash() bool {
	if t.stash == "" {
		return false
	}
	delete(t.branches, t.stash)
	t.stash = ""
	return true
}

func (t *scratchRepo) refs() []string {
	var out []string
	for name := range t.branches {
		out = append(out, "refs/heads/"+name)
	}
	slices.Sort(out)
	return out
}

// bigFile is the size from which files are packed without deltas: the receiver
// accepts deltas only for small files.
const bigFile = "64m"

// collectChanges commits the uncommitted changes of the agent for the bundle.
func (r *Runner) collectChanges(ctx context.Context, t *scratchRepo, c *collected) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timing.GitTimeout)
	defer cancel()
	files, left, err := t.commitChanges(ctx, r.job.ID)
	if err != nil {
		c.lose("the uncommitted changes cannot be packed: %v", err)
	}
	c.warnLeft(left)
	c.Result.Uncommitted, c.Result.Dirty = files, files > 0 || len(left) > 0 || err != nil
}

func (c *collected) warnLeft(names []string) {
	if len(names) > 0 {
		c.warn("%d uncommitted file(s) are not sent, because they cannot be read, are not regular files or exceed the limits of %d MiB each and %d MiB together: %.200q",
			len(names), maxChangedFile>>20, maxChangedBytes>>20, strings.Join(names[:min(3, len(names))], " "))
	}
}

// collectCommits counts the commits and packs them with the uncommitted
// changes.
func (r *Runner) collectCommits(ctx context.Context, t *scratchRepo, tmp string, c *collected) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timing.GitTimeout)
	defer cancel()
	var exclude []string
	if !t.noBase {
		exclude = []string{"^" + t.base}
	}
	if t.primary != "" {
		n, err := r.git.run(ctx, t.work, t.env, append([]string{"rev-list", "--count", t.primary}, exclude...)...)
		if err == nil {
			c.Result.Commits, err = strconv.Atoi(n)
		}
		if err != nil {
			c.lose("the commits cannot be read: %v", err)
			return
		}
	}
	refs := t.refs()
	if c.Result.Commits == 0 && len(t.branches) == 1 && t.stash == "" {
		refs = nil // it only moved back to an older commit
	}
	if t.changes != "" {
		refs = append(refs, guestapi.RefChanges)
	}
	if len(refs) == 0 {
		return
	}
	name := filepath.Join(tmp, artBundle)
	if t.sent != "" {
		exclude = []string{"^" + t.sent}
	}
	_, err := r.git.run(ctx, t.work, t.env, slices.Concat([]string{"bundle", "create", "--quiet", name}, refs, exclude)...)
	if err != nil && ctx.Err() == nil && !t.noBase && t.sent != t.base { // for example, it has only commits that were sent
		t.sent = t.base
		r.collectCommits(ctx, t, tmp, c)
		return
	}
	if err != nil && ctx.Err() == nil && t.dropStash() {
		c.warn("the stashed changes cannot be packed: %v", err)
		r.collectCommits(ctx, t, tmp, c)
		return
	}
	if t.stash != "" && err == nil {
		c.warn("stashed changes are in the branch %s of %s", t.stash, artBundle)
	}
	if err != nil {
		c.lose("the commits cannot be packed: %v", err)
		return
	}
	c.Files = append(c.Files, upload{Path: artBundle, file: name, vital: true})
	r.collectLFS(ctx, t, tmp, c)
}

// collectDiff writes the diff between the base and the result with its
// uncommitted changes.
func (r *Runner) collectDiff(ctx context.Context, t *scratchRepo, tmp string, c *collected) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timing.GitTimeout)
	defer cancel()
	name := filepath.Join(tmp, artDiff)
	size, truncated, err := t.writeDiff(ctx, name)
	if err != nil {
		c.warn("%s cannot be made: %v", artDiff, err)
	}
	if c.Truncated = truncated; truncated {
		c.warn("%s is cut: the changes are more than %d bytes", artDiff, maxDiff)
	}
	if size > 0 {
		c.Files = append(c.Files, upload{Path: artDiff, file: name, vital: true})
	}
}

// writeDiff writes the differences between the base and the result with its
// uncommitted changes. It writes at most maxDiff bytes, cut where a file's diff
// ends. Git runs no program for it.
func (t *scratchRepo) writeDiff(ctx context.Context, name string) (size int64, truncated bool, err error) {
	to := t.primary
	if t.changes != "" {
		to = t.changes
	}
	if to == "" || to == t.base {
		return 0, false, nil
	}
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return 0, false, err
	}
	defer func() { _ = f.Close() }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w := &quotaWriter{w: f, left: maxDiff, full: cancel}
	err = t.g.stream(ctx, t.work, t.env, w,
		"diff", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all", "--binary", t.base, to)
	if w.over {
		err = cutAtLastFile(f)
	}
	st, serr := f.Stat()
	if serr != nil {
		return 0, w.over, serr
	}
	return st.Size(), w.over, err
}

// quotaWriter calls full when its limit is exceeded.
type quotaWriter struct {
	w    io.Writer
	left int
	over bool
	full func()
}

func (c *quotaWriter) Write(p []byte) (int, error) {
	n := min(len(p), c.left)
	c.left -= n
	if n < len(p) {
		c.over = true
		c.full()
	}
	if _, err := c.w.Write(p[:n]); err != nil {
		return 0, err
	}
	return len(p), nil
}

// cutAtLastFile truncates a diff before its last file, which is incomplete.
func cutAtLastFile(f *os.File) error {
	p := make([]byte, maxDiff)
	n, err := f.ReadAt(p, 0)
	if err != nil && err != io.EOF {
		return err
	}
	i := bytes.LastIndex(p[:n], []byte("\ndiff --git "))
	return f.Truncate(int64(i + 1))
}

// push sends the result to the job's own remote.
func (r *Runner) push(ctx context.Context, rp repo, tmp string, c *collected) {
	if c.Result.Commits == 0 || r.job.NoPush || !mayPush(r.job, r.resp.Git) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timing.PushTimeout)
	defer cancel()
	ref := "refs/heads/" + rp.Branch
	env := append(r.git.environ(), "GIT_DIR="+filepath.Join(tmp, "git"))
	for try := 1; ; try++ {
		_, err := r.git.run(ctx, tmp, env, "push", "--quiet", "--no-verify", "--no-recurse-submodules", "--", r.job.RepoURL, ref+":"+ref)
		failed, isGit := errors.AsType[*gitError](err)
		if err == nil {
			c.Result.Pushed = true
			return
		}
		if !isGit || try == cloneTries || failed.permanent() || strings.Contains(failed.stderr, "[rejected]") || !sleep(ctx, r.cfg.Timing.FirstRetry) {
			c.warn("the branch could not be pushed: %v", err)
			return
		}
	}
}
