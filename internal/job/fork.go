package job

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// The attempts of a job with a repository continue one sandbox, if the backend can
// do that. Another job, with Prepares, clones the repository and runs the setup
// commands there. When it has COMPLETED, its sandbox is saved and destroyed, and
// the sandboxes of the attempts are created from the snapshot as there is room for
// them. Job.Fork of the attempts' job says how far this is. Whenever it cannot go
// on, Fork becomes "": the attempts that have no sandbox yet clone the repository
// and run the setup commands themselves.

// planFork adds the job that prepares the sandbox of the attempts to a planned
// job, or the event with the reason why there is none. on is the backend of the attempts,
// images are theirs.
func (s *Service) planFork(p *planned, on string, images map[string]bool) {
	if p.job.RepoURL == "" && !p.job.Bundled {
		return // there is nothing to prepare
	}
	why := ""
	if err := s.cfg.Snapshots.CanFork(on); err != nil {
		why = err.Error()
	} else if len(images) > 1 {
		why = "they have different images: " + strings.Join(slices.Sorted(maps.Keys(images)), ", ")
	}
	if why != "" {
		p.noFork = forkEvent(p.job, why)
		return
	}
	for image := range images {
		prep := p.job.Preparation(image)
		prep.ID = agentlab.NewJobID()
		p.job.Fork, p.preparation = agentlab.ForkPreparing, &prep
	}
}

// forkEvent is the event of attempts that are not forked.
func forkEvent(j agentlab.Job, why string) *agentlab.Event {
	who := "each attempt"
	if j.Attempts == 0 {
		who = "it"
	}
	e := jobEvent(agentlab.EventJobPhase, j, map[string]any{"phase": j.Phase, "fork": "", "why": why},
		"job %s: %s clones the repository and runs its setup commands itself: %s", j.ID, who, why)
	return &e
}

// family returns the attempts of a job in their order, and the job that prepares
// their sandbox, nil if there is none.
func (s *Service) family(ctx context.Context, id string) (attempts []agentlab.Job, preparation *agentlab.Job, err error) {
	attempts, err = s.cfg.Store.Jobs(ctx, agentlab.JobFilter{ParentID: id})
	agentlab.SortAttempts(attempts)
	if len(attempts) > 0 && attempts[0].Prepares() {
		attempts, preparation = attempts[1:], &attempts[0]
	}
	return attempts, preparation, err
}

// errNotNeeded is the error of a sandbox that no attempt will continue.
var errNotNeeded = errors.New("the job no longer needs its attempts")

// handOver saves the sandbox of a job that has prepared it. done means that the
// sandbox is no longer needed: its attempts can be created, will prepare theirs
// themselves, or are not wanted.
func (s *Service) handOver(ctx context.Context, prep agentlab.Job) (done bool, err error) {
	p, err := s.cfg.Store.Job(ctx, prep.ParentID)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return true, nil
	}
	if err != nil || prep.Status != agentlab.JobCompleted || p.Fork == "" {
		return err == nil, err
	}
	if p.Fork != agentlab.ForkPreparing {
		state, err := s.forkState(ctx, p.Fork)
		return state != agentlab.SnapshotSaving && err == nil, err
	}
	sb, err := s.cfg.Store.Sandbox(ctx, prep.SandboxVMID)
	switch {
	case err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound:
		return false, err
	case err == nil && sb.State == agentlab.SandboxBooting && sb.Desired == agentlab.DesiredRunning:
		return false, nil // its runner was faster than this process; its next change wakes the loop
	case err == nil && prep.Result.BaseCommit == "":
		err = agentlab.Errorf(agentlab.CodeInvalid, "the runner reported no commit")
	case err == nil:
		err = s.cfg.Snapshots.SaveForAttempts(ctx, sb.VMID, p.ID, keepable(p, prep), s.recordFork)
	}
	switch {
	case errors.Is(err, errNotNeeded):
		return true, nil
	case ctx.Err() != nil || agentlab.CodeOf(err) == agentlab.CodeUnavailable || agentlab.CodeOf(err) == agentlab.CodeBusy:
		return false, err
	case err != nil:
		return true, s.dropFork(ctx, p.ID, "the prepared sandbox was not saved: "+agentlab.TextWithHint(err))
	}
	return false, nil // the end of the save wakes the loop
}

// recordFork changes a job whose prepared sandbox will be saved.
func (s *Service) recordFork(p *agentlab.Job, uid string) ([]agentlab.Event, error) {
	if p.Status.Final() || p.StopRequested != "" || p.Fork != agentlab.ForkPreparing {
		return nil, errNotNeeded
	}
	p.Fork = uid
	if p.Status != agentlab.JobQueued || p.Attempts == 0 {
		return nil, nil
	}
	p.Status, p.StartedAt = agentlab.JobRunning, s.clock().UTC() // a request to cancel it waits for its attempts
	return []agentlab.Event{jobEvent(agentlab.EventJobStatus, *p, map[string]any{"status": p.Status}, "job %s is %s", p.ID, p.Status)}, nil
}

// forkState returns the state of the snapshot for attempts; SnapshotDeleting if it
// no longer exists.
func (s *Service) forkState(ctx context.Context, uid string) (agentlab.SnapshotState, error) {
	snap, err := s.cfg.Store.Snapshot(ctx, uid)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return agentlab.SnapshotDeleting, nil
	}
	return snap.State, err
}

// dropFork makes the attempts of a job that have no sandbox yet prepare theirs
// themselves.
func (s *Service) dropFork(ctx context.Context, id, why string) error {
	p, err := s.cfg.Store.Job(ctx, id)
	if err != nil {
		return err
	}
	if uid := p.Snapshot(); uid != "" { // first, because afterwards it is not known
		if err := s.cfg.Snapshots.DropFork(ctx, uid); err != nil {
			return err
		}
	}
	_, err = s.cfg.Store.UpdateJob(ctx, id, func(now *agentlab.Job) ([]agentlab.Event, error) {
		if now.Fork != p.Fork || now.Fork == "" || now.Status.Final() {
			return nil, nil
		}
		now.Fork = ""
		if now.Attempts == 0 {
			now.Setup = agentlab.JobSetup{Note: agentlab.Reason(why)}
		}
		return []agentlab.Event{*forkEvent(*now, why)}, nil
	})
	if err != nil {
		return err
	}
	s.loop.Wake(id)
	return s.wakeAttempts(ctx, id)
}

// origin returns the UID of the snapshot that the sandbox of a job is created
// from, "" for its image. wait means that this is not known yet; then another job
// wakes this one, or it has ended.
func (s *Service) origin(ctx context.Context, j agentlab.Job) (uid string, wait bool, err error) {
	if j.Salvages != "" {
		return s.salvageOrigin(ctx, j)
	}
	if j.Attempt == 0 && j.Setup.Entry.Key == "" {
		return "", false, nil
	}
	p, err := s.cfg.Store.Job(ctx, j.OwnerID())
	if err != nil || p.Fork == "" {
		return "", false, err
	}
	if uid := p.Snapshot(); uid != "" {
		switch state, err := s.forkState(ctx, uid); {
		case err != nil:
			return "", false, err
		case state == agentlab.SnapshotReady:
			return uid, false, nil
		case state == agentlab.SnapshotDeleting:
			return "", true, s.dropFork(ctx, p.ID, "the prepared sandbox was not saved, or the snapshot is lost")
		}
	}
	_, prep, err := s.family(ctx, p.ID)
	switch {
	case err != nil:
		return "", false, err
	case prep == nil:
		return "", true, s.dropFork(ctx, p.ID, "the job that prepares the sandbox was not found")
	case prep.Status.Final() && prep.Status != agentlab.JobCompleted:
		return "", true, s.finish(ctx, j.ID, prep.Status, preparationEnd(*prep))
	case prep.Status.Final():
		s.loop.Wake(prep.ID) // it may have ended in an earlier process
	}
	return "", true, s.noteWaiting(ctx, j, "waits for the sandbox that "+prep.ID+" prepares", false)
}

// preparationEnd is the reason of attempts whose sandbox could not be prepared.
func preparationEnd(prep agentlab.Job) string {
	return agentlab.Reason("preparing its sandbox ended as " + string(prep.Status) + ": " + prep.Reason)
}

// forkRefused reports whether a sandbox could not be created because of the
// snapshot that it is created from.
func forkRefused(err error) bool {
	switch agentlab.CodeOf(err) {
	case agentlab.CodeInvalid, agentlab.CodeNotFound, agentlab.CodeUnsupported, agentlab.CodeDenied, agentlab.CodeConflict:
		return true
	}
	return false
}

// releaseFork deletes the snapshot of a job when no attempt can still need it.
func (s *Service) releaseFork(ctx context.Context, p agentlab.Job, attempts []agentlab.Job) error {
	needed := slices.ContainsFunc(attempts, func(a agentlab.Job) bool { return a.SandboxVMID == 0 && !a.Status.Final() })
	if p.Snapshot() == "" || needed && p.StopRequested == "" && p.Winner == 0 {
		return nil
	}
	return s.cfg.Snapshots.DropFork(ctx, p.Snapshot())
}
