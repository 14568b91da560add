package job

import (
	"context"

	"github.com/agentlab-vm/agentlab"
)

// ForgetSecrets forgets what guests were given that are not heard any more:
// the sandbox is gone, and its job, if it had one, has ended. It tells how
// many those were.
func (s *Service) ForgetSecrets(ctx context.Context) (int, error) {
	s.mu.Lock()
	for id := range s.redactions { // of jobs that have ended, and sandboxes without one
		if s.live[id] == nil {
			delete(s.redactions, id)
		}
	}
	s.mu.Unlock()
	return s.cfg.Secrets.SweepKept(ctx, func(ctx context.Context, id string) (bool, error) {
		if agentlab.ValidateJobID(id) == nil {
			return s.unheard(ctx, id)
		}
		left, err := s.cfg.Sandboxes.List(ctx, agentlab.SandboxFilter{})
		for _, sb := range left {
			if sb.UID == id {
				return false, err
			}
		}
		return err == nil, err
	})
}

// unheard tells whether a job has ended and its sandbox is gone.
func (s *Service) unheard(ctx context.Context, id string) (bool, error) {
	known, err := s.Known(ctx, id)
	if err != nil || !known {
		return err == nil, err
	}
	j, err := s.cfg.Store.Job(ctx, id)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return false, nil // it is just being made
	}
	if err != nil || !j.Status.Final() {
		return false, err
	}
	sb, err := s.cfg.Store.Sandbox(ctx, j.SandboxVMID)
	if j.SandboxVMID == 0 { // it may not have been written down
		sb, err = s.cfg.Store.SandboxByName(ctx, j.ID)
	}
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return true, nil
	}
	// Another sandbox may have its number by now.
	return err == nil && (sb.State == agentlab.SandboxDestroyed || sb.JobID != j.ID), err
}
