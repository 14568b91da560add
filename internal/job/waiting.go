package job

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// tellAfter is how long a sandbox cannot be had until the job tells why.
const tellAfter = 5 * time.Second

// triedFor is how long it is since this was first called for a job.
func (s *Service) triedFor(id string) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, l := s.clock(), s.remember(id)
	if l.tried.IsZero() {
		l.tried = now
	}
	return now.Sub(l.tried)
}

// waits is what a job says that waits because of err.
func waits(err error) string {
	text := "waits for a sandbox: " + err.Error()
	if hint := agentlab.HintOf(err); hint != "" {
		text += " (" + hint + ")"
	}
	return text
}

// noteWaiting writes down why a QUEUED job waits; "" when it does not. An event
// tells of it when nothing else does.
func (s *Service) noteWaiting(ctx context.Context, j agentlab.Job, text string, tell bool) error {
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
		if !tell || text == "" {
			return nil, nil
		}
		return []agentlab.Event{jobEvent(agentlab.EventJobPhase, *j,
			map[string]any{"phase": j.Phase, "waiting": text}, "job %s %s", j.ID, text)}, nil
	})
	return err
}
