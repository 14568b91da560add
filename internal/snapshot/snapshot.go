package snapshot

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// canSave returns an error if a sandbox cannot be saved: code conflict if it
// cannot now, denied if it never can. A running job is not saved: the copy of its runner
// would report to the same job.
func (s *Service) canSave(sb agentlab.Sandbox) error {
	if err := s.core.Reachable(sb); err != nil {
		return err
	}
	if sb.Profile == agentlab.ProfileLost {
		return agentlab.Errorf(agentlab.CodeDenied, "sandbox %s (%d) was recovered without its profile, and which secrets it has received is not known", sb.Name, sb.VMID).
			WithHint("copy what you need from it, and create a new one: agentlab sandbox new")
	}
	if sb.Workspace != "" {
		return hasWorkspace(sb, "be saved or copied")
	}
	switch sb.State {
	case agentlab.SandboxReady, agentlab.SandboxCompleted, agentlab.SandboxSuspended, agentlab.SandboxStopped:
		if sb.Desired != agentlab.DesiredDestroyed && sb.Restoring == "" {
			return nil
		}
	case agentlab.SandboxRunning:
		return sandbox.Conflict(sb, "and a sandbox with a running job cannot be saved", "wait until job %s has ended", sb.JobID)
	}
	return sandbox.Conflict(sb, "and cannot be saved", "a READY, COMPLETED, SUSPENDED or STOPPED sandbox can be saved")
}

// hasWorkspace is the error for what a sandbox with a workspace cannot do: its guest
// would continue with a file system that others have changed.
func hasWorkspace(sb agentlab.Sandbox, what string) error {
	return agentlab.Errorf(agentlab.CodeConflict, "sandbox %s (%d) has a workspace and cannot %s", sb.Name, sb.VMID, what).
		WithHint("detach it first: agentlab workspace detach %s", sb.Workspace)
}

// hasNoSecrets returns an error if a sandbox has received secrets, which a snapshot or
// image of it would keep.
func (s *Service) hasNoSecrets(sb agentlab.Sandbox) error {
	received, err := s.cfg.Bootstrap.ReceivedSecrets(sb)
	if err != nil || !received {
		return err
	}
	return agentlab.Errorf(agentlab.CodeDenied, "sandbox %s (%d) has received secrets, which the copy would keep longer than its lease", sb.Name, sb.VMID).
		WithHint("save a sandbox whose profile has no secrets bundle, and into which you have copied none; 'agentlab sandbox fork' and 'agentlab sandbox suspend --to-disk' are possible")
}

// SaveSnapshot requests a snapshot of a sandbox, and returns it in state SAVING.
// With keep it is not deleted with the sandbox. Codes: not_found, invalid (name),
// exists, limit, conflict (state), denied (it has received secrets), no_space,
// unsupported.
func (s *Service) SaveSnapshot(ctx context.Context, vmid int, name string, keep bool) (agentlab.Snapshot, error) {
	none := agentlab.Snapshot{}
	if err := agentlab.ValidateName(name); err != nil {
		return none, err
	}
	sb, err := s.store.Sandbox(ctx, vmid)
	if err == nil {
		_, err = s.core.On(sb).NeedSnapshots()
	}
	if err != nil {
		return none, err
	}
	if b := s.core.On(sb); keep && !b.Can().KeptSnapshots {
		return none, b.Without("deletes the snapshots of a sandbox with it").WithField("keep")
	}
	if err := s.canSave(sb); err != nil {
		return none, err
	}
	if err := s.hasNoSecrets(sb); err != nil {
		return none, err
	}
	if err := s.core.Room(); err != nil {
		return none, err
	}
	snap := snapshotOf(sb)
	snap.Name, snap.Kind, snap.Keep = name, agentlab.SnapshotSaved, keep
	snap, err = s.store.AddSnapshot(ctx, snap, s.cfg.Quota, snapshotEvent(snap, "", nil))
	if err == nil {
		s.changed(vmid)
	}
	return snap, err
}

// ExportDisk writes the root disk of the stopped sandbox with a UID to a file that does
// not exist, for an image. Codes: not_found, conflict (state), denied (it has received
// secrets), no_space, unsupported. After an error the file is not to be used.
func (s *Service) ExportDisk(ctx context.Context, vmid int, uid, path string) error {
	sb, err := s.exportable(ctx, vmid, uid)
	if b := s.core.On(sb); err == nil && b.Console == nil {
		err = b.Without("cannot make an image of a sandbox").WithHint("write a recipe: docs/images.md")
	} else if err == nil {
		err = b.Console.ExportDisk(ctx, backend.RefOf(sb), path)
	}
	if err == nil { // it may have run before the copy
		_, err = s.exportable(ctx, vmid, uid)
	}
	return err
}

// exportable returns a sandbox whose disk can become an image.
func (s *Service) exportable(ctx context.Context, vmid int, uid string) (agentlab.Sandbox, error) {
	sb, err := s.store.Sandbox(ctx, vmid)
	if err == nil && sb.UID != uid {
		err = agentlab.Errorf(agentlab.CodeNotFound, "sandbox %d was destroyed", vmid)
	}
	if err == nil {
		err = s.hasNoSecrets(sb)
	}
	switch {
	case err != nil:
		return sb, err
	case sb.State != agentlab.SandboxStopped:
		return sb, sandbox.Conflict(sb, "and only the disk of a stopped sandbox can become an image", "agentlab sandbox stop %s", sb.Name)
	}
	return sb, s.canSave(sb)
}

// snapshotOf returns a new snapshot of a sandbox.
func snapshotOf(sb agentlab.Sandbox) agentlab.Snapshot {
	return agentlab.Snapshot{
		UID: agentlab.NewUID(), State: agentlab.SnapshotSaving,
		VMID: sb.VMID, SandboxUID: sb.UID, SandboxName: sb.Name, Handle: sb.Handle,
		Backend: sb.Backend, Profile: sb.Profile, Image: sb.Image, Resources: sb.Resources, Options: sb.Options,
	}
}

// Snapshots lists the snapshots that users saved: those of the sandbox with a
// VMID or name, or all for "". Only if no sandbox has that VMID or name now, it
// lists those of all sandboxes that had it: a name and a number never mean the
// snapshots of a former owner, which a token may not cover. Code: not_found.
func (s *Service) Snapshots(ctx context.Context, owner string) ([]agentlab.Snapshot, error) {
	var filter agentlab.SnapshotFilter
	var absent error
	if owner != "" {
		switch sb, err := s.core.Get(ctx, owner); {
		case err == nil:
			filter.SandboxUID = sb.UID
		case agentlab.CodeOf(err) != agentlab.CodeNotFound:
			return nil, err
		default:
			absent = err
		}
	}
	all, err := s.store.Snapshots(ctx, filter)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(n agentlab.Snapshot) bool {
		return n.Kind != agentlab.SnapshotSaved || absent != nil && n.SandboxName != owner && strconv.Itoa(n.VMID) != owner
	})
	if len(all) == 0 {
		return nil, absent
	}
	return all, nil
}

// FindSnapshot returns the snapshot with a name of a sandbox, among those that
// Snapshots lists. Codes: not_found; conflict if several sandboxes that no longer
// exist had one.
func (s *Service) FindSnapshot(ctx context.Context, owner, name string) (agentlab.Snapshot, error) {
	list, err := s.Snapshots(ctx, owner)
	if err != nil {
		return agentlab.Snapshot{}, err
	}
	list = slices.DeleteFunc(list, func(n agentlab.Snapshot) bool { return n.Name != name })
	switch len(list) {
	case 0:
		return agentlab.Snapshot{}, agentlab.Errorf(agentlab.CodeNotFound, "sandbox %s has no snapshot %q", owner, name).WithHint("see 'agentlab sandbox snapshot list %s'", owner)
	case 1:
		return list[0], nil
	}
	return agentlab.Snapshot{}, agentlab.Errorf(agentlab.CodeConflict, "%d sandboxes named %s had a snapshot %q", len(list), owner, name).
		WithHint("name the sandbox by its VMID: agentlab sandbox snapshot list")
}

// usable returns an error with code conflict if a snapshot cannot be used.
func usable(n agentlab.Snapshot) error {
	if n.State == agentlab.SnapshotReady {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeConflict, "snapshot %s of sandbox %s is %s", n.Name, n.SandboxName, n.State).
		WithHint("see 'agentlab sandbox snapshot list %s'", n.SandboxName)
}

// RestoreSnapshot requests that a sandbox gets the disk and the memory of one of
// its snapshots; what they are now is lost. Its number, name, lease and network
// policy do not change. Afterwards it runs, or is STOPPED if the snapshot has no
// memory. Codes: not_found, conflict, unsupported.
func (s *Service) RestoreSnapshot(ctx context.Context, vmid int, name string) (agentlab.Sandbox, error) {
	sb, err := s.store.Sandbox(ctx, vmid)
	if err == nil {
		_, err = s.core.On(sb).NeedSnapshots()
	}
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	snap, err := s.FindSnapshot(ctx, strconv.Itoa(vmid), name)
	if err == nil {
		err = usable(snap)
	}
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	return s.core.RequestChange(ctx, vmid, s.core.Interrupt, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		switch {
		case snap.SandboxUID != sb.UID:
			return nil, agentlab.Errorf(agentlab.CodeNotFound, "sandbox %s has no snapshot %q", sb.Name, name)
		case sb.Restoring == snap.UID:
			return nil, nil
		case sb.Salvage:
			return nil, sandbox.OnlyKept(*sb)
		case sb.Workspace != "":
			return nil, hasWorkspace(*sb, "be restored")
		case sb.State == agentlab.SandboxRunning:
			return nil, sandbox.Conflict(*sb, "and a sandbox with a running job cannot be restored", "cancel the job, or wait until it has ended")
		case sb.Desired == agentlab.DesiredDestroyed || sb.Restoring != "" || !sb.State.CanBecome(agentlab.SandboxStopped) && sb.State != agentlab.SandboxStopped:
			return nil, sandbox.Conflict(*sb, "and cannot be restored", "")
		}
		sb.Restoring, sb.Desired = snap.UID, agentlab.DesiredStopped
		if snap.Memory {
			sb.Desired = agentlab.DesiredRunning
		}
		return []agentlab.Event{sandbox.NewEvent(agentlab.EventSandboxSnapshot, *sb, map[string]any{"snapshot": snap.UID, "name": name, "state": "RESTORING"},
			"sandbox %s will be restored to its snapshot %s", sb.Name, name)}, nil
	})
}

// DeleteSnapshot requests the deletion of a snapshot, and returns it in state
// DELETING. Codes: not_found, conflict (a sandbox is being restored to it, or it
// belongs to another backend).
func (s *Service) DeleteSnapshot(ctx context.Context, owner, name string) (agentlab.Snapshot, error) {
	snap, err := s.FindSnapshot(ctx, owner, name)
	if err != nil {
		return snap, err
	}
	if err := s.fleet.Of(snap.Backend).Missing(); err != nil {
		return snap, agentlab.Errorf(agentlab.CodeConflict, "snapshot %s cannot be deleted: %w", name, err)
	}
	if sb, err := s.store.SandboxByUID(ctx, snap.SandboxUID); err == nil && sb.Restoring == snap.UID {
		return snap, sandbox.Conflict(sb, "and is being restored to this snapshot", "try again later")
	}
	return s.deleteSnapshot(ctx, snap, "")
}

// deleteSnapshot makes a snapshot DELETING. The event is also about a job, unless
// jobID is "".
func (s *Service) deleteSnapshot(ctx context.Context, snap agentlab.Snapshot, jobID string) (agentlab.Snapshot, error) {
	out, err := s.store.UpdateSnapshot(ctx, snap.UID, s.cfg.Quota, func(n *agentlab.Snapshot) ([]agentlab.Event, error) {
		if n.State == agentlab.SnapshotDeleting {
			return nil, nil
		}
		n.State = agentlab.SnapshotDeleting
		return []agentlab.Event{snapshotEvent(*n, "", nil).About(n.VMID, jobID)}, nil
	})
	if err == nil {
		s.changed(snap.VMID)
	}
	return out, err
}

// ExpireSnapshots requests the deletion of the snapshots that were saved before a
// time and are not kept, and of those after setup that were not used since then. It
// returns their number.
func (s *Service) ExpireSnapshots(ctx context.Context, before time.Time) (n int, err error) {
	if n, err = s.expireSetups(ctx, before); err != nil {
		return n, err
	}
	list, err := s.Snapshots(ctx, "")
	if err != nil {
		return n, err
	}
	for _, snap := range list {
		if snap.Keep || snap.State != agentlab.SnapshotReady || !snap.SavedAt.Before(before) {
			continue
		}
		if sb, err := s.store.SandboxByUID(ctx, snap.SandboxUID); err == nil && sb.Restoring == snap.UID {
			continue
		}
		if _, err := s.deleteSnapshot(ctx, snap, ""); err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// Origin implements sandbox.Snapshots.
func (s *Service) Origin(ctx context.Context, from string) (agentlab.Snapshot, error) {
	if !slices.ContainsFunc(s.fleet.All(), func(b *fleet.Backend) bool { return b.Snapshots != nil }) {
		_, err := s.fleet.Default().NeedSnapshots()
		return agentlab.Snapshot{}, err
	}
	owner, name, ok := strings.Cut(from, "/")
	if !ok || owner == "" {
		return agentlab.Snapshot{}, agentlab.Errorf(agentlab.CodeInvalid, "%q is not SANDBOX/NAME", from).WithField("from_snapshot").
			WithHint("see 'agentlab sandbox snapshot list'")
	}
	snap, err := s.FindSnapshot(ctx, owner, name)
	if err == nil {
		err = usable(snap)
	}
	if err == nil {
		_, err = s.fleet.Of(snap.Backend).NeedSnapshots()
	}
	return snap, err
}

// snapshotEvent is the event of the current state of a snapshot. If it was not
// saved, cause is why, and reason its redacted text. reason of one that is SAVED is why
// its guest has not written its disks before; "" if it has.
func snapshotEvent(n agentlab.Snapshot, reason string, cause error) agentlab.Event {
	data := map[string]any{"snapshot": n.UID, "name": n.Name, "state": n.State, "keep": n.Keep}
	what := snapshotName(n)
	switch {
	case n.Setup.Key != "":
		data["setup"] = true
	case n.Kind == agentlab.SnapshotFork:
		data["fork"] = true
	}
	text := fmt.Sprintf("%s of sandbox %s is %s", what, n.SandboxName, n.State)
	if n.State == agentlab.SnapshotReady {
		data["bytes"], data["memory"], data["seconds"] = n.Bytes, n.Memory, n.SavedAt.Sub(n.CreatedAt).Seconds()
		if reason != "" {
			data["synced"] = false
			lost := "is missing"
			if n.Memory {
				lost = "is only in the saved memory"
			}
			text += fmt.Sprintf(", but its guest had not written its disks: what it wrote last %s: %s", lost, reason)
		}
	}
	if cause != nil {
		text = fmt.Sprintf("%s of sandbox %s was not saved: %s", what, n.SandboxName, reason)
		sandbox.Refused(data, reason, cause, agentlab.HintOf(cause))
	}
	return agentlab.NewEvent(agentlab.EventSandboxSnapshot, data, "%s", text).About(n.VMID, "")
}

// snapshotName is how events name a snapshot.
func snapshotName(n agentlab.Snapshot) string {
	switch {
	case n.Setup.Key != "":
		return "the snapshot after setup"
	case n.Kind == agentlab.SnapshotFork:
		return "the snapshot for a fork"
	}
	return "snapshot " + n.Name
}
