package sandbox

import (
	"cmp"
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// stepPooled is stepOnce for a sandbox of the pool.
func (s *Service) stepPooled(ctx context.Context, sb agentlab.Sandbox) (again time.Duration, done bool, err error) {
	switch {
	case sb.Desired == agentlab.DesiredDestroyed:
		return 0, false, s.destroy(ctx, sb)
	case !s.clock().Before(sb.LeaseExpiresAt):
		s.pool.Drop(ctx, sb.VMID, "it has waited for "+agentlab.FormatTTL(sb.LeaseExpiresAt.Sub(sb.CreatedAt)))
		return time.Second, true, nil // if the row could not be changed
	case sb.State != agentlab.SandboxPooled:
		return s.driveRunning(ctx, sb)
	case s.Inspected(sb.VMID):
		return 0, true, nil
	}
	in, err := s.On(sb).Inspect(ctx, backend.RefOf(sb))
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
		return 0, true, err
	}
	if err != nil || in.Power != s.pooledPower(sb) {
		return 0, false, s.MarkFailed(ctx, sb, "its VM has ended (%s) while it waited in the warm pool: %s", cmp.Or(in.Power, "gone"), in.Reason)
	}
	s.setInspected(sb.VMID)
	return 0, true, nil
}

// pooledPower is the power state of a POOLED sandbox.
func (s *Service) pooledPower(sb agentlab.Sandbox) backend.PowerState {
	if s.On(sb).Power != nil {
		return backend.PowerSuspended
	}
	return backend.PowerRunning
}
