package workspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// defaultSizeGB is the size of a workspace that is requested without one, in GiB.
const defaultSizeGB = 20

// Create requests an empty workspace with the name, size, storage and backend of sel, and
// returns it in state CREATING. A size of 0 means defaultSizeGB, or the maximum if that is
// less. Codes: invalid, exists, limit, unsupported (also an unknown storage).
func (s *Service) Create(ctx context.Context, sel agentlab.WorkspaceSelection) (agentlab.Workspace, error) {
	v, err := s.plan(sel)
	if err != nil {
		return agentlab.Workspace{}, err
	}
	return s.add(ctx, v)
}

// plan returns the row of a new workspace.
func (s *Service) plan(sel agentlab.WorkspaceSelection) (agentlab.Workspace, error) {
	none := agentlab.Workspace{}
	b, err := s.cfg.Fleet.Choose(sel.Backend)
	if err == nil {
		err = b.Admits()
	}
	if err != nil {
		return none, err
	}
	if err := agentlab.ValidateWorkspaceName(sel.Workspace); err != nil {
		return none, err
	}
	v := newWorkspace(sel.Workspace, b.Name())
	v.SizeGB, v.Storage = sel.SizeGB, sel.Storage
	if most := s.cfg.Limits.SizeGB; v.SizeGB == 0 {
		if v.SizeGB = defaultSizeGB; most > 0 {
			v.SizeGB = min(v.SizeGB, most)
		}
	}
	valid := func(b *fleet.Backend) error {
		d, err := b.NeedVolumes()
		if err != nil {
			return err
		}
		return d.ValidateVolume(backend.VolumeSpec{UID: v.UID, SizeGB: v.SizeGB, Storage: v.Storage})
	}
	if err := valid(b); err != nil {
		return none, s.cfg.Fleet.Supported(err, b.Name(), valid)
	}
	return v, s.checkSize(v.SizeGB)
}

func newWorkspace(name, on string) agentlab.Workspace {
	return agentlab.Workspace{ID: agentlab.NewWorkspaceID(), UID: agentlab.NewUID(), Name: name, Backend: on, State: agentlab.WorkspaceCreating}
}

func (s *Service) checkSize(sizeGB int) error {
	if most := s.cfg.Limits.SizeGB; most > 0 && sizeGB > most {
		return agentlab.Errorf(agentlab.CodeLimit, "%d GiB is more than the maximum of %d GiB", sizeGB, most).WithField("size_gb").
			WithHint("raise limits.workspace_gb in config.yaml")
	}
	return nil
}

func (s *Service) add(ctx context.Context, v agentlab.Workspace) (agentlab.Workspace, error) {
	v, err := s.cfg.Store.AddWorkspace(ctx, v, s.cfg.Limits.Quota, stateEvent(v, nil))
	if err == nil {
		s.loop.Wake(v.ID)
	}
	return v, err
}

// Get returns the workspace with that ID or name. A name means one that is not
// deleted, or else the only one in the trash that had it. Codes: not_found; conflict
// if several in the trash had the name.
func (s *Service) Get(ctx context.Context, idOrName string) (agentlab.Workspace, error) {
	if agentlab.IsWorkspaceID(idOrName) {
		return s.cfg.Store.Workspace(ctx, idOrName)
	}
	all, err := s.cfg.Store.Workspaces(ctx)
	if err != nil {
		return agentlab.Workspace{}, err
	}
	all = slices.DeleteFunc(all, func(v agentlab.Workspace) bool { return v.Name != idOrName })
	if i := slices.IndexFunc(all, func(v agentlab.Workspace) bool { return v.State.Live() }); i >= 0 {
		return all[i], nil
	}
	switch len(all) {
	case 0:
		return agentlab.Workspace{}, agentlab.Errorf(agentlab.CodeNotFound, "there is no workspace %q", idOrName).WithHint("see 'agentlab workspace list'")
	case 1:
		return all[0], nil
	}
	return agentlab.Workspace{}, agentlab.Errorf(agentlab.CodeConflict, "%d deleted workspaces had the name %q", len(all), idOrName).
		WithHint("use its ID: agentlab workspace list --trash")
}

// List returns the workspaces that are not deleted, or with trash those that are, in
// the order of their creation.
func (s *Service) List(ctx context.Context, trash bool) ([]agentlab.Workspace, error) {
	all, err := s.cfg.Store.Workspaces(ctx)
	return slices.DeleteFunc(all, func(v agentlab.Workspace) bool { return v.State.Live() == trash }), err
}

// Bytes returns what a workspace occupied on the backend when it was last compared
// with it; 0 if that is not known.
func (s *Service) Bytes(v agentlab.Workspace) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.audited[v.Backend].usage[v.UID]
}

// UsedBytes returns what all volumes of workspaces occupied on the backends when they
// were last compared with them.
func (s *Service) UsedBytes() (sum int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.audited {
		for _, n := range a.usage {
			sum += n
		}
	}
	return sum
}

// request changes the row of a workspace of this backend and runs its step.
func (s *Service) request(ctx context.Context, idOrName string, fn func(*agentlab.Workspace) error) (agentlab.Workspace, error) {
	v, err := s.getReachable(ctx, idOrName)
	if err != nil {
		return agentlab.Workspace{}, err
	}
	wake := s.loop.Wake
	v, err = s.cfg.Store.UpdateWorkspace(ctx, v.ID, s.cfg.Limits.Quota, func(v *agentlab.Workspace) ([]agentlab.Event, error) {
		before := *v
		if err := fn(v); err != nil || *v == before {
			return nil, err
		}
		if before.State == agentlab.WorkspaceCreating && v.State != before.State {
			wake = s.loop.Interrupt // its volume is no longer needed
		}
		return []agentlab.Event{stateEvent(*v, nil)}, nil
	})
	if err == nil {
		s.begin(v.ID)
		wake(v.ID)
	}
	return v, err
}

func conflict(v *agentlab.Workspace, what string) error {
	return agentlab.Errorf(agentlab.CodeConflict, "workspace %s is %s and %s", v.Name, v.State, what).WithHint("see 'agentlab workspace show %s'", v.ID)
}

// Rename changes the name of a workspace that is not deleted. Codes: not_found,
// conflict, exists, invalid.
func (s *Service) Rename(ctx context.Context, idOrName, name string) (agentlab.Workspace, error) {
	if err := agentlab.ValidateWorkspaceName(name); err != nil {
		return agentlab.Workspace{}, err
	}
	return s.request(ctx, idOrName, func(v *agentlab.Workspace) error {
		if !v.State.Live() {
			return conflict(v, "cannot be renamed")
		}
		v.Name = name
		return nil
	})
}

// Resize requests that a workspace becomes larger. Codes: not_found, conflict, limit,
// invalid (a smaller size).
func (s *Service) Resize(ctx context.Context, idOrName string, sizeGB int) (agentlab.Workspace, error) {
	if err := (backend.VolumeSpec{UID: "-", SizeGB: sizeGB}).Check(); err != nil {
		return agentlab.Workspace{}, err
	}
	if err := s.checkSize(sizeGB); err != nil {
		return agentlab.Workspace{}, err
	}
	return s.request(ctx, idOrName, func(v *agentlab.Workspace) error {
		switch {
		case v.State != agentlab.WorkspaceReady:
			return conflict(v, "cannot be resized")
		case sizeGB < v.SizeGB:
			return agentlab.Errorf(agentlab.CodeInvalid, "workspace %s has %d GiB and cannot become smaller", v.Name, v.SizeGB).WithField("size_gb").
				WithHint("create a smaller one, and copy the files")
		case sizeGB > v.SizeGB:
			v.State, v.GrowToGB = agentlab.WorkspaceGrowing, sizeGB
		}
		return nil
	})
}

// Delete moves a workspace to the trash, from which Undelete returns it. One that was
// never READY contains nothing and is deleted for good; with purge every one is.
// Codes: not_found, conflict.
func (s *Service) Delete(ctx context.Context, idOrName string, purge bool) (agentlab.Workspace, error) {
	return s.request(ctx, idOrName, func(v *agentlab.Workspace) error {
		switch {
		case v.State == agentlab.WorkspaceDeleting, v.State == agentlab.WorkspaceTrashed && !purge:
			return nil
		case v.State == agentlab.WorkspaceGrowing, v.State == agentlab.WorkspaceRestoring:
			return conflict(v, "cannot be deleted now")
		case purge || v.ReadyAt.IsZero():
			v.State, v.Reason = agentlab.WorkspaceDeleting, ""
		default:
			v.State, v.Reason, v.TrashedAt = agentlab.WorkspaceTrashed, "", s.clock()
		}
		return nil
	})
}

// Undelete returns a workspace from the trash, with another name unless name is "".
// Codes: not_found, conflict, exists, invalid.
func (s *Service) Undelete(ctx context.Context, idOrName, name string) (agentlab.Workspace, error) {
	if name != "" {
		if err := agentlab.ValidateWorkspaceName(name); err != nil {
			return agentlab.Workspace{}, err
		}
	}
	return s.request(ctx, idOrName, func(v *agentlab.Workspace) error {
		if v.State != agentlab.WorkspaceTrashed {
			return agentlab.Errorf(agentlab.CodeConflict, "workspace %s is %s and not in the trash", v.Name, v.State).
				WithHint("list those in the trash, and use an ID: agentlab workspace list --trash")
		}
		v.State, v.TrashedAt = agentlab.WorkspaceReady, time.Time{}
		if name != "" {
			v.Name = name
		}
		return nil
	})
}

// ExpireTrash requests that the workspaces that were deleted before a time are deleted
// for good. It returns their number.
func (s *Service) ExpireTrash(ctx context.Context, before time.Time) (n int, err error) {
	list, err := s.List(ctx, true)
	for _, v := range list {
		if v.State != agentlab.WorkspaceTrashed || !v.TrashedAt.Before(before) || s.reachable(v) != nil {
			continue
		}
		expired := false
		_, err := s.request(ctx, v.ID, func(v *agentlab.Workspace) error {
			if expired = v.State == agentlab.WorkspaceTrashed && v.TrashedAt.Before(before); expired {
				v.State = agentlab.WorkspaceDeleting
			}
			return nil
		})
		switch {
		case agentlab.CodeOf(err) == agentlab.CodeConflict: // it is being copied
		case err != nil:
			return n, err
		case expired:
			n++
		}
	}
	return n, err
}

// Fork requests a copy of a workspace, or of one of its snapshots unless snapshot is
// "", and returns it in state CREATING. Codes: not_found, conflict, exists, limit,
// invalid, unsupported.
func (s *Service) Fork(ctx context.Context, idOrName, name, snapshot string) (agentlab.Workspace, error) {
	use, err := s.PlanFork(ctx, idOrName, name, snapshot)
	if err != nil {
		return agentlab.Workspace{}, err
	}
	return s.add(ctx, *use.New)
}

// PlanFork returns the copy that Fork would request, for a caller that stores it. Codes
// are those of Fork, except those of the store.
func (s *Service) PlanFork(ctx context.Context, idOrName, name, snapshot string) (agentlab.WorkspaceUse, error) {
	none := agentlab.WorkspaceUse{}
	if err := agentlab.ValidateWorkspaceName(name); err != nil {
		return none, err
	}
	src, err := s.getReachable(ctx, idOrName)
	if err == nil {
		err = s.cfg.Fleet.Of(src.Backend).Admits()
	}
	if err != nil {
		return none, err
	}
	v := newWorkspace(name, src.Backend)
	v.SizeGB, v.Storage = src.SizeGB, src.Storage
	v.From = agentlab.WorkspaceOrigin{UID: src.UID, Handle: src.Handle, Name: src.Name}
	if snapshot != "" {
		n, err := s.findSnapshot(ctx, src, snapshot)
		if err != nil {
			return none, err
		}
		v.SizeGB, v.From.Snapshot, v.From.Name = n.SizeGB, n.UID, src.Name+"/"+n.Name
	}
	return agentlab.WorkspaceUse{ID: v.ID, Backend: v.Backend, New: &v, Created: stateEvent(v, nil), Quota: s.cfg.Limits.Quota}, nil
}

// Trash moves a workspace that no sandbox has to the trash, for a caller that stores
// it, and returns the events.
func (s *Service) Trash(v *agentlab.Workspace) []agentlab.Event {
	if !v.State.Live() {
		return nil
	}
	if v.State, v.Reason, v.TrashedAt = agentlab.WorkspaceTrashed, "", s.clock(); v.ReadyAt.IsZero() {
		v.State, v.TrashedAt = agentlab.WorkspaceDeleting, time.Time{} // it has no content
	}
	v.GrowToGB, v.Restoring = 0, ""
	return []agentlab.Event{stateEvent(*v, nil)}
}

// Replace puts the workspace by in the place of another one, which goes to the trash: by
// gets its name and its session. vmid is the maintenance sandbox that has copied the files
// and still has the other one, so that nothing can have changed since. Codes: not_found,
// conflict, invalid.
func (s *Service) Replace(ctx context.Context, idOrName, by string, vmid int) (agentlab.Workspace, error) {
	none := agentlab.Workspace{}
	old, err := s.getReachable(ctx, idOrName)
	if err != nil {
		return none, err
	}
	next, err := s.getReachable(ctx, by)
	if err != nil {
		return none, err
	}
	sb, err := s.cfg.Leases.Sandbox(ctx, vmid)
	if err != nil {
		return none, err
	}
	if !sb.Maintenance() || sb.Workspace != old.ID {
		return none, agentlab.Errorf(agentlab.CodeConflict, "sandbox %s is not a maintenance sandbox of workspace %s", sb.Name, old.Name).WithField("vmid")
	}
	v, err := s.cfg.Store.ReplaceWorkspace(ctx, old.ID, next.ID, sb.UID, s.Trash, func(v *agentlab.Workspace) []agentlab.Event {
		e := stateEvent(*v, nil)
		e.Message = fmt.Sprintf("workspace %s is on backend %s; the one on backend %s is in the trash", v.Name, v.Backend, old.Backend)
		return []agentlab.Event{e}
	})
	if err == nil {
		s.loop.Wake(old.ID)
		s.loop.Wake(v.ID)
	}
	return v, err
}

// Snapshots lists the snapshots of a workspace. Code: not_found.
func (s *Service) Snapshots(ctx context.Context, idOrName string) ([]agentlab.WorkspaceSnapshot, error) {
	v, err := s.Get(ctx, idOrName)
	if err != nil {
		return nil, err
	}
	return s.cfg.Store.WorkspaceSnapshots(ctx, v.ID)
}

func (s *Service) findSnapshot(ctx context.Context, v agentlab.Workspace, name string) (agentlab.WorkspaceSnapshot, error) {
	list, err := s.cfg.Store.WorkspaceSnapshots(ctx, v.ID)
	if err != nil {
		return agentlab.WorkspaceSnapshot{}, err
	}
	if i := slices.IndexFunc(list, func(n agentlab.WorkspaceSnapshot) bool { return n.Name == name }); i >= 0 {
		return list[i], nil
	}
	return agentlab.WorkspaceSnapshot{}, agentlab.Errorf(agentlab.CodeNotFound, "workspace %s has no snapshot %q", v.Name, name).
		WithHint("see 'agentlab workspace snapshot list %s'", v.ID)
}

// SaveSnapshot requests a snapshot of a workspace, and returns it in state SAVING.
// attached permits that a sandbox has the workspace, and is what the snapshot has then;
// with "" that is a conflict. Codes: not_found, conflict, exists, limit, invalid,
// unsupported.
func (s *Service) SaveSnapshot(ctx context.Context, idOrName, name string, attached agentlab.WorkspaceConsistency) (agentlab.WorkspaceSnapshot, error) {
	none := agentlab.WorkspaceSnapshot{}
	if err := agentlab.ValidateName(name); err != nil {
		return none, err
	}
	v, err := s.getReachable(ctx, idOrName)
	if err == nil {
		err = s.checkAttached(v, attached)
	}
	if err != nil {
		return none, err
	}
	n := agentlab.WorkspaceSnapshot{
		UID: agentlab.NewUID(), Name: name, WorkspaceID: v.ID, State: agentlab.WorkspaceSnapshotSaving,
		Consistency: cmp.Or(attached, agentlab.ConsistencyDetached),
	}
	n, err = s.cfg.Store.AddWorkspaceSnapshot(ctx, n, snapshotEvent(v, n, nil))
	if err == nil {
		s.loop.Wake(v.ID)
	}
	if e, ok := errors.AsType[*agentlab.Error](err); ok && e.Code == agentlab.CodeConflict && v.State == agentlab.WorkspaceReady && s.savesAttached(v) {
		err = e.WithHint("save it as it is now with --attached frozen, or detach it: agentlab workspace detach %s", v.Name)
	}
	return n, err
}

// RestoreSnapshot requests that a workspace gets the content and the size of one of
// its snapshots; what they are now is lost. Codes: not_found, conflict, unsupported.
func (s *Service) RestoreSnapshot(ctx context.Context, idOrName, name string) (agentlab.Workspace, error) {
	src, err := s.Get(ctx, idOrName)
	if err != nil {
		return agentlab.Workspace{}, err
	}
	n, err := s.findSnapshot(ctx, src, name)
	if err != nil {
		return agentlab.Workspace{}, err
	}
	return s.request(ctx, src.ID, func(v *agentlab.Workspace) error {
		if v.State != agentlab.WorkspaceReady && (v.State != agentlab.WorkspaceFailed || v.ReadyAt.IsZero()) {
			return conflict(v, "cannot be restored")
		}
		v.State, v.Restoring, v.Reason = agentlab.WorkspaceRestoring, n.UID, ""
		return nil
	})
}

// DeleteSnapshot requests the deletion of a snapshot, and returns it in state
// DELETING. Codes: not_found, conflict, unsupported.
func (s *Service) DeleteSnapshot(ctx context.Context, idOrName, name string) (agentlab.WorkspaceSnapshot, error) {
	none := agentlab.WorkspaceSnapshot{}
	v, err := s.getReachable(ctx, idOrName)
	if err != nil {
		return none, err
	}
	n, err := s.findSnapshot(ctx, v, name)
	if err != nil {
		return none, err
	}
	n, err = s.cfg.Store.UpdateWorkspaceSnapshot(ctx, n.UID, func(n *agentlab.WorkspaceSnapshot) ([]agentlab.Event, error) {
		if n.State == agentlab.WorkspaceSnapshotDeleting {
			return nil, nil
		}
		n.State = agentlab.WorkspaceSnapshotDeleting
		return []agentlab.Event{snapshotEvent(v, *n, nil)}, nil
	})
	if err == nil {
		s.loop.Wake(v.ID)
	}
	return n, err
}
