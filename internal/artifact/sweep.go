package artifact

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Delete deletes everything of a job: artifacts with their rows, agent log,
// repository bundle. It is idempotent.
func (s *Service) Delete(ctx context.Context, jobID string) error {
	if err := agentlab.ValidateJobID(jobID); err != nil {
		return err
	}
	// Moved to a temporary path first: after a crash Sweep deletes it, and it
	// is never partially visible.
	trash := tmpDir + "/.del-" + agentlab.NewUID()
	err := s.files.Rename(jobID, trash)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fault(err, "delete the artifacts of %s", jobID)
	}
	if err := s.store.DeleteArtifacts(ctx, jobID); err != nil {
		return err
	}
	s.mu.Lock()
	delete(s.puts, jobID)
	delete(s.checkpoints, jobID)
	s.mu.Unlock()
	return errors.Join(
		fault(s.files.RemoveAll(trash), "delete the artifacts of %s", jobID),
		removeIf(s.logs, logFile(jobID)),
		s.DropBundle(jobID),
	)
}

// DropCheckpoint deletes the checkpoint of a job whose result is stored. It is
// idempotent.
func (s *Service) DropCheckpoint(ctx context.Context, jobID string) error {
	return s.drop(ctx, jobID, agentlab.ArtifactIncrement, agentlab.ArtifactCheckpoint)
}

// DeleteOutputs deletes the artifacts of a job that are not in its bundle, and returns
// them. It is idempotent.
func (s *Service) DeleteOutputs(ctx context.Context, jobID string) ([]agentlab.Artifact, error) {
	rows, err := s.List(ctx, jobID)
	if err != nil {
		return nil, err
	}
	rows = slices.DeleteFunc(rows, func(a agentlab.Artifact) bool { return agentlab.InJobBundle(a.Path) })
	if len(rows) == 0 {
		return nil, nil
	}
	var paths []string
	for _, a := range rows {
		paths = append(paths, a.Path)
	}
	return rows, s.drop(ctx, jobID, paths...)
}

// drop deletes artifacts of a job with their rows.
func (s *Service) drop(ctx context.Context, jobID string, paths ...string) error {
	u, err := s.acquire(ctx, jobID)
	if err != nil {
		return err
	}
	defer s.release(jobID, u)
	u.commit.Lock()
	defer u.commit.Unlock()
	for _, p := range paths {
		if err := removeIf(s.files, jobID+"/"+p); err != nil {
			return err
		}
	}
	s.mu.Lock()
	if slices.ContainsFunc(paths, agentlab.IsCheckpoint) {
		delete(s.checkpoints, jobID)
	}
	for _, p := range paths {
		delete(u.files, p)
	}
	s.mu.Unlock()
	return s.store.DeleteArtifacts(ctx, jobID, paths...)
}

// swept counts what a sweep removed or moved away.
type swept struct {
	Temporary int // unfinished uploads and deletions
	Files     int // files without a row, moved to the quarantine
	Jobs      int // unknown jobs with files that were moved to the quarantine
	Bundles   int // bundles that no job claimed in time
	Expired   int // entries whose quarantine has ended, deleted
}

// Sweep removes what crashes left behind, and moves files without a known job
// or row to the quarantine for Limits.Quarantine: they may be the only data of
// a job whose row was lost. known reports whether a job exists. Sweep may run
// at any time. Files with names that AgentLab does not use are not changed.
// It returns how much it removed or moved.
func (s *Service) Sweep(ctx context.Context, known func(ctx context.Context, jobID string) (bool, error)) (int, error) {
	n, err := s.sweep(ctx, known)
	return n.Temporary + n.Files + n.Jobs + n.Bundles + n.Expired, err
}

func (s *Service) sweep(ctx context.Context, known func(ctx context.Context, jobID string) (bool, error)) (swept, error) {
	var out swept
	errs := []error{s.sweepTemp(s.files, tmpDir, &out.Temporary), s.sweepTemp(s.bundles, ".", &out.Temporary)}
	orphans := map[string]bool{}
	visit := func(root *os.Root, suffix string, each func(jobID string) error) {
		errs = append(errs, s.expire(root, &out.Expired))
		entries, err := fs.ReadDir(root.FS(), ".")
		errs = append(errs, fault(err, "list the state directory"))
		for _, e := range entries {
			id, ok := strings.CutSuffix(e.Name(), suffix)
			if !ok || agentlab.ValidateJobID(id) != nil || ctx.Err() != nil {
				continue
			}
			exists, err := known(ctx, id)
			switch {
			case err != nil:
				errs = append(errs, err)
			case !exists:
				orphans[id] = true
				errs = append(errs, s.quarantine(root, e.Name(), id, suffix))
			case each != nil:
				errs = append(errs, each(id))
			}
		}
	}
	visit(s.files, "", func(id string) error { return s.sweepJob(ctx, id, &out.Files) })
	visit(s.logs, ".log", nil)
	visit(s.bundles, ".bundle", nil)
	out.Jobs = len(orphans)
	errs = append(errs, s.sweepBundles(&out.Bundles), ctx.Err())
	return out, errors.Join(errs...)
}

// sweepTemp removes temporary files that no call of this process uses.
func (s *Service) sweepTemp(root *os.Root, dir string, n *int) error {
	entries, err := fs.ReadDir(root.FS(), dir)
	errs := []error{fault(err, "list temporary files")}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".up-") && !strings.HasPrefix(e.Name(), ".del-") {
			continue
		}
		name := path.Join(dir, e.Name())
		s.mu.Lock()
		used := s.active[name]
		s.mu.Unlock()
		if used {
			continue
		}
		*n++
		errs = append(errs, fault(root.RemoveAll(name), "remove %s", name))
	}
	return errors.Join(errs...)
}

// sweepJob makes the files of a job and their rows consistent, because a crash
// may come between the two. A file without a row is moved to the quarantine
// (its sender got no answer and sends it again), and a row gets the size and
// hash of its file.
func (s *Service) sweepJob(ctx context.Context, jobID string, n *int) error {
	u, err := s.acquire(ctx, jobID)
	if err != nil {
		return err
	}
	defer s.release(jobID, u)
	u.commit.Lock()
	defer u.commit.Unlock()
	rows, err := s.store.Artifacts(ctx, jobID)
	if err != nil {
		return err
	}
	row := map[string]agentlab.Artifact{}
	for _, a := range rows {
		row[a.Path] = a
	}
	return fs.WalkDir(s.files.FS(), jobID, func(name string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		p := strings.TrimPrefix(name, jobID+"/")
		want, known := row[p]
		if !known {
			*n++
			return s.quarantine(s.files, name, jobID, "/"+p)
		}
		// Another file may have the same size, but not the same time.
		st, err := e.Info()
		if err != nil || (st.Size() == want.Size && st.ModTime().Equal(want.CreatedAt)) {
			return err
		}
		return s.describe(ctx, jobID, p, st.ModTime())
	})
}

// describe writes the row of the existing file, whose modification time is at.
func (s *Service) describe(ctx context.Context, jobID, p string, at time.Time) error {
	f, err := openRegular(s.files, jobID+"/"+p)
	if err != nil {
		return fault(err, "read %s", p)
	}
	defer func() { _ = f.Close() }()
	a, err := summarize(f)
	if err != nil {
		return fault(err, "read %s", p)
	}
	a.JobID, a.Path, a.CreatedAt = jobID, p, at.UTC()
	return s.store.PutArtifact(ctx, a)
}

func (s *Service) sweepBundles(n *int) error {
	entries, err := fs.ReadDir(s.bundles.FS(), ".")
	errs := []error{fault(err, "list bundles")}
	for _, e := range entries {
		id, _ := strings.CutSuffix(e.Name(), ".bundle")
		st, err := e.Info()
		if err != nil || !bundleIDRE.MatchString(id) || s.clock().Sub(st.ModTime()) < s.limits.BundleAge {
			continue
		}
		*n++
		errs = append(errs, removeIf(s.bundles, e.Name()))
	}
	return errors.Join(errs...)
}
