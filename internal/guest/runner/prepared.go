package runner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// checkoutFact describes a checkout for the jobs in copies of the sandbox. It is in
// the .git directory, because everything in the run directory is deleted.
const (
	checkoutFact    = "agentlab-checkout.json"
	maxCheckoutFact = 4 << 20
)

// leaveCheckout stores what the runner in a copy of this sandbox needs. A job with
// Prepare does it a second time, after the commands of the repository, and after the
// Git credential is deleted: a copy may be made as soon as the controller has the
// final report.
func leaveCheckout(rp repo) error {
	if rp.None {
		return nil
	}
	g, err := openGitDir(rp.Path)
	if err != nil {
		return err
	}
	defer g.close()
	text, err := json.Marshal(rp)
	if err != nil {
		return err
	}
	_ = g.root.Remove(checkoutFact) // of the repository, or of a run that was killed here
	return g.root.WriteFile(checkoutFact, text, 0o600)
}

// left returns what an earlier job stored about its checkout.
func (g *gitDir) left() (rp repo, err error) {
	p, err := readSmall(g.root, checkoutFact, maxCheckoutFact)
	if err != nil {
		return rp, err
	}
	if err := json.Unmarshal(p, &rp); err != nil {
		return rp, fmt.Errorf("%s is damaged: %w", checkoutFact, err)
	}
	return rp, nil
}

// takePrepared returns the checkout that a job with Prepare left in the sandbox
// that this one continues. Commands of the repository ran in it, so it is
// checked: it must be at the commit that the job's controller knows.
func (r *Runner) takePrepared(want repo) (repo, error) {
	bad := func(format string, args ...any) (repo, error) {
		return want, fmt.Errorf("the prepared checkout %s cannot be used: %w", want.Path, fmt.Errorf(format, args...))
	}
	g, err := openGitDir(want.Path)
	if err != nil {
		return bad("%w", err)
	}
	defer g.close()
	got, err := g.left()
	if err != nil {
		return bad("%w", err)
	}
	branch, head, err := g.head()
	if err != nil {
		return bad("%w", err)
	}
	switch {
	case got.Path != want.Path || got.Branch != want.Branch || got.None || got.Lender != "":
		return bad("it belongs to another job")
	case got.Base != r.job.Prepared || head != r.job.Prepared:
		return bad("it is not at commit %.12s", r.job.Prepared)
	case branch != want.Branch:
		return bad("its branch is not %s", want.Branch)
	}
	heads, err := g.heads()
	if err != nil {
		return bad("%w", err)
	}
	for name, commit := range got.Heads {
		if heads[name] != commit {
			return bad("its branch %.80s has moved", name)
		}
	}
	got.Setup, got.Made = nil, true // the commands have run
	return got, nil
}

// checkoutPath is the file in the home of the agent with the path of the checkout. A
// job that extracts the work on this disk has the path of its profile as it is then.
const (
	checkoutPath    = ".agentlab-checkout"
	maxCheckoutPath = 4 << 10
)

// notePath stores the path of the checkout for takeLeft.
func (r *Runner) notePath(rp repo) {
	home, err := os.OpenRoot(r.cfg.Home)
	if err == nil {
		_ = home.Remove(checkoutPath) // of the repository's commands, or of a run that was killed
		err = home.WriteFile(checkoutPath, []byte(rp.Path), 0o600)
		err = errors.Join(err, home.Close())
	}
	if err != nil {
		r.log.Warn("the path of the checkout is not stored on the disk", "err", err)
	}
}

// leftPath returns the path that notePath stored, or else the path of the job.
func (r *Runner) leftPath(ofJob string) string {
	home, err := os.OpenRoot(r.cfg.Home)
	if err != nil {
		return ofJob
	}
	defer func() { _ = home.Close() }()
	text, err := readSmall(home, checkoutPath, maxCheckoutPath)
	at := string(text)
	if err != nil || !filepath.IsAbs(at) || filepath.Clean(at) != at || at == "/" {
		return ofJob
	}
	if st, err := os.Lstat(at); err != nil || !st.IsDir() {
		return ofJob
	}
	return at
}

// takeLeft returns the checkout that an earlier job left on this disk when its VM
// ended. Without what that job knew about it, everything in it counts as work.
func (r *Runner) takeLeft(ctx context.Context, want repo) (repo, error) {
	want.Made, want.Path = false, r.leftPath(want.Path)
	switch st, err := os.Lstat(want.Path); {
	case err != nil:
		return want, fmt.Errorf("there is no work on this disk: %w", err)
	case !st.IsDir():
		return want, fmt.Errorf("there is no work on this disk: %s is not a directory", want.Path)
	}
	if _, err := os.Lstat(filepath.Join(want.Path, ".git")); errors.Is(err, fs.ErrNotExist) {
		want.None, want.Branch = true, ""
		return want, nil
	}
	g, err := openGitDir(want.Path)
	if err != nil {
		return want, fmt.Errorf("the repository cannot be read: %w", err)
	}
	defer g.close()
	left, err := g.left()
	if err == nil && left.Base != "" {
		err = r.hasCommit(ctx, want, left.Base)
	}
	if err != nil {
		r.logf("the commit at which the job began is not known, so all commits are collected: %v", err)
		return want, nil
	}
	want.Base, want.Heads, want.Modules = left.Base, left.Heads, left.Modules
	return want, nil
}

// hasCommit returns an error if a repository does not have a commit.
func (r *Runner) hasCommit(ctx context.Context, rp repo, commit string) error {
	tmp, err := os.MkdirTemp(r.cfg.TmpDir, tmpResult)
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	t, err := r.newScratchRepo(rp, filepath.Join(tmp, "git"))
	if err == nil {
		_, err = r.git.run(ctx, t.work, t.env, "cat-file", "-e", commit+"^{commit}")
	}
	return err
}

// errNotPrepared is the error of a job with Prepare and without a repository.
var errNotPrepared = errors.New("there is no repository to prepare")
