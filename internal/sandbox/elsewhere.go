package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// A sandbox of a backend other than the configured one is not changed: its VM
// may be running, and the driver of this process cannot see it.

// elsewhere reports whether a sandbox belongs to another backend.
func (s *Service) elsewhere(sb agentlab.Sandbox) bool {
	return sb.Backend != s.cfg.Driver.Info().Name && sb.State != agentlab.SandboxDestroyed
}

// reachable returns an error with code conflict if a sandbox belongs to another
// backend.
func (s *Service) reachable(sb agentlab.Sandbox) error {
	if !s.elsewhere(sb) {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeConflict, "sandbox %s (%d) belongs to backend %s, and the configured backend is %s", sb.Name, sb.VMID, sb.Backend, s.cfg.Driver.Info().Name).
		WithHint("set 'backend: %s' in config.yaml and restart agentlabd", sb.Backend)
}

// skipElsewhere is the step of a sandbox of another backend: its row shows why
// nothing happens to it.
func (s *Service) skipElsewhere(ctx context.Context, sb agentlab.Sandbox) time.Duration {
	err := s.reachable(sb)
	if text := agentlab.Reason(agentlab.TextWithHint(err)); text != sb.Waiting {
		s.setWaiting(ctx, sb, text, err)
	}
	return maxIdle
}

// logElsewhere logs the sandboxes of other backends when the service starts.
func (s *Service) logElsewhere(rows []agentlab.Sandbox) {
	for _, sb := range rows {
		if err := s.reachable(sb); err != nil {
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
		if m.elsewhere != "" {
			n++
			other = max(other, m.elsewhere)
		}
	}
	if n == 0 {
		return nil
	}
	return []backend.Finding{{
		Name: "other backends", Level: backend.LevelWarn,
		Detail: fmt.Sprintf("%s belong to another backend, for example %s; they are not managed, and their VMs may be running", agentlab.Plural(n, "sandbox"), other),
		Remedy: fmt.Sprintf("set 'backend: %s' in config.yaml and restart agentlabd", other),
	}}
}
