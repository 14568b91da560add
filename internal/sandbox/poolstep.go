package sandbox

import (
	"cmp"
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// stepPooled is stepOnce for a sandbox of the pool.
func (s *Service) stepPooled(ctx context.Context, sb agentlab.Sandbox) (again time.Duration, done bool, err error) {
	switch {
	case sb.Desired == agentlab.DesiredDestroyed:
		return 0, false, s.destroy(ctx, sb)
	case !s.clock().Before(sb.LeaseExpiresAt):
		s.dropPooled(ctx, sb.VMID, "it has waited for "+agentlab.FormatTTL(poolTTL))
		return time.Second, true, nil // if the row could not be changed
	case sb.State != agentlab.SandboxPooled:
		return s.driveRunning(ctx, sb)
	case s.inspected(sb.VMID):
		return 0, true, nil
	}
	in, err := s.on(sb).Inspect(ctx, backend.RefOf(sb))
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
		return 0, true, err
	}
	if err != nil || in.Power != s.pooledPower(sb) {
		return 0, false, s.markFailed(ctx, sb, "its VM has ended (%s) while it waited in the warm pool: %s", cmp.Or(in.Power, "gone"), in.Reason)
	}
	s.setInspected(sb.VMID)
	return 0, true, nil
}

// pooledPower is the power state of a POOLED sandbox.
func (s *Service) pooledPower(sb agentlab.Sandbox) backend.PowerState {
	if s.on(sb).Power != nil {
		return backend.PowerSuspended
	}
	return backend.PowerRunning
}

// ensurePooled makes a sandbox whose VM runs POOLED, when its guest has booted. An
// error means that the guest does not answer, or still boots.
func (s *Service) ensurePooled(ctx context.Context, sb agentlab.Sandbox) error {
	h, err := s.health(ctx, sb)
	if err != nil {
		return err
	}
	if h.System != "running" && h.System != "degraded" && (h.System != "unknown" || h.Uptime < bootedUptime) {
		return agentlab.Errorf(agentlab.CodeUnavailable, "its init is %s", agentlab.OneLine(h.System, 20))
	}
	if err := s.warmGuest(ctx, sb); err != nil {
		return err
	}
	if power := s.on(sb).Power; power != nil {
		if err := power.Suspend(ctx, backend.RefOf(sb)); err != nil {
			return err
		}
	}
	in, err := s.on(sb).Inspect(ctx, backend.RefOf(sb))
	if err != nil {
		return err
	}
	_, err = s.update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.State == sb.State && now.Desired == sb.Desired {
			now.State, now.Handle = agentlab.SandboxPooled, in.Ref.Handle
		}
		return nil, nil
	})
	if err == nil {
		s.madePooled(sb.VMID)
		s.pool.wakeUp()
	}
	return err
}

// warmGuest lets the guest do what an identity would have to do, and runs a command,
// so that it has the code of both in memory.
func (s *Service) warmGuest(ctx context.Context, sb agentlab.Sandbox) error {
	ctx, cancel := context.WithTimeout(ctx, warmTimeout)
	defer cancel()
	defer s.asking(sb.VMID)()
	c := s.control(sb)
	if b := s.on(sb); b.Templates != nil { // its guests can get their identity as a copy
		if err := c.Prepare(ctx, guestapi.PrepareRequest{Network: b.Info().GuestNetwork}); err != nil {
			return err
		}
	}
	return c.Rehearse(ctx)
}
