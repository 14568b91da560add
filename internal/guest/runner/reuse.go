package runner

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// reuse updates the checkout that a job with Prepare of an earlier job has left, in a
// copy of its sandbox. The commands under setup have run: what Git ignores stays, and
// what they have left in the Git directory, such as configuration and hooks, too. They
// come from the same repository and branch, or from its default branch, and would run
// here otherwise.
func (r *Runner) reuse(ctx context.Context, rp repo) (repo, error) {
	if used, err := inUse(rp.Path); err != nil {
		return rp, err
	} else if !used {
		return rp, fmt.Errorf("there is no prepared checkout at %s", rp.Path)
	}
	r.sweepTmp(rp.Path) // of a runner that was killed
	tmp, err := os.MkdirTemp(filepath.Dir(rp.Path), tmpClone)
	if err != nil {
		return rp, err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	got, err := r.update(ctx, rp, tmp)
	if err == nil {
		r.logf("setup was run for an earlier job; its results are used, and the checkout is at %.12s", got.Base)
	}
	return got, err
}

// leaveSetup makes the job clone and run setup itself, because the checkout of the
// earlier one cannot be updated, for example because its files belong to root.
func (r *Runner) leaveSetup(rp repo, why error) error {
	r.logf("the results of setup for an earlier job are not used: %v", why)
	aside := filepath.Join(filepath.Dir(rp.Path), strings.ReplaceAll(tmpClone, "*", "setup"))
	_ = os.RemoveAll(aside) // of a runner that was killed here
	if err := os.Rename(rp.Path, aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return r.dir.save(fileWorkdirLock, rp.Path) // the next runner does not use it either
}

// gitState lists the entries of a Git directory that describe its commits and the state
// of its work tree. An update makes them.
var gitState = []string{
	"HEAD", "ORIG_HEAD", "FETCH_HEAD", "MERGE_HEAD", "COMMIT_EDITMSG", "index", "lfs", "logs", "objects", "packed-refs", "refs", "shallow", checkoutFact,
}

// keepGitFiles copies what setup has left in a Git directory into the new one.
func (r *Runner) keepGitFiles(ctx context.Context, old, git string) error {
	entries, err := os.ReadDir(old)
	if err != nil {
		return err
	}
	args := []string{"--archive", "--remove-destination", "--no-target-directory", "--"}
	for _, e := range entries {
		if slices.Contains(gitState, e.Name()) {
			continue
		}
		to := filepath.Join(git, e.Name())
		if e.IsDir() {
			if err := os.RemoveAll(to); err != nil {
				return err
			}
		}
		cmd := exec.CommandContext(ctx, "cp", append(slices.Clone(args), filepath.Join(old, e.Name()), to)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("the Git directory of the prepared checkout cannot be copied: %.200s: %w", out, err)
		}
	}
	return nil
}

// isDirty reports whether the checkout has changes that Git does not ignore, or cannot
// be read. Such a checkout cannot be updated to another commit.
func (r *Runner) isDirty(ctx context.Context, rp repo, tmp string) bool {
	if rp.Path == "" || rp.None {
		return true
	}
	t, err := r.newScratchRepo(rp, filepath.Join(tmp, "prepared"))
	if err != nil {
		return true
	}
	st, err := t.status(ctx)
	return err != nil || st.staged || len(st.changed)+len(st.gone) > 0 || t.primary != rp.Base
}
