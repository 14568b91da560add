package job

import (
	"context"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
)

// progressPause is the shortest time between two events about the progress of
// one job.
const progressPause = 5 * time.Second

// progress is what is remembered of how far a clone is.
type progress struct {
	place int // in the order of steps and percents; 0 before the first
	at    time.Time
}

// stepTexts says what the steps of a clone are called in events.
var stepTexts = map[string]string{
	guestapi.StepDownload: "fetching the repository", guestapi.StepReceive: "receiving objects",
	guestapi.StepResolve: "resolving deltas", guestapi.StepCheckout: "checking out files",
}

// noteProgress makes an event of how far a clone is, when that is new and the
// last one is not recent. Only a known step and a number of the guest's report
// get into it, and only further ones: so a job has at most 404 such events.
func (s *Service) noteProgress(ctx context.Context, j agentlab.Job, r guestapi.Report) error {
	if r.Progress == nil || r.Phase != "clone" || j.Phase != "clone" {
		return nil
	}
	place := slices.Index(guestcheck.Steps, r.Progress.Step)*101 + r.Progress.Percent + 1
	now := s.clock()
	s.mu.Lock()
	l := s.remember(j.ID)
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
