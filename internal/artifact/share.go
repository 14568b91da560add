package artifact

import (
	"context"
	"errors"
	"io/fs"

	"github.com/agentlab-vm/agentlab"
)

// Share makes the artifact a also an artifact of another job, with the path p.
// The two rows have one file, which never changes. It counts for no quota and
// may be called again. An artifact that was deleted in the meantime is ignored, and
// of one that was replaced the new content is shared.
func (s *Service) Share(ctx context.Context, a agentlab.Artifact, jobID, p string) error {
	if err := errors.Join(agentlab.ValidateJobID(a.JobID), agentlab.ValidateArtifactPath(a.Path), agentlab.ValidateJobID(jobID), agentlab.ValidateArtifactPath(p)); err != nil {
		return err
	}
	u, err := s.acquire(ctx, jobID)
	if err != nil {
		return err
	}
	defer s.release(jobID, u)
	from, err := s.acquire(ctx, a.JobID)
	if err != nil {
		return err
	}
	defer s.release(a.JobID, from)
	defer lockBoth(a.JobID, from, jobID, u)()
	// An upload may have replaced the file since the caller has read its row.
	if a, err = s.store.Artifact(ctx, a.JobID, a.Path); agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return nil
	} else if err != nil {
		return err
	}
	if old, err := s.store.Artifact(ctx, jobID, p); err == nil && old.SHA256 == a.SHA256 {
		return nil
	}
	t, err := s.newTemp(s.files, tmpDir)
	if err != nil {
		return err
	}
	defer t.discard()
	if err := s.files.Remove(t.name); err != nil {
		return fault(err, "share %s", a.Path)
	}
	if err := s.files.Link(a.JobID+"/"+a.Path, t.name); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fault(err, "share %s", a.Path)
	}
	a.JobID, a.Path = jobID, p // and the time of the file, which is that of both rows
	if err := s.place(t, a); err != nil {
		return err
	}
	// After a crash the path may already be this file. Then it is not renamed.
	if err := removeIf(s.files, t.name); err != nil {
		return err
	}
	// The file is in place, so its row is written even if the caller ends.
	return s.store.PutArtifact(context.WithoutCancel(ctx), a, s.storedEvents(u, a)...)
}

// lockBoth locks two jobs, always in the same order, and returns the function that
// unlocks them.
func lockBoth(idA string, a *usage, idB string, b *usage) (unlock func()) {
	if idA > idB {
		a, b = b, a
	}
	a.commit.Lock()
	if a == b {
		return a.commit.Unlock
	}
	b.commit.Lock()
	return func() { b.commit.Unlock(); a.commit.Unlock() }
}

// ShareLog stores the log of a job as an artifact of another one. Without a log
// it does nothing.
func (s *Service) ShareLog(ctx context.Context, fromID, jobID, p string) error {
	if n, err := s.LogSize(ctx, fromID); err != nil || n == 0 {
		return err
	}
	r, err := s.Log(ctx, fromID, 0, false)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	_, err = s.Put(ctx, jobID, p, r)
	return err
}
