package sandbox

import (
	"context"
	"time"

	"golang.org/x/time/rate"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// vmDown handles a VM that should run but does not: a guest that powered itself
// off is STOPPED, anything else FAILED. A kept sandbox survives a restart of its
// host: it is STOPPED, and started again if its desired state is running. So is a
// sandbox whose guest rebooted while no job ran.
func (s *Service) vmDown(ctx context.Context, sb agentlab.Sandbox, in backend.Instance, why string) error {
	if in.Expired {
		return s.expired(ctx, sb)
	}
	desired := agentlab.DesiredStopped
	var rebooted *rate.Limiter
	switch {
	case !sb.State.CanBecome(agentlab.SandboxStopped):
		return s.MarkFailed(ctx, sb, "%s", why)
	case in.HostRestarted && sb.Keepalive && sb.Desired == agentlab.DesiredRunning:
		desired, why = agentlab.DesiredRunning, why+"; it is started again"
	case in.HostRestarted && sb.Keepalive:
		why += "; its memory contents are lost"
	case in.HostRestarted:
		return s.MarkFailed(ctx, sb, "%s; a sandbox without keepalive is not started again", why)
	case in.GuestRebooted && sb.State != agentlab.SandboxRunning && sb.Desired == agentlab.DesiredRunning:
		rebooted = s.rebootLimit(sb.VMID)
		if rebooted.TokensAt(s.clock()) < 1 {
			why = "the guest rebooted itself too often; it is not started again"
			break
		}
		desired, why = agentlab.DesiredRunning, "the guest rebooted itself; it is started again"
	case in.Power != backend.PowerStopped:
		return s.MarkFailed(ctx, sb, "%s", why)
	}
	s.CloseGuestListener(sb.VMID)
	_, err := s.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.State != sb.State || now.Desired != sb.Desired {
			return nil, nil
		}
		now.State, now.Desired, now.Reason, now.IP = agentlab.SandboxStopped, desired, why, ""
		return []agentlab.Event{StateEvent(*now, sb.State)}, nil
	})
	if err == nil && rebooted != nil { // an error is tried again
		rebooted.AllowN(s.clock(), 1)
	}
	return err
}

// Limits on the reboots of a guest. A start has a slot for booting, which a hostile
// guest holds for BootTimeout.
const (
	maxReboots  = 5 // at once
	rebootEvery = 30 * time.Minute
)

// rebootLimit returns the limit on the reboots of a guest.
func (s *Service) rebootLimit(vmid int) (limit *rate.Limiter) {
	s.withState(vmid, func(m *runtimeState) {
		if m.reboots == nil {
			m.reboots = rate.NewLimiter(rate.Every(rebootEvery), maxReboots)
		}
		limit = m.reboots
	})
	return limit
}
