package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// On returns the backend of a sandbox. If the daemon does not have it, all methods of the
// result return an error: its VM may be running, and nothing about it is known.
func (s *Core) On(sb agentlab.Sandbox) *fleet.Backend { return s.cfg.Fleet.Of(sb.Backend) }

// missing returns the name of a backend that the daemon does not have, otherwise "".
func (s *Core) missing(name string) string {
	if s.cfg.Fleet.Of(name).Missing() == nil {
		return ""
	}
	return name
}

// Elsewhere reports whether a sandbox belongs to a backend that the daemon does not have.
// It is not changed.
func (s *Core) Elsewhere(sb agentlab.Sandbox) bool {
	return s.missing(sb.Backend) != "" && sb.State != agentlab.SandboxDestroyed
}

// Reachable returns an error with code conflict if the daemon does not have the backend of a
// sandbox.
func (s *Core) Reachable(sb agentlab.Sandbox) error {
	if !s.Elsewhere(sb) {
		return nil
	}
	err := s.On(sb).Missing()
	return agentlab.Errorf(agentlab.CodeConflict, "sandbox %s (%d) cannot be used: %w", sb.Name, sb.VMID, err)
}

// skipElsewhere is the step of a sandbox of another backend: its row shows why
// nothing happens to it.
func (s *Service) skipElsewhere(ctx context.Context, sb agentlab.Sandbox) time.Duration {
	err := s.Reachable(sb)
	if text := agentlab.Reason(agentlab.TextWithHint(err)); text != sb.Waiting {
		s.SetWaiting(ctx, sb, text, err)
	}
	return s.idleLimit()
}

// logElsewhere logs the sandboxes of other backends when the service starts.
func (s *Service) logElsewhere(rows []agentlab.Sandbox) {
	for _, sb := range rows {
		if err := s.Reachable(sb); err != nil {
			s.log.Warn("a sandbox is not managed", "vmid", sb.VMID, "err", agentlab.TextWithHint(err))
		}
	}
}

// findElsewhere returns a finding about the sandboxes of other backends.
func (s *Service) findElsewhere() []backend.Finding {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, other := 0, ""
	for _, m := range s.states {
		if name := s.missing(m.backend); name != "" {
			n++
			other = max(other, name)
		}
	}
	if n == 0 {
		return nil
	}
	return []backend.Finding{{
		Name: "other backends", Level: backend.LevelWarn,
		Detail: fmt.Sprintf("%s belong to another backend, for example %s; they are not managed, and their VMs may be running", agentlab.Plural(n, "sandbox"), other),
		Remedy: fmt.Sprintf("add backend %s to config.yaml and restart agentlabd", other),
	}}
}
