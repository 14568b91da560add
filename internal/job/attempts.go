package job

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// planAttempts is plan for a job with several attempts. Each attempt is checked
// like a job of its own.
func (s *Service) planAttempts(ctx context.Context, r agentlab.JobRequest, prof agentlab.Profile) (p planned, err error) {
	a := r.Attempts
	invalid := func(field, format string, args ...any) *agentlab.Error {
		return agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField(field)
	}
	p.profile = prof
	if err := a.Validate(); err != nil {
		return p, err
	}
	switch {
	case r.Sandbox != nil:
		return p, invalid("attempts", "a job in a requested sandbox has one attempt")
	case r.Keepalive != nil && *r.Keepalive:
		return p, invalid("keepalive", "the sandboxes of attempts are not kept")
	case r.Agent != "" && len(a.Agents) > 0:
		return p, invalid("agent", "both the job and its attempts have agents")
	case r.Task != "" && len(a.Tasks) > 0:
		return p, invalid("task", "both the job and its attempts have tasks")
	case !prof.UploadArtifacts:
		return p, invalid("profile", "profile %s uploads no artifacts, so attempts have no result", prof.Name).
			WithHint("set artifacts.upload: true in the profile, or choose another with --profile")
	}
	if len(a.Agents) > 0 {
		r.Agent = a.Agents[0]
	}
	if len(a.Tasks) > 0 {
		r.Task = a.Tasks[0]
	}
	p.job = s.newJob(r, prof)
	p.job.Attempts, p.job.Pick, p.job.Keepalive = a.Count, a.Pick, false
	if p.job.Agent == agentlab.AgentNone {
		return p, invalid("agent", "a job without an agent has one attempt")
	}
	p.attempts = a.Split(p.job)
	images, on := map[string]bool{}, ""
	for i := range p.attempts {
		p.attempts[i].ID = agentlab.NewJobID()
		_, sb, _, err := s.checkJob(ctx, p.attempts[i], r, prof)
		if err != nil {
			return p, err
		}
		images[sb.Image], on = true, sb.Backend
	}
	s.planFork(&p, on, images)
	return p, nil
}

// parts returns the jobs of which a planned job consists, with their events.
func (p planned) parts() (parts []agentlab.Job, evs []agentlab.Event) {
	parts = slices.Clone(p.attempts)
	if p.noFork != nil {
		evs = append(evs, *p.noFork)
	}
	if c := p.preparation; c != nil {
		parts = append(parts, *c)
		of := "the attempts of " + c.ParentID
		if p.job.Attempts == 0 {
			of = c.ParentID
		}
		evs = append(evs, jobEvent(agentlab.EventJobCreated, *c, map[string]any{"agent": c.Agent, "profile": c.Profile, "parent_id": c.ParentID},
			"job %s is QUEUED: it prepares the sandbox of %s", c.ID, of))
	}
	for _, a := range p.attempts {
		evs = append(evs, jobEvent(agentlab.EventJobCreated, a, map[string]any{"agent": a.Agent, "profile": a.Profile, "parent_id": a.ParentID, "attempt": a.Attempt},
			"job %s is QUEUED: attempt %d of %s, agent %s", a.ID, a.Attempt, a.ParentID, a.Agent))
	}
	return parts, evs
}

// Attempts returns the attempts of a job in their order.
func (s *Service) Attempts(ctx context.Context, id string) ([]agentlab.Job, error) {
	list, _, err := s.family(ctx, id)
	return list, err
}

// wakeRelatives wakes the job of an attempt that has ended, or the attempts of a
// job that has ended, or for which a sandbox was prepared.
func (s *Service) wakeRelatives(ctx context.Context, j agentlab.Job) error {
	if j.ParentID != "" {
		s.loop.Wake(j.ParentID)
	}
	if j.Attempts == 0 && !j.Prepares() && j.Setup.Entry.Key == "" {
		return nil
	}
	return s.wakeAttempts(ctx, j.OwnerID())
}

// wakeAttempts wakes the attempts of a job that have not ended, and the job that
// prepares their sandbox: they read from its row whether they continue.
func (s *Service) wakeAttempts(ctx context.Context, id string) error {
	list, err := s.cfg.Store.Jobs(ctx, agentlab.JobFilter{ParentID: id})
	for _, a := range list {
		if !a.Status.Final() {
			s.loop.Wake(a.ID)
		}
	}
	return err
}

// followParent cancels an attempt whose job needs it no longer: the job has
// ended, is being cancelled, or another attempt won. ended reports that it has
// ended at once.
func (s *Service) followParent(ctx context.Context, j agentlab.Job) (ended bool, err error) {
	if j.ParentID == "" {
		return false, nil
	}
	p, err := s.cfg.Store.Job(ctx, j.ParentID)
	why := ""
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		why = "its job was not found"
	case err != nil:
		return false, err
	case p.Winner != 0:
		why = fmt.Sprintf("attempt %d won", p.Winner)
	case p.Status.Final():
		why = "its job is " + string(p.Status)
	case p.StopRequested != "":
		why = "its job was cancelled"
	default:
		if p.Status == agentlab.JobQueued && j.Status == agentlab.JobRunning {
			s.loop.Wake(p.ID)
		}
		return false, nil
	}
	if j.StopRequested != "" {
		return false, nil
	}
	j, err = s.cfg.Store.UpdateJob(ctx, j.ID, func(j *agentlab.Job) ([]agentlab.Event, error) {
		switch {
		case j.Status == agentlab.JobQueued:
			return []agentlab.Event{j.End(agentlab.JobCancelled, why, s.clock())}, nil
		case j.Status.Final() || j.StopRequested != "":
			return nil, nil
		}
		j.StopRequested, j.Reason = string(agentlab.JobCancelled), why
		return []agentlab.Event{jobEvent(agentlab.EventJobStatus, *j, map[string]any{"status": j.Status, "stop": j.StopRequested},
			"job %s is being cancelled: %s; its runner may upload for %s", j.ID, why, s.lim.CancelWindow)}, nil
	})
	return j.Status.Final(), err
}

// stepAttempts brings a job with several attempts closer to its end. The
// attempts run as jobs of their own. The winner is recorded before the others
// are cancelled; the job ends after all attempts have ended and their files are
// its own.
func (s *Service) stepAttempts(ctx context.Context, j agentlab.Job) (time.Duration, error) {
	list, prep, err := s.family(ctx, j.ID)
	if err != nil {
		return 0, err
	}
	ended := 0
	for _, a := range list {
		if a.Status.Final() {
			ended++
		}
	}
	if j, err = s.noteAttempts(ctx, j, list, prep, ended); err != nil {
		return 0, err
	}
	if err := s.releaseFork(ctx, j, list); err != nil {
		return 0, err
	}
	if ended < len(list) {
		if j.Winner == 0 && j.StopRequested == "" {
			return maxDuration, nil // the end of an attempt wakes the loop
		}
		return maxDuration, s.wakeAttempts(ctx, j.ID)
	}
	if err := s.collectAttempts(ctx, j, list, prep); err != nil {
		return 0, err
	}
	if j.Bundled { // before the end: a process that begins later does not look at ended jobs
		if err := s.cfg.Artifacts.DropBundle(j.ID); err != nil {
			return 0, err
		}
	}
	fork := j.Fork
	j, err = s.cfg.Store.UpdateJob(ctx, j.ID, func(j *agentlab.Job) ([]agentlab.Event, error) {
		if j.Status.Final() || j.Fork != fork {
			return nil, nil
		}
		return []agentlab.Event{endAttempts(j, list, prep, s.clock())}, nil
	})
	if j.Fork != fork { // its snapshot is deleted first
		s.loop.Wake(j.ID)
	}
	return 0, err
}

// endAttempts ends a job whose attempts have ended.
func endAttempts(j *agentlab.Job, list []agentlab.Job, prep *agentlab.Job, now time.Time) agentlab.Event {
	switch best := agentlab.FindAttempt(list, j.Winner); {
	case best != nil:
		j.ExitCode, j.Result = best.ExitCode, best.Result
		return j.End(agentlab.JobCompleted, "", now)
	case j.StopRequested != "":
		return j.End(agentlab.JobStatus(j.StopRequested), "cancelled by request", now)
	case prep != nil && prep.Status.Final() && prep.Status != agentlab.JobCompleted:
		return j.End(prep.Status, preparationEnd(*prep), now)
	}
	var each []string
	for _, a := range list {
		each = append(each, fmt.Sprintf("%d %s", a.Attempt, attemptEnd(a)))
	}
	return j.End(agentlab.JobFailed, "no attempt won: "+strings.Join(each, ", "), now)
}

// attemptEnd returns how an attempt ended, in a few words.
func attemptEnd(a agentlab.Job) string {
	switch r := a.Result; {
	case a.Status != agentlab.JobCompleted && a.ExitCode != nil && *a.ExitCode != 0:
		return fmt.Sprintf("%s (exit %d)", a.Status, *a.ExitCode)
	case a.Status != agentlab.JobCompleted || a.Pick == "":
		return string(a.Status)
	case r.JudgeExit == nil:
		return "not judged"
	case r.Score != nil:
		return fmt.Sprintf("judge exit %d, number %g", *r.JudgeExit, *r.Score)
	default:
		return fmt.Sprintf("judge exit %d", *r.JudgeExit)
	}
}

// noteAttempts records what is new about the attempts of a job: that the first
// has started, how many have ended, and which one won. With a command that
// judges, the winner is known when all have ended.
func (s *Service) noteAttempts(ctx context.Context, j agentlab.Job, list []agentlab.Job, prep *agentlab.Job, ended int) (agentlab.Job, error) {
	return s.cfg.Store.UpdateJob(ctx, j.ID, func(j *agentlab.Job) (evs []agentlab.Event, err error) {
		if j.Status.Final() {
			return nil, nil
		}
		started := prep != nil && prep.Status != agentlab.JobQueued
		for _, a := range list {
			started = started || a.Status != agentlab.JobQueued
		}
		if j.Status == agentlab.JobQueued && started {
			j.Status, j.StartedAt = agentlab.JobRunning, s.clock().UTC()
			evs = append(evs, jobEvent(agentlab.EventJobStatus, *j, map[string]any{"status": j.Status}, "job %s is %s", j.ID, j.Status))
		}
		phase := fmt.Sprintf("attempts %d/%d", ended, len(list))
		if prep != nil && !prep.Status.Final() {
			phase = phasePrepare
		}
		if started && phase != j.Phase {
			j.Phase = phase
			if ended > 0 {
				evs = append(evs, jobEvent(agentlab.EventJobPhase, *j, map[string]any{"phase": phase}, "job %s: %d of %d attempts have ended", j.ID, ended, len(list)))
			}
		}
		best := agentlab.Best(list)
		if j.Winner == 0 && best != nil && j.StopRequested == "" && (j.Pick == "" || ended == len(list)) {
			j.Winner = best.Attempt
			evs = append(evs, jobEvent(agentlab.EventJobPhase, *j, map[string]any{"phase": j.Phase, "winner": j.Winner},
				"job %s: attempt %d (%s) won: %s", j.ID, best.Attempt, best.Agent, attemptEnd(*best)))
		}
		return evs, nil
	})
}

// phasePrepare is the phase of a job while the sandbox of its attempts is
// prepared.
const phasePrepare = "prepare"

// attemptsDir is the directory of the attempts' files in the artifacts of their
// job.
const attemptsDir = "attempts"

// collectAttempts makes the artifacts of the winner, and the diff, log and
// report of every attempt, and the log of their preparation, artifacts of their
// job. It may be called again.
func (s *Service) collectAttempts(ctx context.Context, j agentlab.Job, list []agentlab.Job, prep *agentlab.Job) error {
	if prep != nil {
		if err := s.ignoreRefused(*prep, s.cfg.Artifacts.ShareLog(ctx, prep.ID, j.ID, agentlab.PrepareLog)); err != nil {
			return err
		}
	}
	for _, a := range list {
		files, err := s.cfg.Artifacts.List(ctx, a.ID)
		if err != nil {
			return err
		}
		own := fmt.Sprintf("%s/%d/", attemptsDir, a.Attempt)
		logged := false
		for _, f := range files {
			var err error
			if f.Path == agentlab.ArtifactLog || f.Path == "changes.diff" || f.Path == "report.json" {
				logged = logged || f.Path == agentlab.ArtifactLog
				err = s.cfg.Artifacts.Share(ctx, f, j.ID, own+f.Path)
			}
			// A guest may have named a file like those of another attempt.
			if top, _, _ := strings.Cut(f.Path, "/"); err == nil && a.Attempt == j.Winner && top != attemptsDir && !agentlab.IsCheckpoint(f.Path) {
				err = s.cfg.Artifacts.Share(ctx, f, j.ID, f.Path)
			}
			if err = s.ignoreRefused(a, err); err != nil {
				return err
			}
		}
		if logged {
			continue
		}
		if err := s.ignoreRefused(a, s.cfg.Artifacts.ShareLog(ctx, a.ID, j.ID, own+agentlab.ArtifactLog)); err != nil {
			return err
		}
	}
	return nil
}

// ignoreRefused ignores that a file of an attempt cannot be a file of its job: it
// must not prevent the end of the job.
func (s *Service) ignoreRefused(a agentlab.Job, err error) error {
	switch agentlab.CodeOf(err) {
	case agentlab.CodeLimit, agentlab.CodeInvalid, agentlab.CodeConflict:
		s.log.Warn("a file of an attempt is not a file of its job", "job", a.ParentID, "attempt", a.Attempt, "err", err)
		return nil
	}
	return err
}
