package workspace

import (
	"context"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// step brings a workspace closer to what its row requests.
func (s *Service) step(ctx context.Context, id string) (time.Duration, error) {
	v, err := s.cfg.Store.Workspace(ctx, id)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		s.noWait(id)
		s.loop.Forget(id)
		return 0, nil
	}
	if err == nil && s.loop.Assign(id, v.Backend) {
		s.loop.Wake(id)
		return 0, nil
	}
	if err != nil || s.reachable(v) != nil {
		return 0, err
	}
	s.begin(id)
	switch v.State {
	case agentlab.WorkspaceCreating:
		err = s.create(ctx, v)
	case agentlab.WorkspaceDeleting:
		err = s.remove(ctx, v)
	default:
		// What was requested first is done first: a snapshot is requested before
		// the restoration that would lose what it saves.
		if err = s.stepSnapshots(ctx, v); err == nil {
			err = s.stepVolume(ctx, v)
		}
	}
	if err == nil {
		s.noWait(id)
		return 0, nil
	}
	if ctx.Err() == nil {
		s.noteWaiting(ctx, v, err)
	}
	return 0, err
}

func (s *Service) stepVolume(ctx context.Context, v agentlab.Workspace) error {
	var err error
	switch v.State {
	case agentlab.WorkspaceTrashed:
		return nil
	case agentlab.WorkspaceGrowing:
		var d backend.Volumes
		if d, err = s.volumes(v); err == nil {
			err = d.GrowVolume(ctx, backend.VolumeRefOf(v), v.GrowToGB)
		}
	case agentlab.WorkspaceRestoring:
		var d backend.Volumes
		if d, err = s.volumes(v); err == nil {
			err = d.RestoreVolume(ctx, snapshotRef(v, v.Restoring))
		}
		if err == nil {
			if v.Formatted, err = s.savedFormatted(ctx, v); err != nil {
				return err
			}
		}
	}
	if err != nil && (ctx.Err() != nil || backend.IsTransient(err)) {
		return err
	}
	return s.settle(ctx, v, err)
}

// savedFormatted reports whether the snapshot to which a workspace was restored has a
// file system. Only that permits the next guest to create one on the disk.
func (s *Service) savedFormatted(ctx context.Context, v agentlab.Workspace) (bool, error) {
	list, err := s.cfg.Store.WorkspaceSnapshots(ctx, v.ID)
	i := slices.IndexFunc(list, func(n agentlab.WorkspaceSnapshot) bool { return n.UID == v.Restoring })
	return i < 0 || list[i].Formatted, err
}

// create creates the volume of a workspace.
func (s *Service) create(ctx context.Context, v agentlab.Workspace) error {
	vol, err := s.callCreate(ctx, v)
	if err == nil {
		return s.become(ctx, v, vol, agentlab.WorkspaceReady, "", nil)
	}
	if ctx.Err() != nil || backend.IsTransient(err) {
		return err
	}
	s.log.Warn("a workspace was not created", "workspace", v.ID, "err", err)
	return s.become(ctx, v, backend.Volume{}, agentlab.WorkspaceFailed, agentlab.TextWithHint(err), err)
}

func (s *Service) callCreate(ctx context.Context, v agentlab.Workspace) (backend.Volume, error) {
	if v.From.UID == "" {
		d, err := s.volumes(v)
		if err != nil {
			return backend.Volume{}, err
		}
		return d.CreateVolume(ctx, backend.VolumeSpec{UID: v.UID, SizeGB: v.SizeGB, Storage: v.Storage})
	}
	d, err := s.volumes(v)
	if err != nil {
		return backend.Volume{}, err
	}
	from := backend.VolumeRef{UID: v.From.UID, Handle: v.From.Handle}
	if v.From.Snapshot == "" {
		return d.CloneVolume(ctx, from, v.UID)
	}
	return d.CloneVolumeSnapshot(ctx, backend.VolumeSnapshotRef{UID: v.From.Snapshot, Of: from}, v.UID)
}

// settle writes the state of a volume on which no operation runs. cause is why the
// requested operation was given up.
func (s *Service) settle(ctx context.Context, v agentlab.Workspace, cause error) error {
	d, err := s.volumes(v)
	if err != nil {
		return err
	}
	vol, err := d.InspectVolume(ctx, backend.VolumeRefOf(v))
	state, reason := agentlab.WorkspaceReady, ""
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		state, reason = agentlab.WorkspaceFailed, "its volume is missing on the backend"
	case err != nil:
		return err
	case vol.Partial:
		state, reason = agentlab.WorkspaceFailed, "its volume is partial: "+vol.Reason
	}
	if state == agentlab.WorkspaceFailed && v.State == state && v.ReadyAt.IsZero() {
		return nil // the row has the reason why it was not created
	}
	return s.become(ctx, v, vol, state, reason, cause)
}

// become writes a state that follows from v, unless the row has changed.
func (s *Service) become(ctx context.Context, v agentlab.Workspace, vol backend.Volume, state agentlab.WorkspaceState, reason string, cause error) error {
	_, err := s.cfg.Store.UpdateWorkspace(ctx, v.ID, agentlab.WorkspaceQuota{}, func(now *agentlab.Workspace) ([]agentlab.Event, error) {
		if now.State != v.State || now.GrowToGB != v.GrowToGB || now.Restoring != v.Restoring {
			return nil, nil
		}
		now.State, now.Reason, now.GrowToGB, now.Restoring = state, agentlab.Reason(reason), 0, ""
		if v.State == agentlab.WorkspaceRestoring {
			now.Formatted = v.Formatted
		}
		if state == agentlab.WorkspaceReady {
			now.SizeGB, now.Storage, now.Handle = vol.SizeGB, vol.Storage, vol.Ref.Handle
			if now.ReadyAt.IsZero() {
				now.ReadyAt = s.clock()
			}
		}
		if cause == nil && now.State == v.State && now.SizeGB == v.SizeGB && now.Reason == v.Reason {
			return nil, nil
		}
		return []agentlab.Event{endEvent(v, *now, s.clock().Sub(s.beginOf(v)), cause)}, nil
	})
	return err
}

// remove deletes the volume of a workspace, and then its row.
func (s *Service) remove(ctx context.Context, v agentlab.Workspace) error {
	d, err := s.volumes(v)
	if err != nil {
		return err
	}
	if err := d.DeleteVolume(ctx, backend.VolumeRefOf(v)); err != nil {
		return err
	}
	switch _, err := d.InspectVolume(ctx, backend.VolumeRefOf(v)); {
	case err == nil:
		return agentlab.Errorf(agentlab.CodeUnavailable, "the backend still has the volume after its deletion")
	case agentlab.CodeOf(err) != agentlab.CodeNotFound:
		return err
	}
	v.State, v.Reason = agentlab.WorkspaceDeleted, ""
	return s.cfg.Store.RemoveWorkspace(ctx, v.ID, stateEvent(v, nil))
}

// noteWaiting stores why a requested operation does not continue, with an event. The
// texts of the same failure may differ, so they are stored once for each code.
func (s *Service) noteWaiting(ctx context.Context, v agentlab.Workspace, cause error) {
	code := agentlab.CodeOf(cause)
	s.mu.Lock()
	known := s.waiting[v.ID] == code
	s.waiting[v.ID] = code
	s.mu.Unlock()
	if known || v.State == agentlab.WorkspaceReady || v.State == agentlab.WorkspaceFailed || v.State == agentlab.WorkspaceTrashed {
		return
	}
	_, err := s.cfg.Store.UpdateWorkspace(ctx, v.ID, agentlab.WorkspaceQuota{}, func(now *agentlab.Workspace) ([]agentlab.Event, error) {
		if now.State != v.State {
			return nil, nil
		}
		now.Reason = agentlab.Reason("waits: " + agentlab.TextWithHint(cause))
		return []agentlab.Event{stateEvent(*now, nil)}, nil
	})
	if err != nil {
		s.log.Error("the reason why a workspace waits was not stored", "workspace", v.ID, "err", err)
	}
}

func (s *Service) noWait(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.waiting, id)
	delete(s.begun, id)
}

// begin records when the operation of a workspace began, unless it is known.
func (s *Service) begin(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.begun[id].IsZero() {
		s.begun[id] = s.clock()
	}
}

// beginOf returns when the operation of a workspace began.
func (s *Service) beginOf(v agentlab.Workspace) time.Time {
	if v.State == agentlab.WorkspaceCreating {
		return v.CreatedAt
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.begun[v.ID]
}
