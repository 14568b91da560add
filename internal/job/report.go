package job

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
)

// PhaseWaiting is the phase of a QUEUED job that waits because a limit is
// reached. The runner reports all other phases.
const PhaseWaiting = "waiting"

// jobOf returns the job of a sandbox whose guest calls.
func (s *Service) jobOf(ctx context.Context, vmid int) (agentlab.Job, error) {
	sb, err := s.cfg.Store.Sandbox(ctx, vmid)
	if err != nil {
		return agentlab.Job{}, err
	}
	if sb.JobID == "" {
		return agentlab.Job{}, agentlab.Errorf(agentlab.CodeDenied, "sandbox %d has no job", vmid)
	}
	return s.cfg.Store.Job(ctx, sb.JobID)
}

// Started records that the runner of a sandbox has fetched its job and
// secrets.
func (s *Service) Started(ctx context.Context, vmid int) {
	s.cfg.Sandboxes.Wake(vmid)
	j, err := s.jobOf(ctx, vmid)
	if err != nil || j.Status.Final() {
		return
	}
	s.mu.Lock()
	s.track(j.ID).lastHeard = s.clock()
	s.mu.Unlock()
	s.loop.Wake(j.ID)
}

// Report records the progress of the job of a sandbox, and returns what its
// runner must do. It may be sent again. A report for a job that is final, or
// one of an earlier phase, changes nothing. Codes: denied, invalid, conflict.
func (s *Service) Report(ctx context.Context, vmid int, r guestapi.Report) (guestapi.Directive, error) {
	if err := guestcheck.Report(&r); err != nil {
		return guestapi.Directive{}, err
	}
	j, err := s.jobOf(ctx, vmid)
	if err != nil {
		return guestapi.Directive{}, err
	}
	if j.Status == agentlab.JobQueued {
		return guestapi.Directive{}, agentlab.Errorf(agentlab.CodeConflict, "%s has not started", j.ID)
	}
	if !j.Status.Final() {
		s.mu.Lock()
		s.track(j.ID).lastHeard = s.clock()
		s.mu.Unlock()
		if j, err = s.record(ctx, j, r); err != nil {
			return guestapi.Directive{}, err
		}
	}
	return s.directive(j), nil
}

// record stores what is new in a report.
func (s *Service) record(ctx context.Context, j agentlab.Job, r guestapi.Report) (agentlab.Job, error) {
	j, err := s.noteKills(ctx, j, r)
	if err != nil {
		return j, err
	}
	if r.Status == string(agentlab.JobRunning) && !phaseAfter(r.Phase, j.Phase) {
		return j, s.noteProgress(ctx, j, r) // a heartbeat
	}
	var files []agentlab.Artifact
	if agentlab.JobStatus(r.Status).Final() {
		list, err := s.cfg.Artifacts.List(ctx, j.ID)
		if err != nil {
			return j, err
		}
		files = list
	}
	trouble := ""
	if isFailure(r) {
		if d := s.readDenials(ctx, j, true); d.count > 0 {
			trouble = d.String()
		} else if r.KeyRejected {
			trouble = s.rejectedKey(ctx, j)
		}
	}
	return s.cfg.Store.UpdateJob(ctx, j.ID, func(j *agentlab.Job) ([]agentlab.Event, error) {
		if j.Status != agentlab.JobRunning {
			return nil, nil
		}
		var evs []agentlab.Event
		if phaseAfter(r.Phase, j.Phase) {
			j.Phase = r.Phase
			text := fmt.Sprintf("job %s: %s", j.ID, j.Phase)
			if r.Message != "" {
				text += ": " + r.Message
			}
			evs = append(evs, jobEvent(agentlab.EventJobPhase, *j, map[string]any{"phase": j.Phase}, "%s", text))
		}
		if r.Status == string(agentlab.JobRunning) {
			return evs, nil
		}
		status, reason := s.finalStatus(*j, r)
		if trouble != "" && reason != j.Reason {
			reason += "; " + trouble
		}
		j.ExitCode = r.ExitCode
		if r.Result != nil {
			j.Result = agentlab.JobResult(*r.Result)
		}
		evs = append(evs, j.End(status, reason, s.clock()))
		return append(evs, unshipped(*j, files)...), nil
	})
}

// isFailure reports whether a report ends its job with a status other than
// COMPLETED.
func isFailure(r guestapi.Report) bool {
	status := agentlab.JobStatus(r.Status)
	return status.Final() && (status != agentlab.JobCompleted || r.ExitCode != nil && *r.ExitCode != 0)
}

// phaseAfter reports whether phase a comes after phase b.
func phaseAfter(a, b string) bool {
	return slices.Index(guestcheck.Phases, a) > slices.Index(guestcheck.Phases, b)
}

// deadlineSlack is how far the clock of the runner may be ahead of the daemon's when
// it reports that the job's time is over. It is less for a short job.
func deadlineSlack(j agentlab.Job) time.Duration { return min(time.Minute, j.TTL/10) }

// finalStatus returns the final status of a job and its reason from its runner's
// final report. A failure stays a failure. A guest cannot report success for
// an agent that failed. It can report that its agent was stopped only if a
// stop was requested or the job's time is over; the status is then that of the
// request.
func (s *Service) finalStatus(j agentlab.Job, r guestapi.Report) (status agentlab.JobStatus, reason string) {
	if j.StopRequested == string(agentlab.JobFailed) && isFailure(r) {
		return agentlab.JobFailed, j.Reason
	}
	status, reason = agentlab.JobStatus(r.Status), r.Message
	over := !s.clock().Before(j.DeadlineAt.Add(-deadlineSlack(j)))
	switch status {
	case agentlab.JobCompleted:
		if r.ExitCode != nil && *r.ExitCode != 0 {
			status = agentlab.JobFailed
		}
	case agentlab.JobCancelled, agentlab.JobTimeout:
		switch {
		case j.StopRequested != "":
			status = agentlab.JobStatus(j.StopRequested)
		case status == agentlab.JobCancelled || !over:
			return agentlab.JobFailed, cmp.Or(reason, "its runner stopped without a request")
		}
	default:
	}
	switch status {
	case agentlab.JobCancelled:
		reason = cmp.Or(reason, "cancelled by request")
	case agentlab.JobTimeout:
		reason = cmp.Or(reason, "the time limit of "+j.TTL.String()+" was exceeded")
	case agentlab.JobFailed:
		if reason == "" && r.ExitCode != nil {
			reason = fmt.Sprintf("the agent exited with code %d", *r.ExitCode)
		}
		reason = cmp.Or(reason, "its runner reported a failure")
	default:
	}
	return status, reason
}

// Directive returns what the runner of a sandbox must do. With wait > 0 it
// returns when the runner must stop, or when wait is over.
func (s *Service) Directive(ctx context.Context, vmid int, wait time.Duration) (guestapi.Directive, error) {
	over := time.After(wait)
	for {
		j, err := s.jobOf(ctx, vmid)
		if err != nil {
			return guestapi.Directive{}, err
		}
		var changed <-chan struct{}
		if !j.Status.Final() {
			s.mu.Lock()
			changed = s.track(j.ID).changed
			s.mu.Unlock()
			// The row has the changes from before the channel was
			// read.
			if j, err = s.cfg.Store.Job(ctx, j.ID); err != nil {
				return guestapi.Directive{}, err
			}
		}
		d := s.directive(j)
		if d.Stop != "" || wait <= 0 || j.Status.Final() {
			return d, nil
		}
		select {
		case <-changed:
		case <-over:
			wait = 0
		case <-ctx.Done():
			return guestapi.Directive{}, agentlab.Errorf(agentlab.CodeUnavailable, "the request was cancelled: %w", ctx.Err())
		}
	}
}

// directive returns what the runner must do, from the row of its job.
func (s *Service) directive(j agentlab.Job) guestapi.Directive {
	d := guestapi.Directive{Stop: j.StopRequested}
	switch d.Stop {
	case string(agentlab.JobFailed): // a runner supports two kinds of stop
		d.Stop, d.Reason = string(agentlab.JobCancelled), j.Reason
	case string(agentlab.JobCancelled):
		d.Reason = j.Reason
	}
	switch j.Status {
	case agentlab.JobCompleted:
		return guestapi.Directive{}
	case agentlab.JobTimeout:
		return guestapi.Directive{Stop: string(agentlab.JobTimeout), Reason: j.Reason}
	case agentlab.JobFailed:
		return guestapi.Directive{Stop: string(agentlab.JobCancelled), Reason: j.Reason}
	case agentlab.JobCancelled:
		return guestapi.Directive{Stop: string(agentlab.JobCancelled)}
	default:
	}
	if !j.DeadlineAt.IsZero() {
		d.SecondsLeft = max(int64(j.DeadlineAt.Sub(s.clock()).Seconds()), 1)
	}
	return d
}

// progressPause is the minimum time between two events about the progress of
// one job.
const progressPause = 5 * time.Second

// progress is the last reported progress of a clone.
type progress struct {
	place int // in the order of steps and percents; 0 before the first
	at    time.Time
}

// stepTexts has the names of the steps of a clone in events.
var stepTexts = map[string]string{
	guestapi.StepDownload: "fetching the repository", guestapi.StepReceive: "receiving objects",
	guestapi.StepResolve: "resolving deltas", guestapi.StepCheckout: "checking out files",
}

// noteProgress writes an event about the progress of a clone, if it has
// advanced and the last event is not recent. The event has only a known step
// and a number from the guest's report, and both only increase, so a job has
// at most 404 such events.
func (s *Service) noteProgress(ctx context.Context, j agentlab.Job, r guestapi.Report) error {
	if r.Progress == nil || r.Phase != "clone" || j.Phase != "clone" {
		return nil
	}
	place := slices.Index(guestcheck.Steps, r.Progress.Step)*101 + r.Progress.Percent + 1
	now := s.clock()
	s.mu.Lock()
	l := s.track(j.ID)
	old := l.progress
	isNew := place > old.place && now.Sub(old.at) >= progressPause
	if isNew {
		l.progress = progress{place, now}
	}
	s.mu.Unlock()
	if !isNew {
		return nil
	}
	data := map[string]any{"phase": j.Phase, "step": r.Progress.Step, "percent": r.Progress.Percent}
	return s.cfg.Store.AppendEvents(ctx, jobEvent(agentlab.EventJobPhase, j, data, "job %s: clone: %s, %d%%", j.ID, stepTexts[r.Progress.Step], r.Progress.Percent))
}
