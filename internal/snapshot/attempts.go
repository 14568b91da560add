package snapshot

import (
	"cmp"
	"context"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// CanFork returns an error with code unsupported if no sandbox on a backend can continue
// the guest of one that no longer exists.
func (s *Service) CanFork(on string) error {
	b := s.fleet.Of(on)
	if _, err := b.NeedSnapshots(); err != nil {
		return err
	}
	if can := b.Can(); !can.Forks || !can.KeptSnapshots {
		return b.Without("cannot continue the guest of another sandbox")
	}
	return nil
}

// SaveForAttempts requests a snapshot of the sandbox of a job that has ended. In
// the same transaction fn changes the job with an ID; after an error of fn nothing
// is saved. Sandboxes are created from the snapshot with SandboxRequest.Fork until
// DropFork; with entry from one that stays after them, see FindSetup. Codes:
// not_found, conflict (state), denied, no_space, unsupported, and those of fn.
func (s *Service) SaveForAttempts(ctx context.Context, vmid int, jobID string, entry agentlab.SetupEntry, fn func(j *agentlab.Job, uid string) ([]agentlab.Event, error)) error {
	sb, err := s.core.Change(ctx, vmid, s.core.Wake, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		if sb.State != agentlab.SandboxRunning {
			return nil, nil
		}
		sb.State = agentlab.SandboxCompleted
		return []agentlab.Event{sandbox.StateEvent(*sb, agentlab.SandboxRunning)}, nil
	})
	if err == nil {
		err = s.CanFork(sb.Backend)
	}
	if err == nil {
		err = s.canSave(sb)
	}
	if err == nil {
		err = s.core.Room()
	}
	if err != nil {
		return err
	}
	return s.saveFork(ctx, sb, jobID, entry, fn)
}

// saveFork requests a snapshot of a sandbox that exists until DropFork.
func (s *Service) saveFork(ctx context.Context, sb agentlab.Sandbox, jobID string, entry agentlab.SetupEntry, fn func(j *agentlab.Job, uid string) ([]agentlab.Event, error)) error {
	snap := snapshotOf(sb)
	snap.UID, snap.Kind, snap.Keep, snap.Setup = agentlab.NewForkUID(), agentlab.SnapshotFork, true, entry
	if entry.Key != "" {
		snap.UsedAt = s.core.Now().UTC()
	}
	err := s.store.AddFork(ctx, snap, jobID, func(j *agentlab.Job) ([]agentlab.Event, error) { return fn(j, snap.UID) })
	if err == nil {
		s.changed(sb.VMID)
	}
	return err
}

// DropFork requests the deletion of a snapshot of SaveForAttempts or SaveForSalvage.
// The sandboxes that are being created from it do not change. It may be called again.
func (s *Service) DropFork(ctx context.Context, uid string) error {
	snap, err := s.store.Snapshot(ctx, uid)
	if err == nil {
		src, _ := s.store.SandboxByUID(ctx, snap.SandboxUID) // its job may wait for the end of the save
		_, err = s.deleteSnapshot(ctx, snap, src.JobID)
	}
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return nil
	}
	return err
}

// ForkOrigin returns the snapshot of SaveForAttempts from which a sandbox is
// requested, and the layers of the network policy that the saved sandbox had: they
// limit the processes in its memory from the first moment on.
func (s *Service) ForkOrigin(ctx context.Context, uid string) (agentlab.Snapshot, []agentlab.Network, error) {
	snap, err := s.store.Snapshot(ctx, uid)
	if err == nil {
		err = usable(snap)
	}
	if err != nil {
		return snap, nil, err
	}
	if snap.Kind != agentlab.SnapshotFork || !snap.Keep || s.fleet.Of(snap.Backend).Missing() != nil {
		return snap, nil, agentlab.Errorf(agentlab.CodeConflict, "snapshot %s is not one for attempts on a backend of this daemon", uid)
	}
	if snap.Setup.Key != "" { // of a repository without a policy of its own
		return snap, nil, nil
	}
	src, err := s.store.SandboxByUID(ctx, snap.SandboxUID)
	return snap, slices.Clone(src.Network.Layers), err
}

// inherit stores the secrets that the guest of a saved sandbox had received as
// those of a sandbox that continues it, before it starts. The sandboxes of an
// ordinary fork have them from its save.
func (s *Service) inherit(ctx context.Context, sb agentlab.Sandbox, snap agentlab.Snapshot) error {
	if snap.Setup.Key != "" { // its guest has received none
		return nil
	}
	src, err := s.store.SandboxByUID(ctx, sb.From.Sandbox)
	if err != nil {
		return err
	}
	_, err = s.cfg.Bootstrap.Inherit(ctx, src, sb)
	return err
}

// SaveForSalvage requests a copy of the disk of a sandbox that is kept for the work of
// its job. In the same transaction fn changes the job with an ID, to which the copy
// belongs. It is used like that of SaveForAttempts. Codes: not_found, conflict (the
// sandbox is not kept), busy (its VM still runs), no_space, unsupported, and those of
// fn.
func (s *Service) SaveForSalvage(ctx context.Context, vmid int, jobID string, fn func(j *agentlab.Job, uid string) ([]agentlab.Event, error)) error {
	sb, err := s.store.Sandbox(ctx, vmid)
	if err == nil {
		_, err = s.core.On(sb).NeedSnapshots()
	}
	switch {
	case err != nil:
		return err
	case !sb.Salvage || sb.Desired != agentlab.DesiredStopped:
		return sandbox.Conflict(sb, "and is not kept for the work of a job", "")
	case sb.State != agentlab.SandboxStopped:
		return agentlab.Errorf(agentlab.CodeBusy, "sandbox %s (%d) is being stopped", sb.Name, vmid)
	}
	if err := cmp.Or(s.canSave(sb), s.core.Room()); err != nil {
		return err
	}
	return s.saveFork(ctx, sb, jobID, agentlab.SetupEntry{}, fn)
}
