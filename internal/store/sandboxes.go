package store

import (
	"context"
	"net/netip"

	"github.com/agentlab-vm/agentlab"
)

var sandboxes = newTable("sandboxes", []string{"vmid"}, func(s *agentlab.Sandbox) []field {
	return []field{
		{"vmid", &s.VMID},
		{"uid", &s.UID},
		{"name", &s.Name},
		{"backend", &s.Backend},
		{"profile", &s.Profile},
		{"image", &s.Image},
		{"state", &s.State},
		{"desired", &s.Desired},
		{"reason", &s.Reason},
		{"waiting", &s.Waiting},
		{"on_disk", &s.OnDisk},
		{"cores", &s.Resources.Cores},
		{"memory_mb", &s.Resources.MemoryMB},
		{"root_size_gb", &s.Resources.RootSizeGB},
		{"nested", &s.Resources.Nested},
		{"hardware_json", jsonCol{&s.Options}},
		{"network_json", jsonCol{&s.Network}},
		{"ipv4", addr4Col{&s.IPv4}},
		{"ipv6", addrCol{&s.IPv6}},
		{"network_pending", &s.NetworkPending},
		{"keepalive", &s.Keepalive},
		{"salvage", &s.Salvage},
		{"job_id", &s.JobID},
		{"ip", &s.IP},
		{"handle", &s.Handle},
		{"lease_expires_at", timeCol{&s.LeaseExpiresAt}},
		{"created_at", timeCol{&s.CreatedAt}},
		{"updated_at", timeCol{&s.UpdatedAt}},
		{"booted_at", timeCol{&s.BootedAt}},
		{"from_snapshot", &s.From.Snapshot},
		{"from_sandbox", &s.From.Sandbox},
		{"from_handle", &s.From.Handle},
		{"from_name", &s.From.Name},
		{"restoring", &s.Restoring},
		{"start", &s.Start},
		{"nested_state", &s.NestedState},
		{"workspace_id", &s.Workspace},
		{"unbootable", &s.Unbootable},
	}
}, checkSandbox)

func checkSandbox(s *agentlab.Sandbox) error {
	switch {
	case s.VMID <= 0:
		return invalid("vmid", "%d is not a VMID", s.VMID)
	case s.UID == "":
		return invalid("uid", "it is empty")
	case !s.State.Valid():
		return invalid("state", "unknown state %q", s.State)
	case !s.Desired.Valid():
		return invalid("desired", "%q cannot be desired", s.Desired)
	case s.Network.Mode == "":
		return invalid("network.mode", "it is empty")
	case s.LeaseExpiresAt.IsZero() || s.CreatedAt.IsZero() || s.UpdatedAt.IsZero():
		return invalid("lease_expires_at", "lease, creation or update time is missing")
	}
	if err := agentlab.ValidateName(s.Name); err != nil {
		return err
	}
	return s.Resources.Validate()
}

func invalid(fieldName, format string, args ...any) error {
	return agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField(fieldName)
}

// AllocateSandbox gives sb (whose VMID must be 0) a number and, if a has a
// network, addresses, and inserts it. Both are assigned in ascending order and
// start again at the first after the last; values that a row has are skipped.
// CreatedAt and UpdatedAt are set if zero. An event with SandboxVMID 0 gets
// the new number. The addresses belong to the sandbox until it is DESTROYED.
//
// Codes: exists if a sandbox that is not DESTROYED has the name or any sandbox
// has the UID; limit if there are a.MaxLive sandboxes that are not DESTROYED, without
// those of the warm pool, or no number or address is free; conflict if it is created from a snapshot that
// is not SAVED, or no longer exists; for its workspace also not_found, conflict (its
// state, or another sandbox has it), exists and limit; invalid.
func (s *Store) AllocateSandbox(ctx context.Context, sb agentlab.Sandbox, a agentlab.Allocation, evs ...agentlab.Event) (agentlab.Sandbox, error) {
	if sb.VMID != 0 || sb.IPv4.IsValid() || sb.IPv6.IsValid() {
		return agentlab.Sandbox{}, invalid("vmid", "VMID and addresses are allocated and must not be set")
	}
	err := s.write(ctx, func(w *tx) error {
		if err := checkOrigin(w, sb.From); err != nil {
			return err
		}
		if err := allocate(w, &sb, a); err != nil {
			return err
		}
		return w.emit(fillTarget(evs, sb.VMID, ""))
	})
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	return sb, nil
}

// HandOutSandbox makes the POOLED sandbox vmid the sandbox sb, which has no number:
// it keeps its number, UID, addresses and handle, becomes BOOTING, and its network
// policy is pending. An event with SandboxVMID 0 gets the number.
//
// Codes: conflict if vmid is no longer in the pool; exists if a sandbox that is not
// DESTROYED has the name; limit if there are maxLive sandboxes; not_found; invalid.
func (s *Store) HandOutSandbox(ctx context.Context, vmid int, sb agentlab.Sandbox, maxLive int, evs ...agentlab.Event) (agentlab.Sandbox, error) {
	err := s.write(ctx, func(w *tx) error {
		old, err := sandboxByVMID(w.ctx, w, vmid)
		switch {
		case err != nil:
			return err
		case !old.Pooled() || old.State != agentlab.SandboxPooled || old.Desired != agentlab.DesiredRunning:
			return agentlab.Errorf(agentlab.CodeConflict, "sandbox %d is no longer in the warm pool", vmid)
		}
		if err := checkRoom(w, sb.Name, maxLive); err != nil {
			return err
		}
		sb.VMID, sb.UID, sb.Handle, sb.IPv4, sb.IPv6 = old.VMID, old.UID, old.Handle, old.IPv4, old.IPv6
		sb.Image, sb.State, sb.NetworkPending, sb.Start = old.Image, agentlab.SandboxBooting, true, agentlab.StartPool
		sb.UpdatedAt = w.now
		if err := sandboxes.update(w, &sb); err != nil {
			return err
		}
		w.done.Sandboxes = append(w.done.Sandboxes, sb)
		return w.emit(fillTarget(evs, sb.VMID, ""))
	})
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	return sb, nil
}

// checkOrigin returns an error with code conflict if a sandbox cannot be created
// from a snapshot. A snapshot whose deletion is requested later stays until the
// sandbox is created.
func checkOrigin(w *tx, from agentlab.Origin) error {
	if from.Snapshot == "" {
		return nil
	}
	snap, ok, err := snapshots.one(w.ctx, w, "WHERE uid = ?", from.Snapshot)
	if err == nil && (!ok || snap.State != agentlab.SnapshotReady) {
		err = agentlab.Errorf(agentlab.CodeConflict, "snapshot %s is being deleted, or no longer exists", from.Name).WithField("from_snapshot").
			WithHint("see 'agentlab sandbox snapshot list'")
	}
	return err
}

// allocate is AllocateSandbox in a transaction.
func allocate(w *tx, sb *agentlab.Sandbox, a agentlab.Allocation) (err error) {
	if err := checkRoom(w, sb.Name, a.MaxLive); err != nil {
		return err
	}
	if sb.VMID, err = nextVMID(w, a); err != nil {
		return err
	}
	if sb.IPv4, sb.IPv6, err = nextAddress(w, a); err != nil {
		return err
	}
	if sb.CreatedAt.IsZero() {
		sb.CreatedAt = w.now
	}
	if sb.UpdatedAt.IsZero() {
		sb.UpdatedAt = sb.CreatedAt
	}
	if a.Workspace != nil {
		sb.Workspace = a.Workspace.ID
	}
	if err := sandboxes.insert(w, sb); err != nil {
		return err
	}
	w.done.Sandboxes = append(w.done.Sandboxes, *sb)
	if a.Workspace == nil {
		return nil
	}
	if err := takeLease(w, *sb, *a.Workspace, a.Session); err != nil || a.Session == "" {
		return err
	}
	return useSession(w, a.Session, *sb)
}

func checkRoom(w *tx, name string, maxLive int) error {
	var live, taken int
	err := w.QueryRowContext(w.ctx, "SELECT (SELECT count(*) FROM sandboxes WHERE state <> 'DESTROYED' AND profile <> ? AND salvage = 0), (SELECT count(*) FROM sandboxes WHERE name = ? AND state <> 'DESTROYED')", agentlab.ProfilePool, name).Scan(&live, &taken)
	switch {
	case err != nil:
		return fault(err)
	case taken > 0:
		return agentlab.Errorf(agentlab.CodeExists, "a sandbox named %q exists", name).WithField("name").
			WithHint("choose another name, or destroy it: agentlab sandbox destroy %s", name)
	case maxLive > 0 && live >= maxLive:
		return agentlab.Errorf(agentlab.CodeLimit, "%d sandboxes exist, the maximum is %d", live, maxLive).
			WithHint("destroy one (agentlab sandbox list), or raise limits.max_sandboxes in config.yaml")
	}
	return nil
}

// UpdateSandbox reads a sandbox, lets fn change it, and writes it with the
// events that fn returns (one with SandboxVMID 0 gets vmid) in the same
// transaction. UpdatedAt is set if the row changed; if it did not and there is
// no event, nothing is written. An error of fn is returned unchanged.
//
// fn must not change VMID, UID, addresses or CreatedAt, must not write to the Store
// and must be quick. Codes: not_found; conflict if the change of state is not in the
// transition table; exists if the name is taken.
func (s *Store) UpdateSandbox(ctx context.Context, vmid int, fn func(*agentlab.Sandbox) ([]agentlab.Event, error)) (agentlab.Sandbox, error) {
	var out agentlab.Sandbox
	err := s.write(ctx, func(w *tx) error {
		sb, err := sandboxByVMID(w.ctx, w, vmid)
		if err != nil {
			return err
		}
		old := sb
		evs, err := fn(&sb)
		if err != nil {
			return err
		}
		out = sb
		return saveSandbox(w, old, &out, evs)
	})
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	return out, nil
}

func saveSandbox(w *tx, old agentlab.Sandbox, sb *agentlab.Sandbox, evs []agentlab.Event) error {
	if sb.VMID != old.VMID || sb.UID != old.UID || !sb.CreatedAt.Equal(old.CreatedAt) {
		return agentlab.Errorf(agentlab.CodeInternal, "number, uid and creation time of sandbox %d may not change", old.VMID)
	}
	if sb.State != old.State && !old.State.CanBecome(sb.State) {
		return agentlab.Errorf(agentlab.CodeConflict, "sandbox %s (%d) is %s and cannot become %s", old.Name, old.VMID, old.State, sb.State)
	}
	if sb.State.Final() {
		if err := endLease(w, sb.UID); err != nil {
			return err
		}
		sb.IPv4, sb.IPv6 = netip.Addr{}, netip.Addr{} // free from now on
	} else if sb.IPv4 != old.IPv4 || sb.IPv6 != old.IPv6 {
		return agentlab.Errorf(agentlab.CodeInternal, "addresses of sandbox %d may not change", old.VMID)
	}
	if !sb.Equal(old) {
		sb.UpdatedAt = w.now
		if err := sandboxes.update(w, sb); err != nil {
			return err
		}
		w.done.Sandboxes = append(w.done.Sandboxes, *sb)
	}
	return w.emit(fillTarget(evs, sb.VMID, ""))
}

// Sandbox returns the sandbox with that number, or not_found.
func (s *Store) Sandbox(ctx context.Context, vmid int) (agentlab.Sandbox, error) {
	return sandboxByVMID(ctx, s.r, vmid)
}

func sandboxByVMID(ctx context.Context, q querier, vmid int) (agentlab.Sandbox, error) {
	return oneSandbox(ctx, q, "WHERE vmid = ?", vmid)
}

// oneSandbox returns the first sandbox that tail selects by key, or not_found.
func oneSandbox(ctx context.Context, q querier, tail string, key any) (agentlab.Sandbox, error) {
	sb, ok, err := sandboxes.one(ctx, q, tail, key)
	if err == nil && !ok {
		err = agentlab.Errorf(agentlab.CodeNotFound, "there is no sandbox %v", key).WithHint("see 'agentlab sandbox list'")
	}
	return sb, err
}

// SandboxByName returns the sandbox with that name: the one that is not
// DESTROYED, otherwise the one that was destroyed last; not_found if there is
// none.
func (s *Store) SandboxByName(ctx context.Context, name string) (agentlab.Sandbox, error) {
	return oneSandbox(ctx, s.r, "WHERE name = ? ORDER BY state = 'DESTROYED', created_at DESC, vmid DESC", name)
}

// SandboxByUID returns the sandbox with that UID, in any state, or not_found.
func (s *Store) SandboxByUID(ctx context.Context, uid string) (agentlab.Sandbox, error) {
	return oneSandbox(ctx, s.r, "WHERE uid = ?", uid)
}

// Sandboxes lists sandboxes in ascending order of their numbers.
func (s *Store) Sandboxes(ctx context.Context, f agentlab.SandboxFilter) ([]agentlab.Sandbox, error) {
	tail, args := sandboxList(f)
	return sandboxes.query(ctx, s.r, tail, args...)
}

func sandboxList(f agentlab.SandboxFilter) (tail string, args []any) {
	var where filter
	where.add("vmid > ?", f.AfterVMID)
	addIn(&where, "state", f.States)
	if !f.Destroyed && len(f.States) == 0 {
		where.add("state <> 'DESTROYED'")
	}
	if f.NoPooled {
		where.add("profile <> '" + agentlab.ProfilePool + "'") // a constant, so that an index can have the condition
	}
	return where.tail("vmid", f.Limit), where.args
}

// DeleteSandbox deletes the row of a DESTROYED sandbox, with its tokens and
// grants. Codes: not_found, conflict if it is not DESTROYED.
func (s *Store) DeleteSandbox(ctx context.Context, vmid int) error {
	return s.write(ctx, func(w *tx) error {
		sb, err := sandboxByVMID(w.ctx, w, vmid)
		if err != nil {
			return err
		}
		if !sb.State.Final() {
			return agentlab.Errorf(agentlab.CodeConflict, "sandbox %s (%d) is %s; only a DESTROYED one is deleted", sb.Name, vmid, sb.State)
		}
		return w.exec("DELETE FROM sandboxes WHERE vmid = ?", vmid)
	})
}

// CountSandboxes counts all sandboxes by state, including DESTROYED ones.
func (s *Store) CountSandboxes(ctx context.Context) (map[agentlab.SandboxState]int, error) {
	return countBy[agentlab.SandboxState](ctx, s.r, "sandboxes", "state")
}

// SandboxMemoryMB returns the memory, in MiB, that sandboxes that are not DESTROYED
// may use together, by state.
func (s *Store) SandboxMemoryMB(ctx context.Context) (map[agentlab.SandboxState]int, error) {
	return sumBy[agentlab.SandboxState](ctx, s.r, "sum(memory_mb)", "sandboxes WHERE state <> 'DESTROYED'", "state")
}

// ImagesInUse returns how many sandboxes and snapshots use each image, by its
// reference. For a sandbox that still waits for its image that is only a name.
func (s *Store) ImagesInUse(ctx context.Context) (map[string]int, error) {
	return countBy[string](ctx, s.r, "(SELECT image FROM sandboxes WHERE state <> 'DESTROYED' UNION ALL SELECT image FROM snapshots)", "image")
}

// RecoverSandbox inserts a sandbox whose row was lost, with the number and
// addresses that it has on its backend. Codes: exists if a row has the number,
// the UID or an address, or a row that is not DESTROYED has the name; invalid.
func (s *Store) RecoverSandbox(ctx context.Context, sb agentlab.Sandbox, evs ...agentlab.Event) error {
	return s.write(ctx, func(w *tx) error {
		if err := sandboxes.insert(w, &sb); err != nil {
			return err
		}
		w.done.Sandboxes = append(w.done.Sandboxes, sb)
		return w.emit(fillTarget(evs, sb.VMID, ""))
	})
}
