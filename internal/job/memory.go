package job

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// killsPause is the least time between two events of a job about processes that were
// killed. A guest can report any number.
const killsPause = time.Minute

// noteKills writes an event if the kernel of the guest has ended more processes than
// before, because memory was used up.
func (s *Service) noteKills(ctx context.Context, j agentlab.Job, r guestapi.Report) (agentlab.Job, error) {
	if r.Kills == nil || r.Kills.Total() <= j.MemoryKills {
		return j, nil
	}
	now := s.clock()
	s.mu.Lock()
	l := s.track(j.ID)
	soon := now.Sub(l.killsAt) < killsPause
	if !soon {
		l.killsAt = now
	}
	s.mu.Unlock()
	if soon && !agentlab.JobStatus(r.Status).Final() {
		return j, nil
	}
	return s.cfg.Store.UpdateJob(ctx, j.ID, func(j *agentlab.Job) ([]agentlab.Event, error) {
		if j.Status != agentlab.JobRunning || r.Kills.Total() <= j.MemoryKills {
			return nil, nil
		}
		j.MemoryKills = r.Kills.Total()
		data := map[string]any{"nested": r.Kills.Nested, "other": r.Kills.Other}
		return []agentlab.Event{jobEvent(agentlab.EventJobMemory, *j, data, "job %s: %s", j.ID, *r.Kills)}, nil
	})
}
