package sandbox

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Suspend requests that a READY sandbox is suspended: its memory and disk are
// kept, its CPUs stop, its lease continues. With toDisk its memory is written to
// disk and its VM ends; a sandbox that is suspended in memory can be suspended to
// disk too. Otherwise a suspended sandbox is not changed. Codes: not_found;
// unsupported by the backend; conflict in any other state. A sandbox with a
// running job is not suspended, because the job's time would continue.
func (s *Service) Suspend(ctx context.Context, vmid int, toDisk bool) (agentlab.Sandbox, error) {
	what, want := "suspend a sandbox", agentlab.DesiredSuspended
	if toDisk {
		what, want = "suspend a sandbox to disk", agentlab.DesiredSuspendedToDisk
	}
	return s.RequestChange(ctx, vmid, s.loop.Interrupt, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		switch {
		case sb.Desired == want || sb.Desired == agentlab.DesiredSuspendedToDisk:
			return nil, nil
		case !s.canSuspend(*sb, toDisk): // checked before the state: waiting for READY would not help
			return nil, agentlab.Errorf(agentlab.CodeUnsupported, "backend %s cannot %s", sb.Backend, what).
				WithHint("'agentlab sandbox stop %d' keeps its disk", vmid)
		case sb.Desired == agentlab.DesiredSuspended:
		case sb.State != agentlab.SandboxReady || sb.Desired != agentlab.DesiredRunning:
			err := Conflict(*sb, "and only a READY sandbox can be suspended", "%s", suspendHint(*sb))
			if sb.State == agentlab.SandboxStopped {
				err = s.OfSession(ctx, *sb, err)
			}
			return nil, err
		}
		sb.Desired = want
		return nil, nil
	})
}

// Resume requests that a suspended sandbox continues. A running sandbox does
// not change. Codes: not_found, conflict.
func (s *Service) Resume(ctx context.Context, vmid int) (agentlab.Sandbox, error) {
	return s.RequestChange(ctx, vmid, s.loop.Interrupt, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		switch {
		case sb.Desired.Suspended():
			sb.Desired = agentlab.DesiredRunning
		case sb.Desired != agentlab.DesiredRunning || !sb.State.HasVM():
			return nil, s.OfSession(ctx, *sb, Conflict(*sb, "and there is nothing to resume", "%s", resumeHint(*sb)))
		}
		return nil, nil
	})
}

func suspendHint(sb agentlab.Sandbox) string {
	switch sb.State {
	case agentlab.SandboxRunning:
		return "wait until job " + sb.JobID + " has ended"
	case agentlab.SandboxRequested, agentlab.SandboxProvisioning, agentlab.SandboxBooting:
		return "wait until it is READY"
	case agentlab.SandboxStopped:
		return "start it first: agentlab sandbox start " + sb.Name
	}
	return "see 'agentlab sandbox show " + sb.Name + "'"
}

func resumeHint(sb agentlab.Sandbox) string {
	if sb.State == agentlab.SandboxStopped {
		return "start it: agentlab sandbox start " + sb.Name
	}
	return "see 'agentlab sandbox show " + sb.Name + "'"
}

// driveSuspended drives a sandbox whose desired state is suspended, in memory or
// to disk.
func (s *Service) driveSuspended(ctx context.Context, sb agentlab.Sandbox) (time.Duration, bool, error) {
	toDisk := sb.Desired == agentlab.DesiredSuspendedToDisk
	done := sb.State == agentlab.SandboxSuspended && (sb.OnDisk || !toDisk)
	switch {
	case done && s.Inspected(sb.VMID):
		return 0, true, nil
	case sb.State != agentlab.SandboxSuspended && sb.State != agentlab.SandboxReady:
		// Its state changed before it was suspended; use the current
		// state.
		_, err := s.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
			if now.Desired.Suspended() {
				now.Desired = agentlab.DesiredRunning
			}
			return nil, nil
		})
		return 0, false, err
	}
	if err := s.suspend(ctx, sb, toDisk); err != nil {
		return s.suspendRefused(ctx, sb, err)
	}
	if done {
		s.setInspected(sb.VMID)
		return 0, true, nil
	}
	_, err := s.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.State != sb.State || now.Desired != sb.Desired {
			return nil, nil
		}
		now.State, now.Reason, now.OnDisk = agentlab.SandboxSuspended, "", toDisk
		return []agentlab.Event{StateEvent(*now, sb.State)}, nil
	})
	return 0, false, err
}

// guestSyncTimeout limits how long a guest may take to write its disks before it is
// suspended or saved.
const guestSyncTimeout = 30 * time.Second

// AskSync makes the guest of a sandbox write its disks.
func (s *Core) AskSync(ctx context.Context, sb agentlab.Sandbox) error {
	ctx, cancel := context.WithTimeout(ctx, guestSyncTimeout)
	defer cancel()
	defer s.Asking(sb.VMID)()
	return s.Control(sb).Sync(ctx)
}

// suspend suspends the VM of a sandbox. Its guest writes its disks first: its memory may
// be discarded later, and it cannot write them then.
func (s *Service) suspend(ctx context.Context, sb agentlab.Sandbox, toDisk bool) error {
	if err := s.syncGuest(ctx, sb); err != nil {
		return err
	}
	ref, power := backend.RefOf(sb), s.On(sb).Power
	if !s.canSuspend(sb, toDisk) {
		return s.cannot(sb, "suspend it")
	}
	if !toDisk {
		return power.Suspend(ctx, ref)
	}
	if err := power.SuspendToDisk(ctx, ref); err != nil {
		return err
	}
	s.CloseGuestListener(sb.VMID)
	return nil
}

// canSuspend reports whether the backend of a sandbox can suspend it in memory or to disk.
func (s *Service) canSuspend(sb agentlab.Sandbox, toDisk bool) bool {
	b := s.On(sb)
	return b.Power != nil && (!toDisk || b.Can().SuspendToDisk)
}

// syncGuest makes the guest of a sandbox that is about to be suspended write its disks.
// One that does not is suspended nevertheless, with an event: its memory has what it has
// not written.
func (s *Service) syncGuest(ctx context.Context, sb agentlab.Sandbox) error {
	if sb.State != agentlab.SandboxReady {
		return nil
	}
	err := s.AskSync(ctx, sb)
	if err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	tried := false
	s.withState(sb.VMID, func(m *runtimeState) { tried = !m.tried.IsZero() })
	s.log.Warn("the guest of a sandbox that is suspended has not written its disks", "vmid", sb.VMID, "err", err)
	if tried {
		return nil // there is an event
	}
	why := s.RedactReason(ctx, sb, err.Error())
	return s.cfg.Store.AppendEvents(ctx, NewEvent(agentlab.EventSandboxState, sb, map[string]any{"state": sb.State, "synced": false},
		"the guest of sandbox %s has not written its disks before it is suspended; what it wrote last is lost if its memory is discarded: %s", sb.Name, why))
}

// cannot returns the error for a request that an earlier version of the backend
// has accepted.
func (s *Service) cannot(sb agentlab.Sandbox, what string) error {
	return agentlab.Errorf(agentlab.CodeUnsupported, "backend %s can no longer %s", sb.Backend, what)
}

// driveResumed resumes a suspended sandbox, and sets its guest's clock.
func (s *Service) driveResumed(ctx context.Context, sb agentlab.Sandbox) (time.Duration, bool, error) {
	if err := s.resume(ctx, sb); err != nil {
		return s.suspendRefused(ctx, sb, err)
	}
	if _, err := s.sendIdentity(ctx, sb, nil); err != nil { // for its clock; it already has a token
		if ctx.Err() == nil && s.TriedFor(sb.VMID) >= s.lim.BootTimeout {
			return 0, false, s.MarkFailed(ctx, sb, "its guest did not answer within %s after it was resumed: %w", s.lim.BootTimeout, err)
		}
		return bootPause(0), true, ctx.Err()
	}
	return 0, false, s.ready(ctx, sb)
}

// resume resumes the VM of a sandbox. One that is suspended to disk needs its
// deadline and its listener before, like one that starts.
func (s *Service) resume(ctx context.Context, sb agentlab.Sandbox) error {
	power := s.On(sb).Power
	if power == nil {
		return s.cannot(sb, "resume it")
	}
	s.withState(sb.VMID, func(m *runtimeState) { m.inspected = false }) // a later request to suspend it is not done yet
	if err := s.openGuestListener(ctx, sb); err != nil {
		return err
	}
	if err := s.setDeadline(ctx, sb); err != nil {
		return err
	}
	return power.Resume(ctx, backend.RefOf(sb))
}

// TriedFor returns the time since its first call for a sandbox in its current
// state.
func (s *Core) TriedFor(vmid int) (since time.Duration) {
	s.withState(vmid, func(m *runtimeState) {
		now := s.clock()
		if m.tried.IsZero() {
			m.tried = now
		}
		since = now.Sub(m.tried)
	})
	return since
}

// TriedTooLong reports whether what a sandbox needs in its current state was tried for
// Limits.ProvisionTimeout.
func (s *Core) TriedTooLong(vmid int) bool { return s.TriedFor(vmid) >= s.lim.ProvisionTimeout }

// suspendRefused handles a refusal to suspend or resume: it inspects the VM, and
// handles one that does not run or is gone as usual. A request that cannot
// succeed is given up.
func (s *Service) suspendRefused(ctx context.Context, sb agentlab.Sandbox, cause error) (time.Duration, bool, error) {
	asWanted := sb.State == agentlab.SandboxSuspended && (sb.Desired == agentlab.DesiredSuspended || sb.OnDisk && sb.Desired.Suspended())
	last := !asWanted && ctx.Err() == nil && s.TriedFor(sb.VMID) >= s.lim.ProvisionTimeout
	switch code := agentlab.CodeOf(cause); {
	case code == agentlab.CodeNotFound || code == agentlab.CodeConflict:
	case last, !asWanted && ctx.Err() == nil && !backend.IsTransient(cause):
		return 0, false, s.giveUp(ctx, sb, cause)
	default:
		return 0, true, cause
	}
	in, err := s.On(sb).Inspect(ctx, backend.RefOf(sb))
	if why, err := vmLossReason(in, err); err != nil {
		return 0, true, err
	} else if why != "" && in.Power != backend.PowerSuspended {
		return 0, false, s.vmDown(ctx, sb, in, why)
	}
	if last {
		return 0, false, s.giveUp(ctx, sb, cause)
	}
	return 0, true, cause
}

// giveUp leaves a sandbox that cannot be suspended or resumed in its state. The
// event has the reason, and so has the row of one that stays SUSPENDED.
func (s *Service) giveUp(ctx context.Context, sb agentlab.Sandbox, cause error) error {
	what := "suspended"
	hint := cmp.Or(agentlab.HintOf(cause), fmt.Sprintf("try again, or end its guest and keep its disk: agentlab sandbox stop %d", sb.VMID))
	if !sb.Desired.Suspended() {
		what = "resumed"
		hint = fmt.Sprintf("'agentlab sandbox stop %d' discards its memory and keeps its disk; 'agentlab sandbox start %[1]d' then boots it", sb.VMID)
	}
	why := s.RedactReason(ctx, sb, cause.Error())
	s.log.Warn("a sandbox cannot be "+what, "vmid", sb.VMID, "err", cause)
	s.withState(sb.VMID, func(m *runtimeState) { m.tried = time.Time{} })
	_, err := s.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.State != sb.State || now.Desired != sb.Desired {
			return nil, nil
		}
		if !now.Desired.Suspended() {
			now.Reason = agentlab.Reason(why + " (" + hint + ")")
		}
		switch {
		case now.State == agentlab.SandboxReady:
			now.Desired = agentlab.DesiredRunning
		case now.OnDisk:
			now.Desired = agentlab.DesiredSuspendedToDisk
		default:
			now.Desired = agentlab.DesiredSuspended
		}
		return []agentlab.Event{NewEvent(agentlab.EventSandboxState, sb,
			Refused(map[string]any{"state": now.State, "desired": now.Desired}, why, cause, hint),
			"sandbox %s cannot be %s: %s", sb.Name, what, why)}, nil
	})
	return err
}
