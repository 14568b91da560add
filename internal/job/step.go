package job

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// Maximum times between two steps.
const (
	roomPause   = 10 * time.Second // when a limit on sandboxes is reached
	maxDuration = 10 * time.Minute // in every case, because a clock may be set or the host suspended
)

// step brings one job closer to its end.
func (s *Service) step(ctx context.Context, id string) (time.Duration, error) {
	j, err := s.cfg.Store.Job(ctx, id)
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		s.forget(id)
		return 0, nil
	case err != nil:
		return 0, err
	case j.Status.Final():
		s.forget(id)
		if j.Prepares() {
			if done, err := s.handOver(ctx, j); err != nil || !done {
				return maxDuration, err
			}
		}
		return 0, errors.Join(s.release(ctx, j), s.wakeRelatives(ctx, j), s.wakeSalvage(ctx, j.ID))
	case j.Attempts > 0:
		return s.stepAttempts(ctx, j)
	}
	if ended, err := s.followParent(ctx, j); ended || err != nil {
		return 0, err
	}
	if j.SandboxVMID == 0 {
		return s.findSandbox(ctx, j)
	}
	sb, err := s.cfg.Store.Sandbox(ctx, j.SandboxVMID)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound || err == nil && sb.JobID != j.ID {
		return 0, s.finish(ctx, j.ID, agentlab.JobFailed, "its sandbox was not found")
	}
	if err != nil {
		return 0, err
	}
	if status, why := s.sandboxLoss(j, sb); status != "" {
		if s.isFailedCopy(j, sb) {
			return 0, s.leaveCopy(ctx, j, sb)
		}
		return 0, s.finish(ctx, j.ID, status, why)
	}
	if err := s.releaseOwn(ctx, j, sb); err != nil {
		return 0, err
	}
	if j.Status == agentlab.JobQueued {
		return s.queued(ctx, j, sb)
	}
	return s.running(ctx, j, sb)
}

// sandboxLoss returns the final status and the reason of a job whose sandbox has
// ended; "" when it has not.
func (s *Service) sandboxLoss(j agentlab.Job, sb agentlab.Sandbox) (status agentlab.JobStatus, why string) {
	if j.Status == agentlab.JobQueued && sb.State == agentlab.SandboxStopped && sb.Desired == agentlab.DesiredRunning {
		return "", "" // it is started again and its job has not started
	}
	gone := sb.State == agentlab.SandboxDestroyed || sb.Desired == agentlab.DesiredDestroyed
	now := s.clock()
	over := (!j.DeadlineAt.IsZero() && !now.Before(j.DeadlineAt)) || !now.Before(sb.LeaseExpiresAt)
	switch {
	case sb.State == agentlab.SandboxTimeout, gone && sb.Reason != "" && over:
		why = "its sandbox is TIMEOUT"
	case sb.State == agentlab.SandboxFailed, gone && sb.Reason != "": // DESTROYED soon follows FAILED
		why = "its sandbox failed"
	case sb.State == agentlab.SandboxStopped:
		why = "its sandbox was stopped"
	case gone:
		why = "its sandbox was destroyed"
	default:
		return "", ""
	}
	if sb.Reason != "" {
		why += ": " + sb.Reason
	}
	switch {
	case j.StopRequested != "":
		status, why = agentlab.JobStatus(j.StopRequested), cmp.Or(j.Reason, why)
	case over || sb.State == agentlab.SandboxTimeout:
		status = agentlab.JobTimeout
	default:
		status = agentlab.JobFailed
	}
	return status, why
}

// findSandbox assigns a job its sandbox: the one that was created for it
// before a crash, or a new one.
func (s *Service) findSandbox(ctx context.Context, j agentlab.Job) (time.Duration, error) {
	sb, err := s.cfg.Store.SandboxByName(ctx, j.ID)
	lost := err == nil && sb.From.Snapshot != "" && sb.JobID == j.ID && j.Fork == "" && j.Salvages == "" && j.Attempt == 0
	if lost && sb.State != agentlab.SandboxDestroyed {
		_, err := s.cfg.Sandboxes.Destroy(ctx, sb.VMID) // the copy that leaveCopy has left has the name of the job
		return maxDuration, err                         // its end wakes the loop
	}
	if lost || agentlab.CodeOf(err) == agentlab.CodeNotFound {
		r := s.sandboxRequest(j)
		wait := false
		if r.Fork, wait, err = s.origin(ctx, j); wait || err != nil {
			return maxDuration, err
		}
		if sb, err = s.cfg.Sandboxes.Create(ctx, r); r.Fork != "" && forkRefused(err) {
			if j.Salvages != "" { // there is no other way to the disk
				return 0, s.sandboxRefused(ctx, j, err)
			}
			who := "it"
			if j.Attempt > 0 {
				who = "attempt " + strconv.Itoa(j.Attempt)
			}
			return maxDuration, s.dropFork(ctx, j.OwnerID(), who+" could not continue the prepared sandbox: "+agentlab.TextWithHint(err))
		}
	}
	switch agentlab.CodeOf(err) {
	case "":
	case agentlab.CodeLimit:
		return roomPause, s.waitForRoom(ctx, j, err)
	case agentlab.CodeInvalid, agentlab.CodeNotFound, agentlab.CodeUnsupported, agentlab.CodeDenied, agentlab.CodeExists:
		return 0, s.sandboxRefused(ctx, j, err)
	default:
		if ctx.Err() == nil && s.waitingSince(j.ID) >= reportAfter {
			err = errors.Join(err, s.noteWaiting(ctx, j, "waits for a sandbox: "+agentlab.TextWithHint(err), true))
		}
		return 0, err
	}
	if sb.JobID != j.ID {
		return 0, s.finish(ctx, j.ID, agentlab.JobFailed, "the name is used by another sandbox")
	}
	s.mu.Lock()
	s.stopWaiting(j.ID)
	s.mu.Unlock()
	_, err = s.cfg.Store.UpdateJob(ctx, j.ID, func(j *agentlab.Job) ([]agentlab.Event, error) {
		j.SandboxVMID = sb.VMID // even if it was cancelled in the meantime: then the sandbox is released
		if !j.Status.Final() {
			j.Phase, j.Waiting = "", ""
		}
		return nil, nil
	})
	if err != nil {
		return 0, err
	}
	s.loop.Wake(j.ID)
	if j.ParentID != "" {
		s.loop.Wake(j.ParentID) // which deletes the snapshot that the last attempt needed
	}
	return 0, nil
}

// sandboxRefused ends a job whose sandbox cannot be created.
func (s *Service) sandboxRefused(ctx context.Context, j agentlab.Job, err error) error {
	return s.finish(ctx, j.ID, agentlab.JobFailed, "its sandbox could not be created: "+agentlab.TextWithHint(err))
}

// waitForRoom records that a job waits until another sandbox is destroyed.
func (s *Service) waitForRoom(ctx context.Context, j agentlab.Job, full error) error {
	s.mu.Lock()
	if !slices.Contains(s.waiting, j.ID) {
		s.waiting = append(s.waiting, j.ID)
	}
	s.mu.Unlock()
	if j.Phase == PhaseWaiting && j.Waiting != "" {
		return nil
	}
	return s.noteWaiting(ctx, j, "waits until there is room for another sandbox: "+full.Error(), true)
}

// stopWaiting removes a job from the queue for sandboxes. The caller holds
// s.mu.
func (s *Service) stopWaiting(id string) {
	s.waiting = slices.DeleteFunc(s.waiting, func(w string) bool { return w == id })
}

// queued drives a job whose runner has not started.
func (s *Service) queued(ctx context.Context, j agentlab.Job, sb agentlab.Sandbox) (time.Duration, error) {
	if err := s.noteWaiting(ctx, j, sb.Waiting, false); err != nil {
		return 0, err
	}
	if sb.State != agentlab.SandboxReady || sb.BootedAt.IsZero() {
		return maxDuration, nil // its next change wakes the loop
	}
	left := sb.BootedAt.Add(s.lim.StartTimeout).Sub(s.clock())
	if left <= 0 {
		why := cmp.Or(s.cfg.Bootstrap.Trouble(sb.UID), "its runner did not fetch the job within "+s.lim.StartTimeout.String())
		return 0, s.finish(ctx, j.ID, agentlab.JobFailed, why)
	}
	return min(left, maxDuration), nil
}

// running drives a job whose runner has started.
func (s *Service) running(ctx context.Context, j agentlab.Job, sb agentlab.Sandbox) (time.Duration, error) {
	if sb.State == agentlab.SandboxReady {
		if err := s.cfg.Sandboxes.MarkRunning(ctx, sb.VMID); err != nil {
			return 0, err
		}
	}
	s.noteActive()
	now := s.clock()
	again := maxDuration
	unheard := s.cfg.Sandboxes.Unheard(sb.VMID)
	s.mu.Lock()
	l := s.track(j.ID)
	if unheard { // its silence starts when it continues
		l.lastHeard, again = now, s.lim.Silence/9
	}
	if j.StopRequested != "" && l.stopped.IsZero() {
		l.stopped = now
	}
	lastHeard, stopped, stopReason := l.lastHeard, l.stopped, l.stopReason
	s.mu.Unlock()
	if stopReason != "" {
		return 0, s.finishStopped(ctx, j.ID)
	}

	expired := func(t time.Time) bool {
		left := t.Sub(now)
		if left > 0 {
			again = min(again, left)
		}
		return left <= 0
	}
	switch {
	case j.StopRequested == string(agentlab.JobCancelled) && expired(stopped.Add(s.lim.CancelWindow)):
		return 0, s.finish(ctx, j.ID, agentlab.JobCancelled, "cancelled; its runner did not report in time")
	case j.StopRequested == string(agentlab.JobFailed) && expired(stopped.Add(s.lim.CancelWindow)):
		return 0, s.finish(ctx, j.ID, agentlab.JobFailed, j.Reason)
	}
	switch {
	case expired(j.DeadlineAt.Add(s.lim.UploadWindow)):
		return 0, s.finish(ctx, j.ID, agentlab.JobTimeout, "the time limit of "+j.TTL.String()+" was exceeded; its runner did not report in time")
	case expired(lastHeard.Add(s.lim.Silence)):
		status := agentlab.JobFailed
		if j.StopRequested != "" {
			status = agentlab.JobStatus(j.StopRequested)
		}
		return 0, s.finish(ctx, j.ID, status, cmp.Or(j.Reason, "its runner did not report for "+s.lim.Silence.String()))
	case j.StopRequested == "" && expired(j.DeadlineAt):
		return 0, s.timeOut(ctx, j)
	}
	if d := s.readDenials(ctx, j, false); d.count >= maxModelDenials && j.StopRequested == "" {
		return 0, s.stopForModel(ctx, j.ID, d)
	}
	return again, nil
}

// timeOut asks the runner of a job to stop because the job's time is over.
func (s *Service) timeOut(ctx context.Context, j agentlab.Job) error {
	_, err := s.cfg.Store.UpdateJob(ctx, j.ID, func(j *agentlab.Job) ([]agentlab.Event, error) {
		if j.Status != agentlab.JobRunning || j.StopRequested != "" {
			return nil, nil
		}
		j.StopRequested = string(agentlab.JobTimeout)
		return []agentlab.Event{jobEvent(agentlab.EventJobStatus, *j, map[string]any{"status": j.Status, "stop": j.StopRequested},
			"the time of job %s, %s, is over; its runner may upload for %s", j.ID, j.TTL, s.lim.UploadWindow)}, nil
	})
	return err
}

// finish ends a job, unless it has ended.
func (s *Service) finish(ctx context.Context, id string, status agentlab.JobStatus, reason string) error {
	return s.finishIf(ctx, id, status, func() (string, bool) { return reason, true })
}

// finishStopped ends a job whose sandbox was stopped while it ran and may already
// run again. Readers of the store see a commit before this service gets its events.
// In a transaction it has the events of all earlier commits, so that a stop before
// the job's start does not count.
func (s *Service) finishStopped(ctx context.Context, id string) error {
	return s.finishIf(ctx, id, agentlab.JobFailed, func() (string, bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		why := s.track(id).stopReason
		return "its sandbox was stopped: " + why, why != ""
	})
}

// finishIf ends a job, unless it has ended, if why returns true. why is called in the
// transaction and returns the reason.
func (s *Service) finishIf(ctx context.Context, id string, status agentlab.JobStatus, why func() (reason string, ok bool)) error {
	files, err := s.cfg.Artifacts.List(ctx, id)
	if err != nil {
		return err
	}
	_, err = s.cfg.Store.UpdateJob(ctx, id, func(j *agentlab.Job) ([]agentlab.Event, error) {
		reason, ok := why()
		if !ok || j.Status.Final() {
			return nil, nil
		}
		end := j.End(status, reason, s.clock())
		return append([]agentlab.Event{end}, unshipped(*j, files)...), nil
	})
	return err
}

// dropCheckpoint deletes the checkpoint of a final job if its result is stored.
func (s *Service) dropCheckpoint(ctx context.Context, j agentlab.Job, files []agentlab.Artifact) error {
	if !has(files, agentlab.ArtifactCheckpoint) || !resultStored(j, files) {
		return nil
	}
	return s.cfg.Artifacts.DropCheckpoint(ctx, j.ID)
}

// release frees what a final job uses: its checkpoint, its bundle and its
// sandbox. It may be called again.
func (s *Service) release(ctx context.Context, j agentlab.Job) error {
	files, err := s.cfg.Artifacts.List(ctx, j.ID)
	if err == nil {
		err = s.dropCheckpoint(ctx, j, files)
	}
	if err != nil {
		return err
	}
	if j.Bundled {
		if err := s.cfg.Artifacts.DropBundle(j.ID); err != nil {
			return err
		}
	}
	if err := s.dropOwn(ctx, j); err != nil {
		return err
	}
	if j.Salvages != "" {
		if j.Fork != "" {
			if err := s.cfg.Snapshots.DropFork(ctx, j.Fork); err != nil {
				return err
			}
		}
		s.cfg.Sandboxes.SalvageEnded()
	}
	vmid := j.SandboxVMID
	if vmid == 0 { // the process may have died before it was stored
		sb, err := s.cfg.Store.SandboxByName(ctx, j.ID)
		if agentlab.CodeOf(err) == agentlab.CodeNotFound || (err == nil && sb.JobID != j.ID) {
			return nil
		}
		if err != nil {
			return err
		}
		vmid = sb.VMID
	}
	_, err = s.cfg.Sandboxes.Release(ctx, vmid, sandbox.Outcome{
		Status: j.Status, Reason: j.Reason, TTL: j.TTL, Prepared: j.Agent == agentlab.AgentNone,
		Unshipped: s.work().worthKeeping(j, files), Unused: unused(j),
	})
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return nil
	}
	return err
}

// unused reports whether a job was cancelled before it started, so that its sandbox has
// nothing to keep. A sandbox that a job only prepares belongs to its user.
func unused(j agentlab.Job) bool {
	return j.Status == agentlab.JobCancelled && j.StartedAt.IsZero() && j.Agent != agentlab.AgentNone
}

// reportAfter is how long creating a sandbox fails before the job shows why.
const reportAfter = 5 * time.Second

// waitingSince returns the time since its first call for a job.
func (s *Service) waitingSince(id string) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, l := s.clock(), s.track(id)
	if l.tried.IsZero() {
		l.tried = now
	}
	return now.Sub(l.tried)
}

// noteWaiting stores why a QUEUED job waits; "" means that it does not wait.
// With emit it also writes an event.
func (s *Service) noteWaiting(ctx context.Context, j agentlab.Job, text string, emit bool) error {
	text = agentlab.Reason(text)
	if j.Waiting == text {
		return nil
	}
	_, err := s.cfg.Store.UpdateJob(ctx, j.ID, func(j *agentlab.Job) ([]agentlab.Event, error) {
		if j.Status != agentlab.JobQueued {
			return nil, nil
		}
		if j.Waiting, j.Phase = text, PhaseWaiting; text == "" {
			j.Phase = ""
		}
		if !emit || text == "" {
			return nil, nil
		}
		e := jobEvent(agentlab.EventJobPhase, *j, map[string]any{"phase": j.Phase, "waiting": text}, "job %s %s", j.ID, text)
		if j.ParentID == "" {
			return []agentlab.Event{e}, nil
		}
		return []agentlab.Event{e, e.About(0, j.ParentID)}, nil // who follows the job with several attempts sees it too
	})
	return err
}

func jobEvent(kind string, j agentlab.Job, data map[string]any, format string, args ...any) agentlab.Event {
	return agentlab.NewEvent(kind, data, format, args...).About(j.SandboxVMID, j.ID)
}
