package sandbox

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Suspend requests that a READY sandbox is suspended: its memory and disk are
// kept, its CPUs stop, its lease continues. A suspended sandbox is not
// changed. Codes: not_found; unsupported by the backend; conflict in any other
// state. A sandbox with a running job is not suspended, because the job's time
// would continue.
func (s *Service) Suspend(ctx context.Context, vmid int) (agentlab.Sandbox, error) {
	return s.requestChange(ctx, vmid, s.loop.Interrupt, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		_, able := s.cfg.Driver.(backend.Suspender)
		switch {
		case sb.Desired == agentlab.DesiredSuspended:
			return nil, nil
		case !able: // checked before the state: waiting for READY would not help
			return nil, agentlab.Errorf(agentlab.CodeUnsupported, "backend %s cannot suspend a sandbox", sb.Backend).
				WithHint("'agentlab sandbox stop %d' keeps its disk", vmid)
		case sb.State != agentlab.SandboxReady || sb.Desired != agentlab.DesiredRunning:
			return nil, conflict(*sb, "and only a READY sandbox can be suspended", "")
		}
		sb.Desired = agentlab.DesiredSuspended
		return nil, nil
	})
}

// Resume requests that a suspended sandbox continues. A running sandbox does
// not change. Codes: not_found, conflict.
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

// driveSuspended drives a sandbox whose desired state is suspended.
func (s *Service) driveSuspended(ctx context.Context, sb agentlab.Sandbox) (time.Duration, bool, error) {
	switch {
	case sb.State == agentlab.SandboxSuspended && s.inspected(sb.VMID):
		return 0, true, nil
	case sb.State != agentlab.SandboxSuspended && sb.State != agentlab.SandboxReady:
		// Its state changed before it was suspended; use the current
		// state.
		_, err := s.update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
			if now.Desired == agentlab.DesiredSuspended {
				now.Desired = agentlab.DesiredRunning
			}
			return nil, nil
		})
		return 0, false, err
	}
	if sb.NetworkPending { // a narrower policy also applies after the resume
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

// driveResumed resumes a suspended sandbox, and sets its guest's clock.
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
	if err := s.sendIdentity(ctx, sb, nil); err != nil { // for its clock; it already has a token
		if ctx.Err() == nil && s.triedFor(sb.VMID) >= s.lim.BootTimeout {
			return 0, false, s.markFailed(ctx, sb, "its guest did not answer within %s after it was resumed: %w", s.lim.BootTimeout, err)
		}
		return bootPause(0), true, ctx.Err()
	}
	return 0, false, s.transition(ctx, sb, agentlab.SandboxReady, "")
}

// triedFor returns the time since its first call for a sandbox in its current
// state.
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

// suspendRefused handles a refusal to suspend or resume: it inspects the VM, and
// handles one that does not run or is gone as usual.
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
