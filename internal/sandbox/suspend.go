package sandbox

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Suspend asks for a READY sandbox to be frozen: its memory and disk stay, its
// CPUs stop, its lease continues. A suspended one is not changed. Codes:
// not_found; unsupported when the backend cannot; conflict in any other state:
// one with a job at work is not frozen, because its job's time would go on.
func (s *Service) Suspend(ctx context.Context, vmid int) (agentlab.Sandbox, error) {
	return s.requestChange(ctx, vmid, s.loop.Interrupt, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		_, able := s.cfg.Driver.(backend.Suspender)
		switch {
		case sb.Desired == agentlab.DesiredSuspended:
			return nil, nil
		case !able: // before its state: waiting for READY would not help
			return nil, agentlab.Errorf(agentlab.CodeUnsupported, "backend %s cannot suspend a sandbox", sb.Backend).
				WithHint("'agentlab sandbox stop %d' keeps its disk", vmid)
		case sb.State != agentlab.SandboxReady || sb.Desired != agentlab.DesiredRunning:
			return nil, conflict(*sb, "and only a READY sandbox can be suspended", "")
		}
		sb.Desired = agentlab.DesiredSuspended
		return nil, nil
	})
}

// Resume asks for a suspended sandbox to go on where it stood. One that runs
// is left as it is. Codes: not_found, conflict.
func (s *Service) Resume(ctx context.Context, vmid int) (agentlab.Sandbox, error) {
	return s.requestChange(ctx, vmid, s.loop.Interrupt, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		switch {
		case sb.Desired == agentlab.DesiredSuspended:
			sb.Desired = agentlab.DesiredRunning
		case sb.Desired != agentlab.DesiredRunning || !sb.State.HasVM():
			return nil, conflict(*sb, "and there is nothing to resume", "")
		}
		return nil, nil
	})
}

// driveSuspended drives a sandbox that is to be suspended.
func (s *Service) driveSuspended(ctx context.Context, sb agentlab.Sandbox) (time.Duration, bool, error) {
	switch {
	case sb.State == agentlab.SandboxSuspended && s.inspected(sb.VMID):
		return 0, true, nil
	case sb.State != agentlab.SandboxSuspended && sb.State != agentlab.SandboxReady:
		// It came otherwise before it was frozen; what it is now counts.
		_, err := s.update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
			if now.Desired == agentlab.DesiredSuspended {
				now.Desired = agentlab.DesiredRunning
			}
			return nil, nil
		})
		return 0, false, err
	}
	if sb.NetworkPending { // a policy that forbids more holds for what comes after, too
		if settled, err := s.applyNetwork(ctx, sb); settled || err != nil {
			return 0, err != nil, err
		}
	}
	driver, ok := s.cfg.Driver.(backend.Suspender)
	if !ok {
		return 0, false, s.markFailed(ctx, sb, "backend %s can no longer suspend it", sb.Backend)
	}
	if err := driver.Suspend(ctx, backend.RefOf(sb)); err != nil {
		return s.suspendRefused(ctx, sb, err)
	}
	if sb.State == agentlab.SandboxSuspended {
		s.setInspected(sb.VMID)
		return 0, true, nil
	}
	return 0, false, s.transition(ctx, sb, agentlab.SandboxSuspended, "")
}

// driveResumed lets a suspended sandbox go on, and sets its guest's clock.
func (s *Service) driveResumed(ctx context.Context, sb agentlab.Sandbox) (time.Duration, bool, error) {
	driver, ok := s.cfg.Driver.(backend.Suspender)
	if !ok {
		return 0, false, s.markFailed(ctx, sb, "backend %s can no longer resume it", sb.Backend)
	}
	if err := driver.Resume(ctx, backend.RefOf(sb)); err != nil {
		return s.suspendRefused(ctx, sb, err)
	}
	if err := s.openGuestListener(ctx, sb); err != nil {
		return 0, true, err
	}
	if err := s.sendIdentity(ctx, sb, nil); err != nil { // for its clock; it has a token already
		if ctx.Err() == nil && s.triedFor(sb.VMID) >= s.lim.BootTimeout {
			return 0, false, s.markFailed(ctx, sb, "its guest did not answer within %s after it was resumed: %w", s.lim.BootTimeout, err)
		}
		return bootPause(0), true, ctx.Err()
	}
	return 0, false, s.transition(ctx, sb, agentlab.SandboxReady, "")
}

// triedFor is how long it is since this was first called for a sandbox in its
// present state.
func (s *Service) triedFor(vmid int) (since time.Duration) {
	s.withState(vmid, func(m *runtimeState) {
		now := s.clock()
		if m.tried.IsZero() {
			m.tried = now
		}
		since = now.Sub(m.tried)
	})
	return since
}

// suspendRefused follows a refusal to suspend or to resume: the VM is looked at,
// and what does not run, or is gone, ends as it would have otherwise.
func (s *Service) suspendRefused(ctx context.Context, sb agentlab.Sandbox, cause error) (time.Duration, bool, error) {
	if code := agentlab.CodeOf(cause); code != agentlab.CodeNotFound && code != agentlab.CodeConflict {
		return 0, true, cause
	}
	in, err := s.cfg.Driver.Inspect(ctx, backend.RefOf(sb))
	if why, err := vmLossReason(in, err); err != nil {
		return 0, true, err
	} else if why != "" && in.Power != backend.PowerSuspended {
		return 0, false, s.vmDown(ctx, sb, in, why)
	}
	return 0, true, cause
}
