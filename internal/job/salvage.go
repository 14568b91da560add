package job

import (
	"context"
	"errors"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// The work of a job that ended without storing it is on the disk of its sandbox, which
// is kept for a time. Another job extracts it: its sandbox boots a copy of that disk
// without a network and without secrets, and its runner collects and uploads what it
// finds, like that of every job. Job.Fork of that job is the UID of the copy.

// salvageTTL is the time for the extraction of the work of a job.
const salvageTTL = time.Hour

// Salvage stores a new job that extracts the work of an ended job from the disk of its
// kept sandbox. If such a job has not ended yet, it returns that one. Codes: not_found,
// conflict (the job has not ended, or its disk is not kept), unsupported.
func (s *Service) Salvage(ctx context.Context, id string) (agentlab.Job, error) {
	none := agentlab.Job{}
	j, err := s.Get(ctx, id)
	if err != nil {
		return none, err
	}
	s.salvaging.Lock() // of two requests the second finds the job of the first
	defer s.salvaging.Unlock()
	open, err := s.work().openSalvages(ctx, j.ID)
	if err != nil || len(open) > 0 {
		return append(open, none)[0], err
	}
	switch kept, err := s.kept(ctx, j); {
	case err != nil:
		return none, err
	case !j.Status.Final():
		return none, agentlab.Errorf(agentlab.CodeConflict, "%s has not ended: it is %s", j.ID, j.Status).
			WithHint("fetch its last checkpoint (agentlab job fetch %s), or wait for its end", j.ID)
	case !kept:
		return none, agentlab.Errorf(agentlab.CodeConflict, "the disk of the sandbox of %s is not kept", j.ID).
			WithHint("see what is stored of it: agentlab job show %s", j.ID)
	}
	prof, err := s.cfg.Profiles.Use(j.Profile)
	if err != nil {
		return none, err
	}
	if !prof.UploadArtifacts {
		return none, agentlab.Errorf(agentlab.CodeConflict, "profile %s uploads no artifacts", prof.Name).WithField("profile").
			WithHint("set artifacts.upload: true in the profile")
	}
	now := s.clock().UTC()
	out := agentlab.Job{
		ID: agentlab.NewJobID(), Salvages: j.ID, RepoURL: j.RepoURL, Ref: j.Ref, Task: j.Task, Agent: j.Agent, Profile: j.Profile, Image: j.Image,
		Mode: j.Mode, TTL: salvageTTL, NoSetup: true, Branch: agentlab.WorkBranch(j.Branch, j.ID), Status: agentlab.JobQueued, CreatedAt: now, UpdatedAt: now,
	}
	e := jobEvent(agentlab.EventJobCreated, out, map[string]any{"agent": out.Agent, "profile": out.Profile, "salvages": j.ID},
		"job %s is QUEUED: it extracts the work of %s", out.ID, j.ID)
	of := jobEvent(agentlab.EventJobPhase, j, map[string]any{"phase": j.Phase, "salvaged_by": out.ID}, "job %s: %s extracts its work", j.ID, out.ID)
	if err := s.cfg.Store.CreateJob(ctx, out, nil, e, of); err != nil {
		return none, err
	}
	s.loop.Wake(out.ID)
	return out, nil
}

// Work knows the work of jobs that is not stored: what the service of sandboxes needs to
// know of jobs.
type Work struct {
	Store     Store
	Artifacts Artifacts
	Profiles  Profiles
}

// openSalvages lists the jobs that extract the work of a job and have not ended.
func (s Work) openSalvages(ctx context.Context, id string) ([]agentlab.Job, error) {
	return s.Store.Jobs(ctx, agentlab.JobFilter{Salvages: id, Statuses: []agentlab.JobStatus{agentlab.JobQueued, agentlab.JobRunning}})
}

// Salvaging reports whether a job that has not ended extracts the work of a job.
func (s Work) Salvaging(ctx context.Context, id string) (bool, error) {
	open, err := s.openSalvages(ctx, id)
	return len(open) > 0, err
}

// kept reports whether the sandbox of a job is kept for its work.
func (s *Service) kept(ctx context.Context, j agentlab.Job) (bool, error) {
	sb, err := s.cfg.Store.Sandbox(ctx, j.SandboxVMID)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return false, nil
	}
	return sb.JobID == j.ID && sb.Salvage && sb.Desired == agentlab.DesiredStopped, err
}

// salvageOrigin is origin for a job that extracts the work of another one.
func (s *Service) salvageOrigin(ctx context.Context, j agentlab.Job) (uid string, wait bool, err error) {
	failed := func(why string) (string, bool, error) {
		return "", true, s.finish(ctx, j.ID, agentlab.JobFailed, "the disk of the sandbox of "+j.Salvages+" cannot be used: "+why)
	}
	if j.Fork != "" {
		switch state, err := s.forkState(ctx, j.Fork); {
		case err != nil:
			return "", false, err
		case state == agentlab.SnapshotReady:
			return j.Fork, false, nil
		case state == agentlab.SnapshotDeleting:
			return failed("it was not copied")
		}
		return "", true, s.noteWaiting(ctx, j, "waits for the copy of the disk of "+j.Salvages, false)
	}
	from, err := s.cfg.Store.Job(ctx, j.Salvages)
	if err == nil {
		err = s.cfg.Snapshots.SaveForSalvage(ctx, from.SandboxVMID, j.ID, func(j *agentlab.Job, uid string) ([]agentlab.Event, error) {
			if j.Status.Final() || j.Fork != "" {
				return nil, errNotNeeded
			}
			j.Fork = uid
			return nil, nil
		})
	}
	switch code := agentlab.CodeOf(err); {
	case errors.Is(err, errNotNeeded):
		s.loop.Wake(j.ID)
		return "", true, nil
	case ctx.Err() != nil || code == agentlab.CodeBusy || code == agentlab.CodeUnavailable:
		return "", false, err
	case err != nil:
		return failed(agentlab.TextWithHint(err))
	}
	return "", true, nil // the end of the save wakes the loop
}

// wakeSalvage wakes the jobs that extract the work of a job.
func (s *Service) wakeSalvage(ctx context.Context, id string) error {
	open, err := s.cfg.Store.Jobs(ctx, agentlab.JobFilter{Salvages: id, Statuses: []agentlab.JobStatus{agentlab.JobQueued}})
	for _, j := range open {
		s.loop.Wake(j.ID)
	}
	return err
}

// Unshipped reports whether a job has, or may have, work that is not stored and that
// is lost with the disk of its sandbox.
func (s Work) Unshipped(ctx context.Context, id string) (bool, error) {
	j, err := s.Store.Job(ctx, id)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	files, err := s.Artifacts.List(ctx, id)
	return err == nil && s.worthKeeping(j, files), err
}

// worthKeeping reports whether the disk of the sandbox of a job must be kept when the
// job ends. That of an attempt is not: its job has others. A profile that uploads
// nothing does not want its work to be stored.
func (s Work) worthKeeping(j agentlab.Job, files []agentlab.Artifact) bool {
	if j.ParentID != "" || !hasUnshipped(j, files) {
		return false
	}
	prof, err := s.Profiles.Use(j.Profile)
	return err != nil || prof.UploadArtifacts
}

func (s *Service) work() Work { return Work{s.cfg.Store, s.cfg.Artifacts, s.cfg.Profiles} }
