package sandbox

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// leaseGrace is how long after the end of a lease the backend powers the VM
// off by itself. While this service runs, it acts first: it ends jobs and asks
// guests to power off, which takes less time.
const leaseGrace = 2 * time.Minute

// setDeadline sends the end of the lease of a sandbox to the backend, unless the
// backend already has it. The lease then also ends while no daemon runs.
func (s *Service) setDeadline(ctx context.Context, sb agentlab.Sandbox) error {
	b := s.On(sb)
	if b.Power == nil || !b.Can().Deadlines {
		return nil
	}
	known := false
	s.withState(sb.VMID, func(m *runtimeState) { known = m.lease.Equal(sb.LeaseExpiresAt) })
	if known {
		return nil
	}
	left := max(sb.LeaseExpiresAt.Sub(s.clock()), 0) + leaseGrace
	err := b.Power.SetDeadline(ctx, backend.RefOf(sb), backend.Deadline{Lease: sb.LeaseExpiresAt, Left: left})
	if agentlab.CodeOf(err) == agentlab.CodeUnsupported {
		s.log.Warn("the lease of a sandbox is not enforced while no daemon runs", "vmid", sb.VMID, "err", err)
		err = nil
	}
	if err == nil {
		s.withState(sb.VMID, func(m *runtimeState) { m.lease = sb.LeaseExpiresAt })
	}
	return err
}

// expired handles a VM that its backend powered off because its lease ended.
// The lease counts as ended, whatever the daemon's clock says.
func (s *Service) expired(ctx context.Context, sb agentlab.Sandbox) error {
	now := s.clock().UTC()
	_, err := s.Update(ctx, sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.Before(sb.LeaseExpiresAt) {
			sb.LeaseExpiresAt = now
		}
		return nil, nil
	})
	return err
}

// leaseReason is why a sandbox is TIMEOUT.
func (s *Service) leaseReason(ctx context.Context, sb agentlab.Sandbox) string {
	const reason = "its lease ended"
	b := s.On(sb)
	if !b.Can().Deadlines || !sb.State.HasVM() {
		return reason
	}
	if in, err := b.Inspect(ctx, backend.RefOf(sb)); err == nil && in.Expired {
		return reason + "; it was powered off by its supervisor, because agentlabd did not end it"
	}
	return reason
}
