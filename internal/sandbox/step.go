package sandbox

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// MaxIdle is the maximum time between two steps of a settled sandbox, unless there are
// more than idleStepRate for each second of it. It is limited because the clock may be
// changed, and the host may sleep.
const MaxIdle = 10 * time.Minute

// idleStepRate is how many settled sandboxes have a step in a second, if there are
// thousands: each reads a row. The audit finds the leases that have ended earlier because
// the clock was changed (leasesDue).
const idleStepRate = 1

// destroyTimeout limits one attempt to destroy a VM or to cut its power.
const destroyTimeout = 2 * time.Minute

// step brings one sandbox closer to its desired state.
func (s *Service) step(ctx context.Context, vmid int) (time.Duration, error) {
	for {
		s.withState(vmid, func(m *runtimeState) { m.newPolicy = false })
		sb, err := s.cfg.Store.Sandbox(ctx, vmid)
		switch {
		case agentlab.CodeOf(err) == agentlab.CodeNotFound:
			s.forget(vmid)
			return 0, nil
		case err != nil:
			return 0, err
		case sb.State == agentlab.SandboxDestroyed:
			s.forget(vmid)
			if sb.Pooled() { // a process ended before it deleted the row
				err = s.pool.Removed(ctx, vmid)
			}
			return 0, err
		}
		s.track(sb)
		if s.Elsewhere(sb) {
			return s.skipElsewhere(ctx, sb), nil
		}
		again, done, err := s.stepOnce(ctx, sb)
		s.noteWaiting(ctx, sb, done, err)
		if err != nil || done {
			if again <= 0 {
				again = s.untilLease(sb)
			}
			return again, err
		}
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
	}
}

// stepOnce makes one step for a sandbox. done means that nothing is left to do
// now; then again is the time until the next step, or 0 for the end of the
// lease.
func (s *Service) stepOnce(ctx context.Context, sb agentlab.Sandbox) (again time.Duration, done bool, err error) {
	if s.destroyPending(sb) {
		return 0, false, s.destroy(ctx, sb)
	}
	if sb.Pooled() {
		return s.stepPooled(ctx, sb)
	}
	if s.leaseCounts(sb) && !s.clock().Before(sb.LeaseExpiresAt) {
		return 0, false, s.expire(ctx, sb)
	}
	if sb.Desired == agentlab.DesiredDestroyed {
		return 0, false, s.destroy(ctx, sb)
	}
	if s.leaseCounts(sb) {
		if renewed, err := s.watchLease(ctx, sb); renewed || err != nil {
			return 0, err != nil, err
		}
	}
	if sb.NetworkPending && sb.State.HasVM() && sb.Restoring == "" && sb.Desired != agentlab.DesiredStopped {
		if settled, err := s.applyNetwork(ctx, sb); settled || err != nil {
			return 0, err != nil, err
		}
	}
	if sb.Workspace != "" {
		if settled, err := s.workspaces.StepRelease(ctx, sb); settled || err != nil {
			return 0, err != nil, err
		}
	}
	if err := s.snaps.Step(ctx, sb); err != nil {
		return 0, true, err
	}
	if sb.Restoring != "" {
		err := s.snaps.Restore(ctx, sb)
		return 0, err != nil, err
	}
	switch sb.Desired {
	case agentlab.DesiredStopped:
		return s.stop(ctx, sb)
	case agentlab.DesiredSuspended, agentlab.DesiredSuspendedToDisk:
		return s.driveSuspended(ctx, sb)
	default:
		return s.driveRunning(ctx, sb)
	}
}

// leaseCounts reports whether the end of a lease has an effect. It has none
// for a sandbox that is being destroyed, and none during an image build, which
// has a separate limit.
func (s *Core) leaseCounts(sb agentlab.Sandbox) bool {
	return sb.Desired != agentlab.DesiredDestroyed &&
		sb.State != agentlab.SandboxRequested && (sb.State != agentlab.SandboxProvisioning || ImageResolved(sb))
}

// expire handles the end of a lease.
func (s *Service) expire(ctx context.Context, sb agentlab.Sandbox) error {
	now, reason := s.clock().UTC(), s.leaseReason(ctx, sb)
	work, err := s.hasWork(ctx, sb)
	if err != nil {
		return err
	}
	busy, err := s.salvaging(ctx, sb)
	if err != nil {
		return err
	}
	_, err = s.Update(ctx, sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		if !s.leaseCounts(*sb) || now.Before(sb.LeaseExpiresAt) {
			return nil, nil // renewed just now
		}
		if busy {
			sb.LeaseExpiresAt = now.Add(salvageWait)
			return []agentlab.Event{leaseEvent(*sb, "is extended, because its work is being extracted")}, nil
		}
		ended := "has ended"
		if sb.Salvage {
			ended += "; " + lostWork(*sb)
		}
		evs := []agentlab.Event{leaseEvent(*sb, ended)}
		before := sb.State
		sb.Desired, sb.Restoring = agentlab.DesiredDestroyed, ""
		switch {
		case sb.Keepalive && (sb.State.HasVM() || sb.State == agentlab.SandboxFailed && !sb.BootedAt.IsZero()):
			sb.Desired = agentlab.DesiredStopped
			sb.LeaseExpiresAt = now.Add(s.lim.KeepaliveGrace)
			evs = append(evs, leaseEvent(*sb, "is extended once, so that the stopped sandbox can be recovered"))
		case work:
			evs = append(evs, s.keep(sb))
		}
		if sb.State != agentlab.SandboxFailed && sb.State != agentlab.SandboxStopped && sb.State.CanBecome(agentlab.SandboxTimeout) {
			sb.State, sb.Reason = agentlab.SandboxTimeout, reason
			evs = append(evs, StateEvent(*sb, before))
		}
		return evs, nil
	})
	switch {
	case fullDisk(err) && (work || busy):
		return errors.Join(s.PowerOff(ctx, sb, 0), err)
	case fullDisk(err) && !sb.Keepalive: // its row has the end of its lease
		s.destroyWithoutRow(sb)
		return nil
	}
	return err
}

// driveRunning drives a sandbox whose desired state is running.
func (s *Service) driveRunning(ctx context.Context, sb agentlab.Sandbox) (time.Duration, bool, error) {
	switch sb.State {
	case agentlab.SandboxRequested:
		if sb.Workspace != "" {
			return s.workspaces.Await(ctx, sb)
		}
		return 0, false, s.Transition(ctx, sb, agentlab.SandboxProvisioning, "")
	case agentlab.SandboxProvisioning:
		return s.provision(ctx, sb)
	case agentlab.SandboxStopped: // one that had FAILED may still run
		if err := s.EnsurePoweredOff(ctx, sb); err != nil {
			return 0, true, err
		}
		return 0, false, s.Transition(ctx, sb, agentlab.SandboxBooting, "")
	case agentlab.SandboxBooting:
		return s.boot(ctx, sb)
	case agentlab.SandboxSuspended:
		return s.driveResumed(ctx, sb)
	case agentlab.SandboxFailed, agentlab.SandboxTimeout:
		if err := s.EnsurePoweredOff(ctx, sb); err != nil {
			return 0, true, err
		}
		return 0, true, s.workspaces.Return(ctx, sb)
	default:
		return s.superviseRunning(ctx, sb)
	}
}

// Transition changes a row from sb's state to another, unless the desired
// state or the state has changed in the meantime.
func (s *Core) Transition(ctx context.Context, sb agentlab.Sandbox, to agentlab.SandboxState, reason string) error {
	_, err := s.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.State != sb.State || now.Desired != sb.Desired {
			return nil, nil
		}
		now.State, now.Reason = to, reason
		if to == agentlab.SandboxBooting {
			now.NestedState = "" // its guest reports it again
		}
		if to == agentlab.SandboxStopped {
			now.IP = ""
			now.Reason = cmp.Or(reason, sb.Reason) // the reason stays known
		}
		return []agentlab.Event{StateEvent(*now, sb.State)}, nil
	})
	return err
}

// MarkFailed makes a sandbox FAILED. If it was created for a job and is not kept, its
// destruction is requested, unless it may have work that is not stored: then the
// service of the jobs calls Release.
func (s *Core) MarkFailed(ctx context.Context, sb agentlab.Sandbox, format string, args ...any) error {
	return s.Fail(ctx, sb, nil, format, args...)
}

// unbootable is a change for fail: the disk of the sandbox does not start.
func unbootable(sb *agentlab.Sandbox) { sb.Unbootable = !sb.BootedAt.IsZero() }

// Fail is markFailed, which also makes a change of the row, unless it is nil.
func (s *Core) Fail(ctx context.Context, sb agentlab.Sandbox, change func(*agentlab.Sandbox), format string, args ...any) error {
	reason := s.RedactReason(ctx, sb, agentlab.Errorf(agentlab.CodeInternal, format, args...).Error())
	s.log.Warn("sandbox failed", "vmid", sb.VMID, "state", sb.State, "reason", reason)
	s.ReleaseSlots(sb.VMID)
	_, err := s.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.State != sb.State || !now.State.CanBecome(agentlab.SandboxFailed) {
			return nil, nil
		}
		if !s.leaseCounts(*now) {
			s.beginLease(now)
		}
		now.State, now.Reason = agentlab.SandboxFailed, reason
		if change != nil {
			change(now)
		}
		if now.JobID != "" && !now.Keepalive && !s.salvageable(*now) || now.Pooled() {
			now.Desired = agentlab.DesiredDestroyed
		}
		return []agentlab.Event{StateEvent(*now, sb.State)}, nil
	})
	s.withState(sb.VMID, func(m *runtimeState) { m.save = true })
	return err
}

// RedactReason removes secrets and line breaks from text about a sandbox.
func (s *Core) RedactReason(ctx context.Context, sb agentlab.Sandbox, text string) string {
	return agentlab.Reason(s.cfg.Bootstrap.RedactFunc(ctx, cmp.Or(sb.JobID, sb.UID))(text))
}

// EnsurePoweredOff powers off the VM of a failed sandbox.
func (s *Core) EnsurePoweredOff(ctx context.Context, sb agentlab.Sandbox) error {
	if s.Inspected(sb.VMID) {
		return nil
	}
	s.CloseGuestListener(sb.VMID)
	ctx, cancel := context.WithTimeout(ctx, destroyTimeout)
	defer cancel()
	err := s.On(sb).Stop(ctx, backend.RefOf(sb), 0)
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
		return err
	}
	s.setInspected(sb.VMID)
	return nil
}

// Inspected reports whether this process has checked the VM's state since the
// row's state last changed or the audit last found a difference.
func (s *Core) Inspected(vmid int) (ok bool) {
	s.withState(vmid, func(m *runtimeState) { ok = m.inspected && !m.needsInspect })
	return ok
}

// InspectAgain makes the next step of a sandbox inspect its VM.
func (s *Core) InspectAgain(vmid int) {
	s.withState(vmid, func(m *runtimeState) { m.needsInspect = true })
}

func (s *Core) setInspected(vmid int) {
	s.withState(vmid, func(m *runtimeState) { m.inspected, m.needsInspect = true, false })
}

// stop runs the next action of a sandbox whose desired state is stopped.
func (s *Service) stop(ctx context.Context, sb agentlab.Sandbox) (time.Duration, bool, error) {
	if sb.State == agentlab.SandboxStopped {
		return 0, true, s.EnsurePoweredOff(ctx, sb)
	}
	if sb.State == agentlab.SandboxRequested || sb.State == agentlab.SandboxProvisioning {
		return s.driveRunning(ctx, sb) // Stop refuses these, so they continue
	}
	s.ReleaseSlots(sb.VMID)
	grace := s.lim.StopGrace
	s.withState(sb.VMID, func(m *runtimeState) {
		if m.grace != nil {
			grace = max(*m.grace, 0)
		}
	})
	if sb.State == agentlab.SandboxFailed && !sb.Salvage {
		grace = 0 // its VM is off, or its guest does not work
	}
	if err := s.PowerOff(ctx, sb, grace); err != nil {
		return 0, true, err
	}
	return 0, false, s.Transition(ctx, sb, agentlab.SandboxStopped, "")
}

// PowerOff stops the VM. A missing VM counts as off.
func (s *Core) PowerOff(ctx context.Context, sb agentlab.Sandbox, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, grace+destroyTimeout)
	defer cancel()
	err := s.On(sb).Stop(ctx, backend.RefOf(sb), grace)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		err = nil
	}
	if err == nil {
		s.CloseGuestListener(sb.VMID)
	}
	return err
}

// timeoutGrace is how long a guest may take to power off after the end of its
// lease, before the sandbox is destroyed.
const timeoutGrace = 10 * time.Second

// destroy deletes the VM and its data. It is retried until it succeeds, also
// on a full disk: the data that it deletes may be what fills the disk.
func (s *Service) destroy(ctx context.Context, sb agentlab.Sandbox) error {
	s.ReleaseSlots(sb.VMID)
	s.abandonImage(sb)
	if err := s.workspaces.UnmountLast(ctx, sb); err != nil {
		return err
	}
	if sb.State == agentlab.SandboxTimeout && sb.JobID == "" {
		if err := s.PowerOff(ctx, sb, timeoutGrace); err != nil {
			return err
		}
		if err := s.Transition(ctx, sb, agentlab.SandboxStopped, sb.Reason); !fullDisk(err) {
			return err
		}
	}
	s.CloseGuestListener(sb.VMID)
	revoked := s.cfg.Store.RevokeGrants(ctx, sb.VMID)
	if revoked != nil && !fullDisk(revoked) {
		return revoked
	}
	s.saveConsole(ctx, sb)
	s.drainEgress(ctx, sb)
	dctx, cancel := context.WithTimeout(ctx, destroyTimeout)
	defer cancel()
	if err := s.On(sb).Destroy(dctx, backend.RefOf(sb)); err != nil {
		return err
	}
	if revoked != nil { // there may be disk space now
		if err := s.cfg.Store.RevokeGrants(ctx, sb.VMID); err != nil {
			return err
		}
	}
	return s.destroyed(ctx, sb)
}

// destroyed changes a sandbox to DESTROYED.
func (s *Service) destroyed(ctx context.Context, sb agentlab.Sandbox) error {
	_, err := s.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.UID != sb.UID || now.State == agentlab.SandboxDestroyed {
			return nil, nil
		}
		before := now.State
		now.State, now.Desired, now.IP = agentlab.SandboxDestroyed, agentlab.DesiredDestroyed, ""
		return []agentlab.Event{StateEvent(*now, before)}, nil
	})
	if err == nil && s.destroyPending(sb) {
		s.dropIntent(sb)
	}
	if err == nil && sb.Pooled() {
		err = s.pool.Removed(ctx, sb.VMID)
	}
	return err
}

// cutTimeout limits the power cut before the egress log is read the last time.
const cutTimeout = 15 * time.Second

// drainEgress saves the record of the network use of a sandbox that is about
// to be destroyed: its VM is stopped first, so the record is complete. A
// failure is logged and does not delay the destruction.
func (s *Service) drainEgress(ctx context.Context, sb agentlab.Sandbox) {
	if s.On(sb).Net == nil || s.cfg.Audit == nil || sb.Pooled() || sb.State == agentlab.SandboxRequested || sb.State == agentlab.SandboxProvisioning {
		return
	}
	cut, cancel := context.WithTimeout(ctx, cutTimeout)
	err := s.On(sb).Stop(cut, backend.RefOf(sb), 0)
	cancel()
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return // with its log
	}
	if derr := s.cfg.Audit.Drain(ctx, sb); err == nil {
		err = derr
	}
	if err != nil && ctx.Err() == nil {
		s.log.Warn("the end of the record of a sandbox's network use may be lost", "vmid", sb.VMID, "err", err)
	}
}

// superviseRunning drives a sandbox whose VM should run.
func (s *Service) superviseRunning(ctx context.Context, sb agentlab.Sandbox) (time.Duration, bool, error) {
	if !s.Inspected(sb.VMID) {
		in, err := s.On(sb).Inspect(ctx, backend.RefOf(sb))
		if why, err := vmLossReason(in, err); err != nil {
			return 0, true, err
		} else if why != "" {
			return 0, false, s.vmDown(ctx, sb, in, why)
		}
		s.setInspected(sb.VMID)
	}
	s.withState(sb.VMID, func(m *runtimeState) { m.tried = time.Time{} }) // of a request that was replaced
	if err := s.openGuestListener(ctx, sb); err != nil {
		return 0, true, err
	}
	if err := s.setDeadline(ctx, sb); err != nil {
		return 0, true, err
	}
	look, err := s.workspaces.Supervise(ctx, sb)
	if err != nil {
		return 0, true, err
	}
	again, err := s.ensureDelivered(ctx, sb)
	if again == 0 || look > 0 && look < again {
		again = look
	}
	return again, true, err
}

// vmLossReason returns why the VM does not run, from a result of Inspect; ""
// if it runs. After an error the reason is not known.
func vmLossReason(in backend.Instance, err error) (why string, _ error) {
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		return "its VM was not found on the backend", nil
	case err != nil:
		return "", err
	case in.Power == backend.PowerRunning:
		return "", nil
	case in.Power == backend.PowerStopped:
		return "the guest powered itself off", nil
	case in.GuestRebooted && in.Reason != "":
		return in.Reason, nil
	}
	why = "its VM is " + string(in.Power)
	if in.Power == backend.PowerCrashed {
		why = "its VM has crashed"
	}
	if in.Reason != "" {
		why += ": " + in.Reason
	}
	return why, nil
}
