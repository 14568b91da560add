package runner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Limits on checkpoints.
const (
	checkpointRoom = 1 << 30 // bytes that must be free on the disk
	checkpointPut  = time.Minute
	maxPause       = 10 * time.Minute
)

// checkpointer sends the agent's work to the controller while the agent works,
// so that it survives the loss of the VM.
//
// A checkpoint consists of at most two bundles. The full one has everything
// since the job's base. The increment has what is new since the full one; each
// increment replaces the one before. When an increment becomes larger than the
// full bundle, a new full bundle replaces both. So the number of files is
// bounded, and what is sent again is at most as large as what is new.
type checkpointer struct {
	r     *Runner
	rp    repo
	tmp   string
	n     int
	full  *scratchRepo // of the full bundle that the controller has; nil: none, or not known
	size  int64        // of that bundle
	state string       // that the controller has; "" if that is not known
	sent  bool         // the controller may have a bundle
}

// startCheckpoints sends checkpoints until the returned function is called.
func (r *Runner) startCheckpoints(ctx context.Context, rp repo) (stop func()) {
	if rp.None || rp.Path == "" || !r.uploads() {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var ended sync.WaitGroup
	ended.Go(func() {
		// Without an unlock the thread ends with this function. Its priority
		// is inherited by the git processes that it starts.
		runtime.LockOSThread()
		if err := lowPriority(); err != nil {
			r.log.Warn("checkpoints run at normal priority", "err", err)
		}
		r.sweepTmp(rp.Path)
		tmp, err := os.MkdirTemp(r.cfg.TmpDir, tmpCheckpoint)
		if err != nil {
			r.log.Error("there are no checkpoints", "err", err)
			return
		}
		defer func() { _ = os.RemoveAll(tmp) }()
		(&checkpointer{r: r, rp: rp, tmp: tmp}).run(ctx)
	})
	return func() {
		cancel()
		ended.Wait()
	}
}

// maxAge is the age of the work that a checkpoint may have, if taking it is
// possible in that time.
const maxAge = time.Minute

// pace returns the time from the beginning of a checkpoint that took a time to
// that of the next. Checkpoints use a fifth of the time, and up to half of it if
// the work would otherwise become older than maxAge.
func pace(least, took time.Duration) time.Duration {
	return max(least, 2*took, min(5*took, maxAge-2*took))
}

// run sends a checkpoint after each change of a branch, and looks for
// uncommitted changes each Timing.Checkpoint. Both are less frequent when they
// take long or fail.
func (c *checkpointer) run(ctx context.Context) {
	t := c.r.cfg.Timing
	var sent, failed string
	var failures int
	next := time.Now().Add(t.Checkpoint)
	for pause := t.Commits; sleep(ctx, pause); {
		began := time.Now()
		refs, err := c.refs()
		if err == nil && refs == sent && began.Before(next) {
			pause = pace(t.Commits, time.Since(began))
			continue
		}
		var took time.Duration
		if err == nil {
			took, err = c.take(ctx)
		}
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			sent, failed, failures = refs, "", 0
			pause = max(t.Commits, pace(t.Commits, took)-time.Since(began))
		default:
			failures++
			pause = retryPause(t, failures, took, err)
			if text := c.r.redactor().String(err.Error()); text != failed {
				failed = text
				c.r.log.Warn("no checkpoint could be sent", "err", text)
			}
		}
		next = began.Add(pace(t.Checkpoint, took))
	}
}

// retryPause returns the time until the next try after a checkpoint has failed several
// times. It grows, because what is wrong in the guest costs CPU and disk each time. But
// a controller that was away gets a checkpoint soon after its return.
func retryPause(t Timing, failures int, took time.Duration, err error) time.Duration {
	if sending, ok := errors.AsType[*sendError](err); ok && transient(sending.error) {
		return pace(t.Checkpoint, took)
	}
	return min(t.Checkpoint*time.Duration(failures), maxPause)
}

// sendError is the error of the upload of a checkpoint.
type sendError struct{ error }

func (e *sendError) Unwrap() error { return e.error }

// refs returns HEAD and the branches of the agent's repository.
func (c *checkpointer) refs() (string, error) {
	src, err := openGitDir(c.rp.Path)
	if err != nil {
		return "", err
	}
	defer src.close()
	_, head, err := src.head()
	if err != nil {
		return "", err
	}
	heads, err := src.heads()
	return head + fmt.Sprint(heads), err // maps are printed in order
}

// take sends a checkpoint if there is something new. It returns how long it
// took, without the upload.
func (c *checkpointer) take(ctx context.Context) (took time.Duration, err error) {
	began := time.Now()
	var disk unix.Statfs_t
	if err := unix.Statfs(c.tmp, &disk); err != nil {
		return 0, err
	}
	if free := disk.Bavail * uint64(disk.Bsize); free < checkpointRoom {
		return 0, fmt.Errorf("%d MiB are free on the disk, less than %d", free>>20, checkpointRoom>>20)
	}
	c.n++
	t, err := c.scratch(ctx, filepath.Join(c.tmp, strconv.Itoa(c.n)))
	if err != nil {
		return time.Since(began), err
	}
	defer func() {
		if c.full != t {
			_ = os.RemoveAll(t.path)
		}
	}()
	state := fmt.Sprint(t.branches, t.primary, t.tree)
	if state == c.state || !c.sent && t.primary == c.rp.Base && len(t.branches) == 0 && t.changes == "" {
		return time.Since(began), nil
	}
	u, err := c.pack(ctx, t)
	if err != nil && ctx.Err() == nil && t.dropStash() {
		u, err = c.pack(ctx, t)
	}
	took = time.Since(began)
	if err != nil {
		return took, err
	}
	defer func() { _ = os.Remove(u.file) }()
	// Without an answer, it is not known what the controller has. It may have
	// replaced the full bundle, and then an increment to the old one is useless.
	c.sent, c.state = true, ""
	if u.Path == agentlab.ArtifactCheckpoint {
		c.setFull(nil, 0)
	}
	if err := c.r.put(ctx, u, checkpointPut); err != nil {
		return took, &sendError{err}
	}
	c.state = state
	if u.Path == agentlab.ArtifactCheckpoint {
		c.setFull(t, u.Size)
	}
	return took, nil
}

// setFull replaces the scratch repository of the full bundle.
func (c *checkpointer) setFull(t *scratchRepo, size int64) {
	if c.full != nil {
		_ = os.RemoveAll(c.full.path)
	}
	c.full, c.size = t, size
}

// scratch makes a scratch repository with the agent's commits and a commit of
// the uncommitted changes.
func (c *checkpointer) scratch(ctx context.Context, path string) (t *scratchRepo, err error) {
	var borrowed []string
	if c.full != nil {
		borrowed = []string{filepath.Join(c.full.path, "objects")}
	}
	defer func() {
		if err != nil {
			_ = os.RemoveAll(path)
		}
	}()
	if t, err = c.r.newScratchRepo(c.rp, path, borrowed...); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.r.cfg.Timing.GitTimeout)
	defer cancel()
	_, _, err = t.commitChanges(ctx, c.r.job.ID)
	return t, err
}

var errLargeCheckpoint = fmt.Errorf("it is larger than %d MiB", agentlab.MaxCheckpointBytes>>20)

// pack writes an increment, or if that would be too large a full bundle.
func (c *checkpointer) pack(ctx context.Context, t *scratchRepo) (*upload, error) {
	var inc *upload
	if c.full != nil {
		// It fails if the agent's git has deleted commits of the full bundle.
		u, err := c.write(ctx, t, agentlab.ArtifactIncrement, c.full.tips())
		if ctx.Err() != nil || err == nil && u.Size <= max(c.size, c.r.cfg.MinFull) {
			return u, err
		}
		inc = u
	}
	var base []string
	if t.sent != "" {
		base = []string{t.sent}
	}
	u, err := c.write(ctx, t, agentlab.ArtifactCheckpoint, base)
	if err != nil && inc != nil && ctx.Err() == nil {
		return inc, nil
	}
	if inc != nil {
		_ = os.Remove(inc.file)
	}
	return u, err
}

// tips returns the commits that a bundle of t contains or requires.
func (t *scratchRepo) tips() []string {
	all := append(slices.Collect(maps.Values(t.branches)), t.sent, t.primary, t.changes)
	slices.Sort(all)
	all = slices.Compact(all)
	return slices.DeleteFunc(all, func(s string) bool { return s == "" })
}

// write writes a bundle that requires commits. It names all refs, also those
// without new commits, which git bundle cannot do: so a bundle is a whole state.
func (c *checkpointer) write(ctx context.Context, t *scratchRepo, name string, needs []string) (*upload, error) {
	refs := maps.Clone(t.branches)
	if t.primary != "" {
		refs[c.rp.Branch] = t.primary
	}
	var header, revs strings.Builder
	if len(t.base) == len(emptyTree256) {
		header.WriteString("# v3 git bundle\n@object-format=sha256\n")
	} else {
		header.WriteString("# v2 git bundle\n")
	}
	for _, id := range needs {
		header.WriteString("-" + id + " \n")
		revs.WriteString("^" + id + "\n")
	}
	for _, branch := range slices.Sorted(maps.Keys(refs)) {
		header.WriteString(refs[branch] + " refs/heads/" + branch + "\n")
		revs.WriteString(refs[branch] + "\n")
	}
	if t.changes != "" {
		header.WriteString(t.changes + " " + guestapi.RefChanges + "\n")
		revs.WriteString(t.changes + "\n")
	}
	u := &upload{Path: name, file: filepath.Join(c.tmp, name)}
	f, err := os.OpenFile(u.file, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.r.cfg.Timing.GitTimeout)
	defer cancel()
	w := &quotaWriter{w: f, left: agentlab.MaxCheckpointBytes, full: cancel}
	if _, err = w.Write([]byte(header.String() + "\n")); err == nil {
		// With --shallow, files in required commits are left out also if these
		// are no ancestors: the uncommitted changes of the full bundle.
		err = t.g.exec(ctx, t.work, t.env, strings.NewReader(revs.String()), w,
			"pack-objects", "--revs", "--thin", "--shallow", "--stdout", "--delta-base-offset", "--threads=1", "--quiet")
	}
	if w.over {
		err = errLargeCheckpoint
	}
	if u.Size = int64(agentlab.MaxCheckpointBytes - w.left); err == nil {
		err = f.Close()
	} else {
		_ = f.Close()
	}
	if err != nil {
		_ = os.Remove(u.file)
		return nil, err
	}
	return u, nil
}
