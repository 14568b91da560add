package workspace

import (
	"context"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

const (
	// freezeLimit is how long a guest waits for the end of a snapshot. A daemon that is
	// killed leaves its workspace frozen for that long.
	freezeLimit = guestapi.MaxFreezeSeconds * time.Second
	// thawLimit limits how long a guest may take to thaw its workspace, also while the
	// daemon ends.
	thawLimit = 10 * time.Second
)

func (s *Service) savesAttached(v agentlab.Workspace) bool {
	return s.cfg.Fleet.Of(v.Backend).Can().AttachedVolumeSnapshots
}

// checkAttached returns an error if a workspace that a sandbox has cannot be saved so.
func (s *Service) checkAttached(v agentlab.Workspace, attached agentlab.WorkspaceConsistency) error {
	switch {
	case attached == "":
		return nil
	case !slices.Contains(agentlab.AttachedConsistencies, attached):
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is not one of %q", attached, agentlab.AttachedConsistencies).WithField("attached")
	case !s.savesAttached(v):
		return agentlab.Errorf(agentlab.CodeUnsupported, "backend %s cannot save a workspace while a sandbox has it", v.Backend).WithField("attached").
			WithHint("detach it first, and omit --attached: agentlab workspace detach %s", v.Name)
	}
	return nil
}

// stepSnapshots saves and deletes the snapshots of a workspace that wait for it.
func (s *Service) stepSnapshots(ctx context.Context, v agentlab.Workspace) error {
	list, err := s.cfg.Store.WorkspaceSnapshots(ctx, v.ID)
	for _, n := range list {
		if err == nil && n.State == agentlab.WorkspaceSnapshotSaving {
			n, err = s.save(ctx, v, n)
		}
		if err == nil && n.State == agentlab.WorkspaceSnapshotDeleting {
			err = s.drop(ctx, v, n)
		}
	}
	return err
}

// save makes a snapshot SAVED, or DELETING if that is not possible.
func (s *Service) save(ctx context.Context, v agentlab.Workspace, n agentlab.WorkspaceSnapshot) (agentlab.WorkspaceSnapshot, error) {
	saved, got, err := s.saveVolume(ctx, v, n)
	if err != nil && (ctx.Err() != nil || backend.IsTransient(err)) {
		return n, err
	}
	cause := err
	// A sandbox that has the workspace may have created its file system since the request.
	current, err := s.cfg.Store.Workspace(ctx, v.ID)
	if err != nil {
		return n, err
	}
	return s.cfg.Store.UpdateWorkspaceSnapshot(ctx, n.UID, func(now *agentlab.WorkspaceSnapshot) ([]agentlab.Event, error) {
		if now.State != agentlab.WorkspaceSnapshotSaving {
			return nil, nil
		}
		if now.State = agentlab.WorkspaceSnapshotDeleting; cause == nil {
			now.State, now.Consistency, now.SizeGB, now.SavedAt = agentlab.WorkspaceSnapshotReady, got, saved.SizeGB, s.clock()
			now.Formatted = now.Formatted || current.Formatted
		}
		return []agentlab.Event{snapshotEvent(v, *now, cause)}, nil
	})
}

// saveVolume saves the volume of a workspace, and returns what the snapshot contains.
func (s *Service) saveVolume(ctx context.Context, v agentlab.Workspace, n agentlab.WorkspaceSnapshot) (saved backend.VolumeSnapshot, got agentlab.WorkspaceConsistency, err error) {
	none := backend.VolumeSnapshot{}
	d, err := s.volumes(v)
	if err != nil {
		return none, "", err
	}
	l, owned, err := s.owner(ctx, v)
	if err == nil && n.Consistency != agentlab.ConsistencyDetached {
		// A snapshot that exists is that of an attempt whose end is not known. Since
		// then the guest may have written more, or the sandbox may have ended.
		err = d.DeleteVolumeSnapshot(ctx, snapshotRef(v, n.UID))
	}
	switch {
	case err != nil:
		return none, "", err
	case n.Consistency == agentlab.ConsistencyDetached: // a sandbox that owns it waits until it is saved
		saved, err = d.SnapshotVolume(ctx, backend.VolumeRefOf(v), n.UID)
		return saved, agentlab.ConsistencyDetached, err
	case !owned, n.Consistency == agentlab.ConsistencyCrash: // a sandbox that has ended may have been killed
		saved, err = d.SnapshotVolume(ctx, backend.VolumeRefOf(v), n.UID)
		return saved, agentlab.ConsistencyCrash, err
	}
	saved, err = s.saveFrozen(ctx, d, v, n, l)
	return saved, agentlab.ConsistencyFrozen, err
}

// owner returns the lease of the sandbox that has a workspace.
func (s *Service) owner(ctx context.Context, v agentlab.Workspace) (l agentlab.WorkspaceLease, ok bool, err error) {
	leases, err := s.cfg.Leases.WorkspaceLeases(ctx, v.ID)
	if i := slices.IndexFunc(leases, agentlab.WorkspaceLease.Acquired); i >= 0 {
		return leases[i], true, err
	}
	return l, false, err
}

// saveFrozen saves a volume while the guest that has it changes nothing. If the guest
// does not do its part, nothing is saved: an answer that does not come is not waited for
// again.
func (s *Service) saveFrozen(ctx context.Context, d backend.Volumes, v agentlab.Workspace, n agentlab.WorkspaceSnapshot, l agentlab.WorkspaceLease) (backend.VolumeSnapshot, error) {
	none := backend.VolumeSnapshot{}
	if s.core == nil {
		return none, notFrozen(v, agentlab.Errorf(agentlab.CodeUnsupported, "there are no guests"))
	}
	thaw, err := s.freeze(ctx, l, freezeLimit)
	if err != nil {
		return none, notFrozen(v, err)
	}
	saved, err := d.SnapshotVolume(ctx, backend.VolumeRefOf(v), n.UID)
	tctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), thawLimit)
	defer cancel()
	if terr := thaw(tctx); terr != nil && err == nil {
		err = notFrozen(v, terr)
	}
	return saved, err
}

func notFrozen(v agentlab.Workspace, cause error) error {
	return agentlab.Errorf(agentlab.CodeConflict, "the guest has not kept workspace %s frozen: %w", v.Name, cause).
		WithHint("try again; or save what a power cut would leave: --attached crash")
}

// drop deletes a snapshot, and then its row.
func (s *Service) drop(ctx context.Context, v agentlab.Workspace, n agentlab.WorkspaceSnapshot) error {
	d, err := s.volumes(v)
	if err != nil {
		return err
	}
	if err := d.DeleteVolumeSnapshot(ctx, snapshotRef(v, n.UID)); err != nil {
		return err
	}
	n.State = agentlab.WorkspaceSnapshotDeleted
	return s.cfg.Store.RemoveWorkspaceSnapshot(ctx, n.UID, snapshotEvent(v, n, nil))
}
