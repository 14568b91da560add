package workspace

import (
	"context"

	"github.com/agentlab-vm/agentlab"
)

// StepRelease detaches the workspace of a sandbox if that was requested, and gives up
// the place in the queue of one that is stopped or suspended when its time is over.
// settled means that the row has changed. A request that fails is given up with an
// event.
func (s *Service) StepRelease(ctx context.Context, sb agentlab.Sandbox) (settled bool, err error) {
	l, ok, err := s.cfg.Leases.WorkspaceLease(ctx, sb.UID)
	rests := sb.State == agentlab.SandboxStopped || sb.State == agentlab.SandboxSuspended
	late := rests && !l.Acquired() && !s.clock().Before(l.WaitUntil)
	if err != nil || !ok || l.Release == agentlab.ReleaseNone && !late {
		return false, err
	}
	v, err := s.cfg.Store.Workspace(ctx, l.WorkspaceID)
	if err != nil {
		return false, err
	}
	if late { // nothing else looks at it, and others may wait
		if err := s.cfg.Leases.ReleaseWorkspace(ctx, l.Nonce); err != nil {
			return false, err
		}
		return true, s.cfg.Store.AppendEvents(ctx, s.workspaceEvent(sb, v, s.notFree(ctx, v, l), "was not attached to sandbox %s", sb.Name))
	}
	if sb.State == agentlab.SandboxFailed || sb.State == agentlab.SandboxTimeout {
		if err := s.core.EnsurePoweredOff(ctx, sb); err != nil {
			return false, err
		}
	}
	forced := l.Release == agentlab.ReleaseForced
	var cause error
	if l.Acquired() && sb.State.HasVM() {
		if cause = s.unmount(ctx, sb, unmountTimeout); cause != nil && forced {
			s.log.Warn("a workspace is detached that its guest has not unmounted", "vmid", sb.VMID, "workspace", v.ID, "err", cause)
			e := s.workspaceEvent(sb, v, nil, "is taken from sandbox %s without its help; what the guest wrote last may be lost: %s", sb.Name, agentlab.Reason(cause.Error()))
			if err := s.cfg.Store.AppendEvents(ctx, e); err != nil {
				return false, err
			}
			cause = nil
		}
	}
	if cause == nil {
		why := agentlab.Errorf(agentlab.CodeConflict, "it was taken from the sandbox before its job had ended")
		if ended, err := s.endJobWithout(ctx, sb, v, l, why); ended || err != nil {
			return ended, err
		}
		cause = s.detachVolume(ctx, sb, v)
	}
	if ctx.Err() != nil {
		return false, ctx.Err()
	}
	if cause == nil {
		s.withState(sb.VMID, func(m *attachState) { m.mounted = "" })
		return true, s.cfg.Leases.ReleaseWorkspace(ctx, l.Nonce)
	}
	s.withState(sb.VMID, func(m *attachState) { m.mounted = "" }) // parts of it may be done
	_, err = s.cfg.Leases.UpdateWorkspaceLease(ctx, l.Nonce, func(l *agentlab.WorkspaceLease) []agentlab.Event {
		l.Release, l.Reason = agentlab.ReleaseNone, agentlab.Reason(cause.Error())
		return []agentlab.Event{s.workspaceEvent(sb, v, cause, "was not detached from sandbox %s", sb.Name)}
	})
	return err == nil, err
}

// endJobWithout makes a sandbox FAILED whose job needs the workspace that the sandbox is
// about to lose: the agent would work on the disk of the VM, and its work would be lost
// with it. Its VM is powered off before the workspace is given back.
func (s *Service) endJobWithout(ctx context.Context, sb agentlab.Sandbox, v agentlab.Workspace, l agentlab.WorkspaceLease, cause error) (ended bool, err error) {
	ended, err = s.jobNeeds(ctx, sb, l)
	if ended && err == nil {
		err = s.core.MarkFailed(ctx, sb, "workspace %s: %w", v.Name, cause)
	}
	return ended, err
}

// jobNeeds reports whether a sandbox was created with the workspace of a lease for a job
// that has not ended.
func (s *Service) jobNeeds(ctx context.Context, sb agentlab.Sandbox, l agentlab.WorkspaceLease) (bool, error) {
	later := !sb.BootedAt.IsZero() && l.RequestedAt.After(sb.BootedAt) // by 'workspace attach'
	if sb.JobID == "" || later || !sb.State.CanBecome(agentlab.SandboxFailed) {
		return false, nil
	}
	j, err := s.cfg.Leases.Job(ctx, sb.JobID)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound { // its row is written after that of the sandbox, and deleted by retention
		return sb.BootedAt.IsZero(), nil
	}
	return err == nil && !j.Status.Final(), err
}
