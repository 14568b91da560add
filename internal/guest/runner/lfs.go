package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/repocmd"
	"github.com/agentlab-vm/agentlab/internal/lfs"
)

// streamBlobs has git read large blobs in parts instead of whole.
var streamBlobs = [2]string{"core.bigFileThreshold", "16m"}

// noLFS disables the filters of Git LFS, for a checkout that has been prepared.
var noLFS = [][2]string{{"filter.lfs.clean", ""}, {"filter.lfs.smudge", ""}, {"filter.lfs.process", ""}, {"filter.lfs.required", "false"}}

func lfsStore(checkout string) lfs.Store {
	return lfs.Store{Dir: filepath.Join(checkout, ".git/lfs/objects")}
}

// storeLFS stores the objects of Git LFS that a bundle has, as refs say, for a clone.
func (r *Runner) storeLFS(ctx context.Context, clone string, refs map[string]string) error {
	env := r.git.environ(streamBlobs)
	for name, blob := range refs {
		oid, ok := strings.CutPrefix(name, guestapi.RefLFS)
		if !ok || !lfs.IsOID(oid) {
			continue
		}
		text, err := r.git.run(ctx, clone, env, "cat-file", "-s", blob)
		if err != nil {
			return err
		}
		size, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return err
		}
		pr, pw := io.Pipe()
		go func() { _ = pw.CloseWithError(r.git.stream(ctx, clone, env, pw, "cat-file", "blob", blob)) }()
		err = lfsStore(clone).Put(lfs.Pointer{OID: oid, Size: size}, pr)
		_ = pr.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// placeLFS puts the objects of Git LFS into the work tree of a checkout, in place of their
// pointers, if git-lfs is there: without it, git would take them for changed files.
func (r *Runner) placeLFS(ctx context.Context, checkout string) error {
	if _, err := exec.LookPath("git-lfs"); err != nil {
		return nil //nolint:nilerr // the pointers stay
	}
	run := func(in io.Reader, out io.Writer, args ...string) error {
		return r.git.exec(ctx, checkout, r.git.environ(), in, out, args...)
	}
	done, err := lfsStore(checkout).Checkout(ctx, run, checkout, nil, math.MaxInt64)
	if err != nil || len(done) == 0 {
		return err
	}
	for _, kv := range repocmd.LFSConfig {
		if err := run(nil, io.Discard, "config", kv[0], kv[1]); err != nil {
			return err
		}
	}
	// For the result, which is read without filters, the index must know these files.
	if err := run(nil, io.Discard, "update-index", "-q", "--refresh", "--ignore-submodules"); err != nil {
		r.logf("files of Git LFS will be in the result as changed files: %v", err)
	}
	return ctx.Err()
}

// keepLFS links the objects of Git LFS of an earlier checkout into a new one on the same
// file system.
func keepLFS(from, to string) error {
	src, err := os.OpenRoot(filepath.Join(from, ".git"))
	if err != nil {
		return err
	}
	defer func() { _ = src.Close() }()
	store := lfsStore(to)
	names, err := fs.Glob(src.FS(), "lfs/objects/??/??/*")
	if err != nil {
		return err
	}
	for _, name := range names {
		oid := filepath.Base(name)
		if st, err := src.Lstat(name); err != nil || !st.Mode().IsRegular() || !lfs.IsOID(oid) {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(store.Path(oid)), 0o755); err != nil {
			return err
		}
		if err := os.Link(filepath.Join(from, ".git", name), store.Path(oid)); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return nil
}

// withoutLFS is lfs.WithoutObjects, if there are objects.
func (t *scratchRepo) withoutLFS(ctx context.Context, names []string) ([]string, error) {
	if _, err := os.Lstat(lfsStore(t.work).Dir); err != nil || len(names) == 0 {
		return names, nil //nolint:nilerr // there are no objects
	}
	return lfs.WithoutObjects(t.lfsGit(ctx), t.work, names)
}

func (t *scratchRepo) lfsGit(ctx context.Context) lfs.Git {
	return func(in io.Reader, out io.Writer, args ...string) error {
		return t.g.exec(ctx, t.work, t.env, in, out, args...)
	}
}

// collectLFS stores the objects of Git LFS to which the result points as an artifact.
func (r *Runner) collectLFS(ctx context.Context, t *scratchRepo, tmp string, c *collected) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timing.GitTimeout)
	defer cancel()
	revs := strings.Join(t.refs(), "\n") + "\n"
	if t.sent != "" {
		revs += "^" + t.sent + "\n"
	}
	list, err := lfs.New(t.lfsGit(ctx), revs)
	if err == nil && len(list) > 0 {
		err = r.packLFS(list, t.work, filepath.Join(tmp, agentlab.ArtifactLFS), c)
	}
	if err != nil {
		c.warn("the objects of Git LFS are not kept: %v", err)
	}
}

func (r *Runner) packLFS(list []lfs.Pointer, checkout, name string, c *collected) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	err = lfsStore(checkout).Send(f, list)
	st, serr := f.Stat()
	if err = errors.Join(err, serr, f.Close()); err != nil {
		return err
	}
	if st.Size() == 0 {
		return nil
	}
	if most := r.resp.Artifact.MaxBytes; most > 0 && st.Size() > most {
		return fmt.Errorf("%d bytes are more than the %d that the job may keep", st.Size(), most)
	}
	c.Files = append(c.Files, upload{Path: agentlab.ArtifactLFS, file: name, vital: true})
	return nil
}
