package snapshot

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

const (
	// snapshotPatience is how long a snapshot whose backend is busy is tried.
	snapshotPatience = 10 * time.Minute
	// deleteTimeout limits one attempt to delete a snapshot.
	deleteTimeout = 2 * time.Minute
)

// changed runs the step of a sandbox whose snapshots have changed, and the sweep for one
// that no longer exists.
func (s *Service) changed(vmid int) {
	s.again(vmid)
	s.wakeUp()
}

// again runs the step of a sandbox whose snapshots need it.
func (s *Service) again(vmid int) {
	s.mu.Lock()
	delete(s.settled, vmid)
	s.mu.Unlock()
	s.core.Wake(vmid)
}

func snapshotRef(snap agentlab.Snapshot) backend.SnapshotRef {
	return backend.SnapshotRef{UID: snap.UID, Of: backend.Ref{UID: snap.SandboxUID, Handle: snap.Handle}}
}

// Step saves and deletes the snapshots of a sandbox that wait for it. It
// returns an error only if it is interrupted: what failed does not delay other
// requests, and the sweep runs it again.
func (s *Service) Step(ctx context.Context, sb agentlab.Sandbox) error {
	s.mu.Lock()
	settled := s.settled[sb.VMID]
	s.settled[sb.VMID] = true
	s.mu.Unlock()
	if settled {
		return nil
	}
	list, err := s.store.Snapshots(ctx, agentlab.SnapshotFilter{SandboxUID: sb.UID})
	for _, snap := range list {
		if snap.State != agentlab.SnapshotSaving {
			err = s.dropSnapshot(ctx, snap)
		} else if sb.State != agentlab.SandboxBooting { // then after its start
			err = s.saveSnapshot(ctx, sb, snap)
		}
		if err != nil {
			break
		}
	}
	if err != nil && ctx.Err() == nil {
		s.log.Warn("the snapshots of a sandbox could not be changed, will try again", "vmid", sb.VMID, "err", err)
		err = nil
	}
	if err != nil { // the next step continues
		s.mu.Lock()
		delete(s.settled, sb.VMID)
		s.mu.Unlock()
	}
	return err
}

// saveSnapshot makes a snapshot SAVED, or DELETING if that is not possible.
func (s *Service) saveSnapshot(ctx context.Context, sb agentlab.Sandbox, snap agentlab.Snapshot) error {
	err := s.canSave(sb)
	unsynced := ""
	if err == nil {
		unsynced, err = s.syncToSave(ctx, sb, snap)
	}
	var saved backend.Snapshot
	if err == nil {
		saved, err = s.callSave(ctx, sb, snap)
	}
	var forked []agentlab.Event
	if err == nil {
		forked, err = s.checkSecrets(ctx, sb, snap)
	}
	if err == nil {
		_, err = s.store.UpdateSnapshot(ctx, snap.UID, s.cfg.Quota, func(n *agentlab.Snapshot) ([]agentlab.Event, error) {
			if n.State != agentlab.SnapshotSaving {
				return nil, nil
			}
			n.State, n.Memory, n.Bytes, n.SavedAt = agentlab.SnapshotReady, saved.Memory, max(saved.Bytes, 0), s.core.Now().UTC()
			return append(forked, snapshotEvent(*n, unsynced, nil).About(sb.VMID, sb.JobID)), nil
		})
	}
	switch {
	case err != nil && (ctx.Err() != nil || backend.IsTransient(err) && s.core.Now().Sub(snap.CreatedAt) < snapshotPatience):
		if ctx.Err() == nil {
			s.saveWaits(ctx, sb, snap, err)
		}
		return err
	case err != nil:
		if err := s.saveFailed(ctx, sb, snap, err); err != nil {
			return err
		}
	}
	return s.wakeFrom(ctx, snap)
}

// syncToSave makes the guest of a sandbox write its disks before it is saved: a copy may
// boot from its disk. One that does not is saved nevertheless, and unsynced is the reason,
// also when the same snapshot is tried again: the first try may have saved it. A suspended
// guest has written them before.
func (s *Service) syncToSave(ctx context.Context, sb agentlab.Sandbox, snap agentlab.Snapshot) (unsynced string, err error) {
	if !sb.State.HasVM() || sb.State == agentlab.SandboxSuspended {
		return "", nil
	}
	err = s.core.AskSync(ctx, sb)
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	why := ""
	if err != nil {
		why = s.core.RedactReason(ctx, sb, err.Error())
		s.log.Warn("the guest of a sandbox that is saved has not written its disks", "vmid", sb.VMID, "snapshot", snap.UID, "err", err)
	}
	s.withState(sb.VMID, func(m *state) {
		if why != "" || m.syncedFor != snap.UID {
			m.syncedFor, m.unsynced = snap.UID, why
		}
		unsynced = m.unsynced
	})
	return unsynced, nil
}

// saveWaits writes an event with the reason for which a snapshot is not saved yet, unless
// the last one had it. Clients wait for the snapshot and print it.
func (s *Service) saveWaits(ctx context.Context, sb agentlab.Sandbox, snap agentlab.Snapshot, cause error) {
	reason, told := s.core.RedactReason(ctx, sb, agentlab.TextWithHint(cause)), false
	s.withState(sb.VMID, func(m *state) {
		now := snap.UID + " " + reason
		told, m.waits = m.waits == now, now
	})
	if told {
		return
	}
	e := sandbox.NewEvent(agentlab.EventSandboxSnapshot, sb, map[string]any{"snapshot": snap.UID, "name": snap.Name, "waiting": reason},
		"%s of sandbox %s waits: %s", snapshotName(snap), sb.Name, reason)
	if err := s.store.AppendEvents(ctx, e); err != nil {
		s.log.Warn("the reason why a snapshot waits was not stored", "vmid", sb.VMID, "snapshot", snap.UID, "err", err)
	}
}

// callSave saves a sandbox. A change of its network policy interrupts it, because
// a guest with much memory takes long.
func (s *Service) callSave(ctx context.Context, sb agentlab.Sandbox, snap agentlab.Snapshot) (backend.Snapshot, error) {
	driver, err := s.core.On(sb).NeedSnapshots()
	if err != nil {
		return backend.Snapshot{}, err
	}
	defer s.core.Asking(sb.VMID)()
	return driver.SaveSnapshot(ctx, backend.RefOf(sb), snap.UID)
}

// checkSecrets handles the secrets that the guest of a sandbox had received when
// it was saved: they are stored before they are sent. A snapshot is refused; the
// sandboxes of a fork have received them too, and an event records that.
func (s *Service) checkSecrets(ctx context.Context, sb agentlab.Sandbox, snap agentlab.Snapshot) ([]agentlab.Event, error) {
	if snap.Kind == agentlab.SnapshotSaved {
		return nil, s.hasNoSecrets(sb)
	}
	if snap.Keep {
		if snap.Setup.Key != "" {
			return nil, s.hasNoSecrets(sb)
		}
		received, err := s.cfg.Bootstrap.ReceivedSecrets(sb)
		return []agentlab.Event{forkedEvent(sb, nil, received)}, err
	}
	children, err := s.store.SandboxesFrom(ctx, snap.UID)
	secrets := false
	for _, child := range children {
		if err == nil {
			secrets, err = s.cfg.Bootstrap.Inherit(ctx, sb, child)
		}
	}
	if len(children) == 0 {
		return nil, err
	}
	return []agentlab.Event{forkedEvent(sb, children, secrets)}, err
}

// saveFailed makes a snapshot DELETING that cannot be saved. The sandboxes of a
// fork fail with the reason and are destroyed: nothing of them exists.
func (s *Service) saveFailed(ctx context.Context, sb agentlab.Sandbox, snap agentlab.Snapshot, cause error) error {
	reason := s.core.RedactReason(ctx, sb, cause.Error())
	s.log.Warn("a sandbox was not saved", "vmid", sb.VMID, "snapshot", snap.Name, "err", cause)
	for { // first, because after a crash the reason is not known
		children, err := s.store.SandboxesFrom(ctx, snap.UID)
		if err != nil {
			return err
		}
		if len(children) == 0 {
			break
		}
		for _, child := range children { // its state may change in the meantime
			destroy := func(sb *agentlab.Sandbox) { sb.Desired = agentlab.DesiredDestroyed }
			if err := s.core.Fail(ctx, child, destroy, "its source %s was not saved: %s", sb.Name, agentlab.TextWithHint(cause)); err != nil {
				return err
			}
		}
	}
	_, err := s.store.UpdateSnapshot(ctx, snap.UID, s.cfg.Quota, func(n *agentlab.Snapshot) ([]agentlab.Event, error) {
		if n.State != agentlab.SnapshotSaving {
			return nil, nil
		}
		n.State = agentlab.SnapshotDeleting
		return []agentlab.Event{snapshotEvent(*n, reason, cause).About(sb.VMID, sb.JobID)}, nil
	})
	if err == nil {
		s.changed(sb.VMID)
	}
	return err
}

// wakeFrom runs the steps of the sandboxes that wait for a snapshot.
func (s *Service) wakeFrom(ctx context.Context, snap agentlab.Snapshot) error {
	children, err := s.store.SandboxesFrom(ctx, snap.UID)
	for _, child := range children {
		s.core.Wake(child.VMID)
	}
	return err
}

// due reports whether a snapshot must be deleted now: it is DELETING, or the
// sandboxes of its fork were created. A sandbox that is still being created
// from it needs it.
func (s *Service) due(ctx context.Context, snap agentlab.Snapshot) (bool, error) {
	if snap.State != agentlab.SnapshotDeleting && (snap.Kind != agentlab.SnapshotFork || snap.Keep || snap.State == agentlab.SnapshotSaving) {
		return false, nil
	}
	children, err := s.store.SandboxesFrom(ctx, snap.UID)
	return err == nil && len(children) == 0, err
}

// dropSnapshot deletes a snapshot that is due, and then its row.
func (s *Service) dropSnapshot(ctx context.Context, snap agentlab.Snapshot) error {
	due, err := s.due(ctx, snap)
	if err != nil || !due {
		return err
	}
	driver, err := s.fleet.Of(snap.Backend).NeedSnapshots()
	if err != nil {
		return err
	}
	dctx, cancel := context.WithTimeout(ctx, deleteTimeout)
	defer cancel()
	if err := driver.DeleteSnapshot(dctx, snapshotRef(snap)); err != nil {
		return err
	}
	snap.State = agentlab.SnapshotDeleted
	return s.store.RemoveSnapshot(ctx, snap.UID, snapshotEvent(snap, "", nil))
}

// sweep deletes the snapshots of destroyed sandboxes that are not kept, and
// the snapshots after setup that exceed their limit, and wakes the sandboxes that have snapshots to save or to delete.
func (s *Service) sweep(ctx context.Context) {
	err := s.trimSetups(ctx)
	var list []agentlab.Snapshot
	if err == nil {
		list, err = s.store.Snapshots(ctx, agentlab.SnapshotFilter{})
	}
	for _, snap := range list {
		if s.fleet.Of(snap.Backend).Missing() != nil || snap.State == agentlab.SnapshotReady && snap.Keep {
			continue
		}
		if err = s.sweepOne(ctx, snap); err != nil {
			break
		}
	}
	if err != nil && ctx.Err() == nil {
		s.log.Warn("snapshots were not deleted, will try again", "err", err)
	}
}

func (s *Service) sweepOne(ctx context.Context, snap agentlab.Snapshot) error {
	sb, err := s.store.SandboxByUID(ctx, snap.SandboxUID)
	gone := agentlab.CodeOf(err) == agentlab.CodeNotFound || err == nil && sb.State == agentlab.SandboxDestroyed
	switch {
	case err != nil && !gone:
		return err
	case !gone:
		work := snap.State == agentlab.SnapshotSaving
		if !work {
			if work, err = s.due(ctx, snap); err != nil {
				return err
			}
		}
		if work {
			s.again(sb.VMID)
		}
		return nil
	case snap.State == agentlab.SnapshotSaving:
		if err != nil {
			sb = sandboxOf(snap)
		}
		return s.saveFailed(ctx, sb, snap, agentlab.Errorf(agentlab.CodeConflict, "the sandbox is destroyed"))
	case snap.State == agentlab.SnapshotReady && snap.Kind == agentlab.SnapshotSaved:
		if snap, err = s.deleteSnapshot(ctx, snap, ""); err != nil {
			return err
		}
	}
	return s.dropSnapshot(ctx, snap)
}

// sandboxOf returns what a snapshot records of a sandbox that no longer exists.
func sandboxOf(snap agentlab.Snapshot) agentlab.Sandbox {
	return agentlab.Sandbox{VMID: snap.VMID, UID: snap.SandboxUID, Name: snap.SandboxName, State: agentlab.SandboxDestroyed}
}

// OriginReady reports whether the snapshot that a sandbox is created from can be
// used. If not, it will be later, or refusal has the reason why it never will. The
// secrets of its guest then count as received by the sandbox.
func (s *Service) OriginReady(ctx context.Context, sb agentlab.Sandbox) (ready bool, refusal, err error) {
	snap, err := s.store.Snapshot(ctx, sb.From.Snapshot)
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		return false, agentlab.Errorf(agentlab.CodeNotFound, "the snapshot of %s no longer exists", sb.From.Name), nil
	case err != nil:
		return false, nil, err
	case !snap.SavedAt.IsZero():
		if sb.JobID != "" {
			err = s.inherit(ctx, sb, snap)
		}
		return err == nil, nil, err
	case snap.State == agentlab.SnapshotDeleting:
		return false, agentlab.Errorf(agentlab.CodeUnavailable, "the snapshot of %s was not saved", sb.From.Name), nil
	}
	return false, nil, nil
}

// Restore implements sandbox.Snapshots.
func (s *Service) Restore(ctx context.Context, sb agentlab.Sandbox) error {
	s.core.ReleaseSlots(sb.VMID)
	snap, err := s.store.Snapshot(ctx, sb.Restoring)
	restored := ""
	s.withState(sb.VMID, func(m *state) { restored = m.restored })
	if err == nil && restored != snap.UID {
		err = s.callRestore(ctx, sb, snap)
	}
	switch {
	case err != nil && (ctx.Err() != nil || backend.IsTransient(err) && !s.core.TriedTooLong(sb.VMID)):
		return err
	case err != nil:
		return s.restoreFailed(ctx, sb, err)
	}
	s.withState(sb.VMID, func(m *state) { m.restored = snap.UID })
	if sb.State != agentlab.SandboxStopped {
		return s.core.Transition(ctx, sb, agentlab.SandboxStopped, "")
	}
	_, err = s.core.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.State != sb.State || now.Restoring != sb.Restoring {
			return nil, nil
		}
		now.Restoring, now.Reason = "", ""
		if snap.Memory {
			now.State = agentlab.SandboxSuspended
		}
		return []agentlab.Event{sandbox.NewEvent(agentlab.EventSandboxSnapshot, *now, map[string]any{"snapshot": snap.UID, "name": snap.Name, "state": "RESTORED"},
			"sandbox %s has the state of its snapshot %s", now.Name, snap.Name), sandbox.StateEvent(*now, sb.State)}, nil
	})
	if err == nil {
		s.withState(sb.VMID, func(m *state) { m.restored = "" })
	}
	return err
}

func (s *Service) callRestore(ctx context.Context, sb agentlab.Sandbox, snap agentlab.Snapshot) error {
	driver, err := s.core.On(sb).NeedSnapshots()
	if err != nil {
		return err
	}
	s.core.CloseGuestListener(sb.VMID)
	return driver.RestoreSnapshot(ctx, backend.SnapshotRef{UID: snap.UID, Of: backend.RefOf(sb)})
}

// restoreFailed ends a restore that is not possible. The step then finds out in
// which state the backend has the sandbox.
func (s *Service) restoreFailed(ctx context.Context, sb agentlab.Sandbox, cause error) error {
	reason := s.core.RedactReason(ctx, sb, cause.Error())
	s.log.Warn("a sandbox was not restored", "vmid", sb.VMID, "err", cause)
	_, err := s.core.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.Restoring != sb.Restoring {
			return nil, nil
		}
		now.Restoring = ""
		switch {
		case now.State.HasVM() && now.State != agentlab.SandboxSuspended:
			now.Desired = agentlab.DesiredRunning
		case now.State == agentlab.SandboxSuspended:
			now.Desired = agentlab.DesiredSuspended
		default:
			now.Desired = agentlab.DesiredStopped
		}
		return []agentlab.Event{sandbox.NewEvent(agentlab.EventSandboxState, sb,
			sandbox.Refused(map[string]any{"state": now.State}, reason, cause, agentlab.HintOf(cause)), "sandbox %s was not restored: %s", sb.Name, reason)}, nil
	})
	s.core.InspectAgain(sb.VMID)
	return err
}
