package store

import (
	"context"

	"github.com/agentlab-vm/agentlab"
)

var snapshots = newTable("snapshots", []string{"uid"}, func(s *agentlab.Snapshot) []field {
	return []field{
		{"uid", &s.UID},
		{"name", &s.Name},
		{"kind", &s.Kind},
		{"state", &s.State},
		{"keep", &s.Keep},
		{"vmid", &s.VMID},
		{"sandbox_uid", &s.SandboxUID},
		{"sandbox_name", &s.SandboxName},
		{"sandbox_handle", &s.Handle},
		{"backend", &s.Backend},
		{"profile", &s.Profile},
		{"image", &s.Image},
		{"cores", &s.Resources.Cores},
		{"memory_mb", &s.Resources.MemoryMB},
		{"root_size_gb", &s.Resources.RootSizeGB},
		{"nested", &s.Resources.Nested},
		{"options_json", jsonCol{&s.Options}},
		{"setup_json", jsonCol{&s.Setup}},
		{"used_at", timeCol{&s.UsedAt}},
		{"memory", &s.Memory},
		{"bytes", &s.Bytes},
		{"created_at", timeCol{&s.CreatedAt}},
		{"saved_at", timeCol{&s.SavedAt}},
	}
}, checkSnapshot)

func checkSnapshot(s *agentlab.Snapshot) error {
	switch {
	case s.UID == "" || s.SandboxUID == "" || s.VMID <= 0 || s.CreatedAt.IsZero():
		return invalid("uid", "snapshot or sandbox is missing")
	case s.State == agentlab.SnapshotReady && s.SavedAt.IsZero():
		return invalid("saved_at", "it is empty")
	case s.Kind == agentlab.SnapshotFork:
		return s.Resources.Validate()
	}
	if err := agentlab.ValidateName(s.Name); err != nil {
		return err
	}
	return s.Resources.Validate()
}

// AddSnapshot inserts a snapshot that a user saves. CreatedAt is set. Codes:
// exists if the sandbox has one of that name; limit if the snapshots of the kind
// saved have reached the quota; invalid.
func (s *Store) AddSnapshot(ctx context.Context, snap agentlab.Snapshot, q agentlab.SnapshotQuota, evs ...agentlab.Event) (agentlab.Snapshot, error) {
	err := s.write(ctx, func(w *tx) error {
		_, taken, err := snapshots.one(w.ctx, w, "WHERE sandbox_uid = ? AND name = ? AND kind = 'saved'", snap.SandboxUID, snap.Name)
		switch {
		case err != nil:
			return err
		case taken:
			return agentlab.Errorf(agentlab.CodeExists, "sandbox %s has a snapshot named %q", snap.SandboxName, snap.Name).WithField("name").
				WithHint("choose another name, or delete it: agentlab sandbox snapshot delete %s --name %s", snap.SandboxName, snap.Name)
		}
		if err := checkQuota(w, q, 1); err != nil {
			return err
		}
		snap.CreatedAt = w.now
		if err := snapshots.insert(w, &snap); err != nil {
			return err
		}
		return w.emit(fillTarget(evs, snap.VMID, ""))
	})
	return snap, err
}

// checkQuota returns an error with code limit if there would be too many
// snapshots after more were added, or if they occupy too much.
func checkQuota(w *tx, q agentlab.SnapshotQuota, more int) error {
	const hint = "delete some: agentlab sandbox snapshot list; or raise limits.%s in config.yaml"
	var n int
	var bytes int64
	err := w.QueryRowContext(w.ctx, "SELECT count(*), coalesce(sum(bytes), 0) FROM snapshots WHERE kind = 'saved'").Scan(&n, &bytes)
	switch {
	case err != nil:
		return fault(err)
	case q.Count > 0 && n+more > q.Count:
		return agentlab.Errorf(agentlab.CodeLimit, "%d snapshots exist, the maximum is %d", n, q.Count).WithHint(hint, "max_snapshots")
	case q.Bytes > 0 && bytes+int64(more) > q.Bytes:
		return agentlab.Errorf(agentlab.CodeLimit, "the snapshots occupy %d MiB, the maximum is %d MiB", bytes>>20, q.Bytes>>20).WithHint(hint, "snapshots_gb")
	}
	return nil
}

// UpdateSnapshot reads a snapshot, lets fn change it, and writes it with the
// events that fn returns in the same transaction. An error of fn is returned
// unchanged. If fn makes a saved one SAVED, the error has code limit if the
// snapshots then occupy more than q.Bytes. Codes: not_found, limit.
func (s *Store) UpdateSnapshot(ctx context.Context, uid string, q agentlab.SnapshotQuota, fn func(*agentlab.Snapshot) ([]agentlab.Event, error)) (agentlab.Snapshot, error) {
	var out agentlab.Snapshot
	err := s.write(ctx, func(w *tx) error {
		snap, err := snapshotByUID(w.ctx, w, uid)
		if err != nil {
			return err
		}
		old := snap
		evs, err := fn(&snap)
		if err != nil {
			return err
		}
		out = snap
		if snap == old {
			return w.emit(fillTarget(evs, snap.VMID, ""))
		}
		if err := snapshots.update(w, &out); err != nil {
			return err
		}
		if snap.State == agentlab.SnapshotReady && snap.Kind == agentlab.SnapshotSaved {
			if err := checkQuota(w, agentlab.SnapshotQuota{Bytes: q.Bytes}, 0); err != nil {
				return err
			}
		}
		return w.emit(fillTarget(evs, snap.VMID, ""))
	})
	return out, err
}

// RemoveSnapshot deletes the row of a snapshot. Removing one that does not exist
// succeeds, and writes no event.
func (s *Store) RemoveSnapshot(ctx context.Context, uid string, evs ...agentlab.Event) error {
	return s.write(ctx, func(w *tx) error {
		n, err := w.execN("DELETE FROM snapshots WHERE uid = ?", uid)
		if err != nil || n == 0 {
			return err
		}
		return w.emit(evs)
	})
}

// Snapshot returns the snapshot with that UID, or not_found.
func (s *Store) Snapshot(ctx context.Context, uid string) (agentlab.Snapshot, error) {
	return snapshotByUID(ctx, s.r, uid)
}

func snapshotByUID(ctx context.Context, q querier, uid string) (agentlab.Snapshot, error) {
	snap, ok, err := snapshots.one(ctx, q, "WHERE uid = ?", uid)
	if err == nil && !ok {
		err = agentlab.Errorf(agentlab.CodeNotFound, "there is no snapshot %s", uid)
	}
	return snap, err
}

// Snapshots lists snapshots of both kinds, in the order of their creation.
func (s *Store) Snapshots(ctx context.Context, f agentlab.SnapshotFilter) ([]agentlab.Snapshot, error) {
	tail, args := snapshotList(f)
	return snapshots.query(ctx, s.r, tail, args...)
}

func snapshotList(f agentlab.SnapshotFilter) (tail string, args []any) {
	var where filter
	if f.SandboxUID != "" {
		where.add("sandbox_uid = ?", f.SandboxUID)
	}
	return where.tail("created_at, uid", 0), where.args
}

// SandboxesFrom lists the sandboxes that are being created from a snapshot: they
// still need it.
func (s *Store) SandboxesFrom(ctx context.Context, snapshotUID string) ([]agentlab.Sandbox, error) {
	return sandboxes.query(ctx, s.r, "WHERE from_snapshot = ? AND state IN ('REQUESTED', 'PROVISIONING') ORDER BY vmid", snapshotUID)
}

// AddFork inserts the snapshot for the attempts of a job and changes the job, as
// UpdateJob does, or nothing.
func (s *Store) AddFork(ctx context.Context, snap agentlab.Snapshot, jobID string, fn func(*agentlab.Job) ([]agentlab.Event, error)) error {
	return s.write(ctx, func(w *tx) error {
		snap.CreatedAt = w.now
		if err := snapshots.insert(w, &snap); err != nil {
			return err
		}
		_, err := updateJob(w, jobID, fn)
		return err
	})
}

// AllocateFork inserts the snapshot of a fork and the sandboxes that are created
// from it, each as AllocateSandbox does, or nothing. created returns the event of
// a new sandbox.
func (s *Store) AllocateFork(ctx context.Context, snap agentlab.Snapshot, list []agentlab.Sandbox, a agentlab.Allocation,
	created func(agentlab.Sandbox) agentlab.Event,
) ([]agentlab.Sandbox, error) {
	out := make([]agentlab.Sandbox, len(list))
	err := s.write(ctx, func(w *tx) error {
		snap.CreatedAt = w.now
		if err := snapshots.insert(w, &snap); err != nil {
			return err
		}
		for i, sb := range list {
			if err := allocate(w, &sb, a); err != nil {
				return err
			}
			if err := w.emit([]agentlab.Event{created(sb)}); err != nil {
				return err
			}
			out[i] = sb
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// CountSnapshots counts all snapshots by state.
func (s *Store) CountSnapshots(ctx context.Context) (map[agentlab.SnapshotState]int, error) {
	return countBy[agentlab.SnapshotState](ctx, s.r, "snapshots", "state")
}

// SnapshotBytes returns the size of all snapshots by state.
func (s *Store) SnapshotBytes(ctx context.Context) (map[agentlab.SnapshotState]int, error) {
	return sumBy[agentlab.SnapshotState](ctx, s.r, "sum(bytes)", "snapshots", "state")
}
