package store

import (
	"context"

	"github.com/agentlab-vm/agentlab"
)

var workspaces = newTable("workspaces", []string{"id"}, func(v *agentlab.Workspace) []field {
	return []field{
		{"id", &v.ID},
		{"uid", &v.UID},
		{"name", &v.Name},
		{"backend", &v.Backend},
		{"storage", &v.Storage},
		{"handle", &v.Handle},
		{"size_gb", &v.SizeGB},
		{"formatted", &v.Formatted},
		{"state", &v.State},
		{"reason", &v.Reason},
		{"grow_to_gb", &v.GrowToGB},
		{"restoring", &v.Restoring},
		{"from_uid", &v.From.UID},
		{"from_handle", &v.From.Handle},
		{"from_snapshot", &v.From.Snapshot},
		{"from_name", &v.From.Name},
		{"created_at", timeCol{&v.CreatedAt}},
		{"updated_at", timeCol{&v.UpdatedAt}},
		{"ready_at", timeCol{&v.ReadyAt}},
		{"trashed_at", timeCol{&v.TrashedAt}},
	}
}, checkWorkspace)

func checkWorkspace(v *agentlab.Workspace) error {
	if v.UID == "" || v.SizeGB < 1 || v.CreatedAt.IsZero() || !agentlab.IsWorkspaceID(v.ID) {
		return invalid("id", "workspace is incomplete")
	}
	return agentlab.ValidateWorkspaceName(v.Name)
}

var workspaceSnapshots = newTable("workspace_snapshots", []string{"uid"}, func(v *agentlab.WorkspaceSnapshot) []field {
	return []field{
		{"uid", &v.UID},
		{"name", &v.Name},
		{"workspace_id", &v.WorkspaceID},
		{"state", &v.State},
		{"consistency", &v.Consistency},
		{"size_gb", &v.SizeGB},
		{"formatted", &v.Formatted},
		{"created_at", timeCol{&v.CreatedAt}},
		{"saved_at", timeCol{&v.SavedAt}},
	}
}, func(v *agentlab.WorkspaceSnapshot) error {
	if v.UID == "" || v.WorkspaceID == "" || v.CreatedAt.IsZero() || (v.State == agentlab.WorkspaceSnapshotReady) == v.SavedAt.IsZero() && v.State != agentlab.WorkspaceSnapshotDeleting {
		return invalid("uid", "snapshot of a workspace is incomplete")
	}
	return agentlab.ValidateName(v.Name)
})

// AddWorkspace inserts a workspace. CreatedAt and UpdatedAt are set. The row of a
// copy is written only while what it is a copy of can be copied; from then on that
// is neither changed nor deleted until the copy is complete. Codes: exists (name),
// limit, not_found and conflict (the source of a copy), invalid.
func (s *Store) AddWorkspace(ctx context.Context, v agentlab.Workspace, q agentlab.WorkspaceQuota, evs ...agentlab.Event) (agentlab.Workspace, error) {
	err := s.write(ctx, func(w *tx) error {
		if v.From.UID != "" {
			if err := checkCopySource(w, &v); err != nil {
				return err
			}
		}
		if err := addWorkspace(w, &v, q); err != nil {
			return err
		}
		return w.emit(evs)
	})
	return v, err
}

func addWorkspace(w *tx, v *agentlab.Workspace, q agentlab.WorkspaceQuota) error {
	v.CreatedAt, v.UpdatedAt = w.now, w.now
	if err := checkWorkspaceName(w, *v); err != nil {
		return err
	}
	if err := workspaces.insert(w, v); err != nil {
		return err
	}
	return checkWorkspaceQuota(w, q)
}

// checkCopySource returns an error if the source of the copy v cannot be copied.
func checkCopySource(w *tx, v *agentlab.Workspace) error {
	from := v.From
	src, ok, err := workspaces.one(w.ctx, w, "WHERE uid = ?", from.UID)
	switch {
	case err != nil:
		return err
	case !ok:
		return agentlab.Errorf(agentlab.CodeNotFound, "workspace %s no longer exists", from.Name)
	case from.Snapshot == "" && src.State != agentlab.WorkspaceReady, !src.State.Live():
		return agentlab.Errorf(agentlab.CodeConflict, "workspace %s is %s and cannot be copied", src.Name, src.State)
	case from.Snapshot == "":
		v.SizeGB, v.Formatted = src.SizeGB, src.Formatted // it may have grown since it was planned
		return notLeased(w, src, "be copied")
	}
	snap, err := savedSnapshot(w, from.Snapshot, from.Name)
	if err == nil {
		v.SizeGB, v.Formatted = snap.SizeGB, snap.Formatted
	}
	return err
}

// savedSnapshot returns the snapshot with that UID, and an error if it cannot be used.
func savedSnapshot(w *tx, uid, name string) (agentlab.WorkspaceSnapshot, error) {
	snap, ok, err := workspaceSnapshots.one(w.ctx, w, "WHERE uid = ?", uid)
	switch {
	case err != nil:
	case !ok:
		err = agentlab.Errorf(agentlab.CodeNotFound, "snapshot %s no longer exists", name)
	case snap.State != agentlab.WorkspaceSnapshotReady:
		err = agentlab.Errorf(agentlab.CodeConflict, "snapshot %s is %s", name, snap.State).WithHint("a SAVED snapshot can be used")
	}
	return snap, err
}

func checkWorkspaceName(w *tx, v agentlab.Workspace) error {
	if !v.State.Live() {
		return nil
	}
	_, taken, err := workspaces.one(w.ctx, w, "WHERE name = ? AND id <> ? AND state NOT IN ('TRASHED', 'DELETING')", v.Name, v.ID)
	if err == nil && taken {
		err = agentlab.Errorf(agentlab.CodeExists, "there is a workspace named %q", v.Name).WithField("name").
			WithHint("choose another name; see 'agentlab workspace list'")
	}
	return err
}

// checkWorkspaceQuota returns an error with code limit if there are too many
// workspaces, or if they are too large.
func checkWorkspaceQuota(w *tx, q agentlab.WorkspaceQuota) error {
	const hint = "delete some for good: agentlab workspace delete --purge; or raise limits.%s in config.yaml"
	var n, gb int
	err := w.QueryRowContext(w.ctx, `SELECT count(*), coalesce(sum(max(v.size_gb, v.grow_to_gb, coalesce(n.size_gb, 0))), 0)
		FROM workspaces v LEFT JOIN workspace_snapshots n ON n.uid = v.restoring`).Scan(&n, &gb)
	switch {
	case err != nil:
		return fault(err)
	case q.Count > 0 && n > q.Count:
		return agentlab.Errorf(agentlab.CodeLimit, "%d workspaces exist with those in the trash, the maximum is %d", n-1, q.Count).WithHint(hint, "max_workspaces")
	case q.TotalGB > 0 && gb > q.TotalGB:
		return agentlab.Errorf(agentlab.CodeLimit, "all workspaces with those in the trash would have %d GiB, the maximum is %d GiB", gb, q.TotalGB).WithHint(hint, "workspaces_gb")
	}
	return nil
}

// UpdateWorkspace reads a workspace, lets fn change it, and writes it with the
// events that fn returns in the same transaction. An error of fn is returned
// unchanged. Codes: not_found; exists if fn changes the name to one that is taken;
// limit if fn makes all of them too large; conflict if fn requests a change of a
// volume that is being copied.
func (s *Store) UpdateWorkspace(ctx context.Context, id string, q agentlab.WorkspaceQuota, fn func(*agentlab.Workspace) ([]agentlab.Event, error)) (agentlab.Workspace, error) {
	var out agentlab.Workspace
	err := s.write(ctx, func(w *tx) error {
		v, err := workspaceByID(w.ctx, w, id)
		if err != nil {
			return err
		}
		old := v
		evs, err := fn(&v)
		if err != nil {
			return err
		}
		if v != old {
			v.UpdatedAt = w.now
			if err := saveWorkspace(w, old, &v, q); err != nil {
				return err
			}
		}
		out = v
		return w.emit(evs)
	})
	return out, err
}

func saveWorkspace(w *tx, old agentlab.Workspace, v *agentlab.Workspace, q agentlab.WorkspaceQuota) error {
	if v.ID != old.ID || v.UID != old.UID || !v.CreatedAt.Equal(old.CreatedAt) {
		return agentlab.Errorf(agentlab.CodeInternal, "id, uid and creation time of workspace %s may not change", old.ID)
	}
	if err := checkWorkspaceName(w, *v); err != nil {
		return err
	}
	changes := []agentlab.WorkspaceState{agentlab.WorkspaceGrowing, agentlab.WorkspaceRestoring, agentlab.WorkspaceTrashed, agentlab.WorkspaceDeleting}
	for _, state := range changes {
		if v.State != state || old.State == state {
			continue
		}
		if err := notCopied(w, "from_uid = ?", old.UID, "workspace "+old.Name); err != nil {
			return err
		}
		if err := notLeased(w, old, "be changed"); err != nil {
			return err
		}
		if !v.State.Live() && old.State.Live() {
			if err := notInSession(w, old); err != nil {
				return err
			}
		}
	}
	grows := v.GrowToGB > old.GrowToGB
	if v.Restoring != "" && old.Restoring == "" {
		snap, err := savedSnapshot(w, v.Restoring, "of workspace "+v.Name)
		if err != nil {
			return err
		}
		v.Formatted = v.Formatted || snap.Formatted // until the restoration succeeds the disk may have either content
		grows = snap.SizeGB > v.SizeGB
	}
	if err := workspaces.update(w, v); err != nil {
		return err
	}
	if grows { // what already exists is not refused
		return checkWorkspaceQuota(w, agentlab.WorkspaceQuota{TotalGB: q.TotalGB})
	}
	return nil
}

// ReplaceWorkspace puts the workspace by in the place of another one, which only the
// sandbox with the UID holder has: by gets its name and its session, and trash moves the
// other one to the trash. moved returns the event of by. Codes: not_found; conflict if one
// of them is not READY, if another sandbox has one of them or waits for it, if the session
// has a sandbox, or if by belongs to a session.
func (s *Store) ReplaceWorkspace(ctx context.Context, id, by, holder string, trash, moved func(*agentlab.Workspace) []agentlab.Event) (agentlab.Workspace, error) {
	var out agentlab.Workspace
	err := s.write(ctx, func(w *tx) error {
		old, err := workspaceByID(w.ctx, w, id)
		if err != nil {
			return err
		}
		next, err := workspaceByID(w.ctx, w, by)
		if err == nil {
			err = mayReplace(w, old, next, holder)
		}
		if err != nil {
			return err
		}
		evs := trash(&old)
		if old.State.Live() {
			return agentlab.Errorf(agentlab.CodeInternal, "workspace %s is %s, and not in the trash", old.Name, old.State)
		}
		next.Name, old.UpdatedAt, next.UpdatedAt = old.Name, w.now, w.now
		for _, v := range []*agentlab.Workspace{&old, &next} {
			if err := workspaces.update(w, v); err != nil {
				return err
			}
		}
		in, ok, err := sessions.one(w.ctx, w, "WHERE workspace_id = ?", old.ID)
		if err == nil && ok {
			current, serr := sandboxByVMID(w.ctx, w, in.VMID)
			if serr != nil && agentlab.CodeOf(serr) != agentlab.CodeNotFound {
				return serr
			}
			if serr == nil && current.UID == in.UID && !current.State.Final() { // it is where old is
				return agentlab.Errorf(agentlab.CodeConflict, "session %s has sandbox %s", in.Name, current.Name).WithHint("stop it first: agentlab session stop %s", in.Name)
			}
			in.WorkspaceID, in.UpdatedAt = next.ID, w.now
			err = sessions.update(w, &in)
		}
		if err != nil {
			return err
		}
		out = next
		return w.emit(append(evs, moved(&next)...))
	})
	return out, err
}

// mayReplace returns an error unless ReplaceWorkspace may put next in the place of old.
func mayReplace(w *tx, old, next agentlab.Workspace, holder string) error {
	for _, v := range []agentlab.Workspace{old, next} {
		if v.State != agentlab.WorkspaceReady {
			return agentlab.Errorf(agentlab.CodeConflict, "workspace %s is %s", v.Name, v.State).WithHint("see 'agentlab workspace show %s'", v.ID)
		}
	}
	if old.ID == next.ID {
		return agentlab.Errorf(agentlab.CodeInvalid, "workspace %s cannot replace itself", old.Name).WithField("by")
	}
	queue, err := workspaceLeases.query(w.ctx, w, leaseQueue, old.ID)
	if err != nil {
		return err
	}
	if len(queue) != 1 || queue[0].UID != holder || !queue[0].Acquired() {
		return agentlab.Errorf(agentlab.CodeConflict, "workspace %s may have changed: the maintenance sandbox does not have it alone", old.Name).WithHint("try again when no other sandbox needs it")
	}
	if err := notCopied(w, "from_uid = ?", old.UID, "workspace "+old.Name); err != nil {
		return err
	}
	if err := notLeased(w, next, "replace another one"); err != nil {
		return err
	}
	return notInSession(w, next)
}

// notCopied returns an error with code conflict while a workspace is being created
// as a copy of what the condition selects.
func notCopied(w *tx, cond, uid, what string) error {
	copied, ok, err := workspaces.one(w.ctx, w, "WHERE state = 'CREATING' AND "+cond, uid)
	if err == nil && ok {
		err = agentlab.Errorf(agentlab.CodeConflict, "%s is being copied to workspace %s", what, copied.Name).WithHint("try again later")
	}
	return err
}

// RemoveWorkspace deletes the row of a DELETING workspace, with its snapshots.
// Removing one that does not exist succeeds, and writes no event.
func (s *Store) RemoveWorkspace(ctx context.Context, id string, evs ...agentlab.Event) error {
	return s.write(ctx, func(w *tx) error {
		n, err := w.execN("DELETE FROM workspaces WHERE id = ? AND state = 'DELETING'", id)
		if err != nil || n == 0 {
			return err
		}
		return w.emit(evs)
	})
}

// Workspace returns the workspace with that ID, or not_found.
func (s *Store) Workspace(ctx context.Context, id string) (agentlab.Workspace, error) {
	return workspaceByID(ctx, s.r, id)
}

func workspaceByID(ctx context.Context, q querier, id string) (agentlab.Workspace, error) {
	v, ok, err := workspaces.one(ctx, q, "WHERE id = ?", id)
	if err == nil && !ok {
		err = agentlab.Errorf(agentlab.CodeNotFound, "there is no workspace %s", id).WithHint("see 'agentlab workspace list'")
	}
	return v, err
}

// Workspaces lists all workspaces, with those in the trash, in the order of their
// creation.
func (s *Store) Workspaces(ctx context.Context) ([]agentlab.Workspace, error) {
	return workspaces.query(ctx, s.r, "ORDER BY created_at, id")
}

// AddWorkspaceSnapshot inserts a snapshot of a READY workspace. CreatedAt and SizeGB
// are set. A workspace that a sandbox has, or waits for, needs another Consistency than
// ConsistencyDetached, which that of any other workspace becomes. Codes: not_found (the workspace), conflict (its state), exists, limit.
func (s *Store) AddWorkspaceSnapshot(ctx context.Context, n agentlab.WorkspaceSnapshot, evs ...agentlab.Event) (agentlab.WorkspaceSnapshot, error) {
	err := s.write(ctx, func(w *tx) error {
		v, err := workspaceByID(w.ctx, w, n.WorkspaceID)
		if err != nil {
			return err
		}
		if v.State != agentlab.WorkspaceReady {
			return agentlab.Errorf(agentlab.CodeConflict, "workspace %s is %s and cannot be saved", v.Name, v.State).WithHint("see 'agentlab workspace show %s'", v.ID)
		}
		leased := notLeased(w, v, "be saved")
		switch {
		case leased == nil:
			n.Consistency = agentlab.ConsistencyDetached
		case n.Consistency == agentlab.ConsistencyDetached, agentlab.CodeOf(leased) != agentlab.CodeConflict:
			return leased
		}
		all, err := workspaceSnapshots.query(w.ctx, w, "WHERE workspace_id = ?", v.ID)
		if err != nil {
			return err
		}
		for _, other := range all {
			if other.Name == n.Name {
				return agentlab.Errorf(agentlab.CodeExists, "workspace %s has a snapshot named %q", v.Name, n.Name).WithField("name").
					WithHint("choose another name, or delete it: agentlab workspace snapshot delete %s --name %s", v.Name, n.Name)
			}
		}
		if len(all) >= agentlab.MaxWorkspaceSnapshots {
			return agentlab.Errorf(agentlab.CodeLimit, "workspace %s has %d snapshots, the maximum", v.Name, len(all)).
				WithHint("delete some: agentlab workspace snapshot list %s", v.Name)
		}
		n.CreatedAt, n.SizeGB, n.Formatted = w.now, v.SizeGB, v.Formatted
		if err := workspaceSnapshots.insert(w, &n); err != nil {
			return err
		}
		return w.emit(evs)
	})
	return n, err
}

// UpdateWorkspaceSnapshot reads a snapshot, lets fn change it, and writes it with the
// events that fn returns in the same transaction. An error of fn is returned
// unchanged. Codes: not_found; conflict if fn makes one DELETING that is being
// copied or restored.
func (s *Store) UpdateWorkspaceSnapshot(ctx context.Context, uid string, fn func(*agentlab.WorkspaceSnapshot) ([]agentlab.Event, error)) (agentlab.WorkspaceSnapshot, error) {
	var out agentlab.WorkspaceSnapshot
	err := s.write(ctx, func(w *tx) error {
		n, ok, err := workspaceSnapshots.one(w.ctx, w, "WHERE uid = ?", uid)
		switch {
		case err != nil:
			return err
		case !ok:
			return agentlab.Errorf(agentlab.CodeNotFound, "there is no snapshot %s of a workspace", uid)
		}
		old := n
		evs, err := fn(&n)
		if err != nil {
			return err
		}
		if out = n; n == old {
			return w.emit(evs)
		}
		if n.State == agentlab.WorkspaceSnapshotDeleting {
			if err := notCopied(w, "from_snapshot = ?", uid, "snapshot "+n.Name); err != nil {
				return err
			}
			if v, ok, err := workspaces.one(w.ctx, w, "WHERE restoring = ?", uid); err != nil || ok {
				if err == nil {
					err = agentlab.Errorf(agentlab.CodeConflict, "workspace %s is being restored to snapshot %s", v.Name, n.Name).WithHint("try again later")
				}
				return err
			}
		}
		if err := workspaceSnapshots.update(w, &out); err != nil {
			return err
		}
		return w.emit(evs)
	})
	return out, err
}

// RemoveWorkspaceSnapshot deletes the row of a snapshot. Removing one that does not
// exist succeeds, and writes no event.
func (s *Store) RemoveWorkspaceSnapshot(ctx context.Context, uid string, evs ...agentlab.Event) error {
	return s.write(ctx, func(w *tx) error {
		n, err := w.execN("DELETE FROM workspace_snapshots WHERE uid = ?", uid)
		if err != nil || n == 0 {
			return err
		}
		return w.emit(evs)
	})
}

// WorkspaceSnapshots lists the snapshots of a workspace, in the order of their
// creation.
func (s *Store) WorkspaceSnapshots(ctx context.Context, workspaceID string) ([]agentlab.WorkspaceSnapshot, error) {
	return workspaceSnapshots.query(ctx, s.r, "WHERE workspace_id = ? ORDER BY created_at, uid", workspaceID)
}

// CountWorkspaces counts all workspaces by state.
func (s *Store) CountWorkspaces(ctx context.Context) (map[agentlab.WorkspaceState]int, error) {
	return countBy[agentlab.WorkspaceState](ctx, s.r, "workspaces", "state")
}

// WorkspaceGB returns the size in GiB of all workspaces by state.
func (s *Store) WorkspaceGB(ctx context.Context) (map[agentlab.WorkspaceState]int, error) {
	return sumBy[agentlab.WorkspaceState](ctx, s.r, "sum(size_gb)", "workspaces", "state")
}
