package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/agentlab-vm/agentlab"
)

var workspaceLeases = newTable("workspace_leases", []string{"number"}, func(l *agentlab.WorkspaceLease) []field {
	return []field{
		{"number", &l.Number},
		{"workspace_id", &l.WorkspaceID},
		{"sandbox_vmid", &l.VMID},
		{"sandbox_uid", &l.UID},
		{"nonce", &l.Nonce},
		{"requested_at", timeCol{&l.RequestedAt}},
		{"wait_until", timeCol{&l.WaitUntil}},
		{"acquired_at", timeCol{&l.AcquiredAt}},
		{"release", &l.Release},
		{"reason", &l.Reason},
	}
}, func(l *agentlab.WorkspaceLease) error {
	if l.Number < 1 || l.WorkspaceID == "" || l.VMID < 1 || l.UID == "" || l.Nonce == "" || l.RequestedAt.IsZero() || l.WaitUntil.IsZero() {
		return invalid("workspace", "lease of a workspace is incomplete")
	}
	return nil
})

// leaseEnded is what the event of a lease that has ended says.
const leaseEnded = "no longer has"

const leaseQueue = "WHERE workspace_id = ? ORDER BY number"

// takeLease gives a new sandbox the lease of its workspace, or a place in the queue
// for it. With use.New it creates the workspace. session is the ID of its session, or "".
func takeLease(w *tx, sb agentlab.Sandbox, use agentlab.WorkspaceUse, session string) error {
	if use.New != nil {
		if err := addWorkspace(w, use.New, use.Quota); err != nil {
			return err
		}
		if err := w.emit([]agentlab.Event{use.Created}); err != nil {
			return err
		}
	}
	v, err := workspaceByID(w.ctx, w, use.ID)
	switch {
	case err != nil:
		return err
	case v.Backend != sb.Backend:
		return agentlab.Errorf(agentlab.CodeConflict, "workspace %s belongs to backend %s, and sandbox %s to %s", v.Name, v.Backend, sb.Name, sb.Backend).WithField("workspace")
	case v.State == agentlab.WorkspaceFailed || !v.State.Live():
		return agentlab.Errorf(agentlab.CodeConflict, "workspace %s is %s", v.Name, v.State).WithField("workspace").WithHint("see 'agentlab workspace show %s'", v.ID)
	}
	queue, err := workspaceLeases.query(w.ctx, w, leaseQueue, v.ID)
	if err != nil {
		return err
	}
	l := agentlab.WorkspaceLease{
		Number: 1, WorkspaceID: v.ID, VMID: sb.VMID, UID: sb.UID, Nonce: agentlab.NewUID(), RequestedAt: w.now, WaitUntil: w.now.Add(use.Wait),
	}
	if err := w.QueryRowContext(w.ctx, "SELECT coalesce(max(number), 0) + 1 FROM workspace_leases").Scan(&l.Number); err != nil {
		return fault(err)
	}
	switch {
	case len(queue) == 0:
		l.AcquiredAt = w.now
	case use.Wait <= 0:
		return workspaceUsed(v, leaseHolder(w, queue[0]), session)
	}
	if err := workspaceLeases.insert(w, &l); err != nil {
		return err
	}
	e := leaseEvent(w, v, l, "has")
	if !l.Acquired() {
		holder := leaseHolder(w, queue[0])
		e.Message = fmt.Sprintf("sandbox %s waits up to %s for workspace %s, which sandbox %s has; to free it: agentlab sandbox destroy %s", sb.Name, agentlab.FormatTTL(use.Wait), v.Name, holder, holder)
	}
	return w.emit([]agentlab.Event{e})
}

// workspaceUsed is the error for a workspace that a sandbox named holder has. session is
// the ID of the session whose sandbox needs it, or "".
func workspaceUsed(v agentlab.Workspace, holder, session string) error {
	err := agentlab.Errorf(agentlab.CodeConflict, "workspace %s is used by sandbox %s", v.Name, holder).WithField("workspace")
	if session != "" { // a command for a session has no flag to wait
		return err.WithHint("free it: agentlab sandbox destroy %s; or use a copy: agentlab workspace fork %s --name NAME", holder, v.Name)
	}
	return err.WithHint("wait for it: --workspace-wait 10m; free it: agentlab sandbox destroy %s; or use a copy: agentlab workspace fork %s --name NAME", holder, v.Name)
}

// leaseHolder returns the name of the sandbox of a lease.
func leaseHolder(w *tx, l agentlab.WorkspaceLease) string {
	sb, err := sandboxByVMID(w.ctx, w, l.VMID)
	if err != nil || sb.UID != l.UID {
		return fmt.Sprint(l.VMID)
	}
	return sb.Name
}

// leaseEvent is the event of a lease that was requested, acquired or ended.
func leaseEvent(w *tx, v agentlab.Workspace, l agentlab.WorkspaceLease, what string) agentlab.Event {
	data := map[string]any{"workspace": v.ID, "name": v.Name, "lease": l.Number, "ended": what == leaseEnded}
	switch {
	case what == leaseEnded:
		data["step"] = agentlab.LeaseStepEnded
	case l.Acquired():
		data["step"], data["wait_seconds"] = agentlab.LeaseStepAcquired, l.AcquiredAt.Sub(l.RequestedAt).Seconds()
	default:
		data["step"] = agentlab.LeaseStepQueued
	}
	e := agentlab.NewEvent(agentlab.EventWorkspaceLease, data,
		"sandbox %s %s workspace %s", leaseHolder(w, l), what, v.Name)
	e.SandboxVMID = l.VMID
	if sb, err := sandboxByVMID(w.ctx, w, l.VMID); err == nil && sb.UID == l.UID {
		e.JobID = sb.JobID // whose caller sees why it waits
	}
	return e
}

// notLeased returns an error with code conflict if a sandbox has a workspace, or waits
// for it. what is what cannot be done with it.
func notLeased(w *tx, v agentlab.Workspace, what string) error {
	l, ok, err := workspaceLeases.one(w.ctx, w, leaseQueue, v.ID)
	if err == nil && ok {
		err = agentlab.Errorf(agentlab.CodeConflict, "workspace %s is used by sandbox %s and cannot %s", v.Name, leaseHolder(w, l), what).
			WithHint("destroy the sandbox, or detach the workspace: agentlab workspace detach %s", v.Name)
	}
	return err
}

// endLease deletes the lease of a sandbox, and gives its workspace to the next one in
// the queue. Without a lease it does nothing.
func endLease(w *tx, uid string) error {
	l, ok, err := workspaceLeases.one(w.ctx, w, "WHERE sandbox_uid = ?", uid)
	if err != nil || !ok {
		return err
	}
	if _, err := w.execN("DELETE FROM workspace_leases WHERE number = ?", l.Number); err != nil {
		return err
	}
	v, err := workspaceByID(w.ctx, w, l.WorkspaceID)
	if err != nil {
		return err
	}
	evs := []agentlab.Event{leaseEvent(w, v, l, leaseEnded)}
	if !l.Acquired() {
		return w.emit(evs)
	}
	next, ok, err := workspaceLeases.one(w.ctx, w, leaseQueue, v.ID)
	switch {
	case err != nil:
		return err
	case !ok:
		return w.emit(evs)
	}
	next.AcquiredAt, next.Reason = w.now, ""
	if err := workspaceLeases.update(w, &next); err != nil {
		return err
	}
	return w.emit(append(evs, leaseEvent(w, v, next, "has")))
}

// AttachWorkspace gives a sandbox without a workspace the lease of one, or a place in
// the queue for it. fn may change the sandbox in the same transaction, also if it has the
// workspace already; nil changes nothing. session is the ID of its session, or "". Codes:
// not_found; conflict if the sandbox has another workspace or is DESTROYED, for the state
// of the workspace, and if another sandbox has it; those of fn.
func (s *Store) AttachWorkspace(ctx context.Context, vmid int, use agentlab.WorkspaceUse, session string, fn func(*agentlab.Sandbox) ([]agentlab.Event, error)) (agentlab.Sandbox, error) {
	var out agentlab.Sandbox
	err := s.write(ctx, func(w *tx) error {
		sb, err := sandboxByVMID(w.ctx, w, vmid)
		switch {
		case err != nil:
			return err
		case sb.State.Final() || sb.Desired == agentlab.DesiredDestroyed:
			return agentlab.Errorf(agentlab.CodeConflict, "sandbox %s is being destroyed", sb.Name)
		case sb.Workspace != "" && sb.Workspace != use.ID:
			return agentlab.Errorf(agentlab.CodeConflict, "sandbox %s has workspace %s", sb.Name, sb.Workspace).
				WithHint("detach it first: agentlab workspace detach %s", sb.Workspace)
		}
		old := sb
		var evs []agentlab.Event
		if fn != nil {
			if evs, err = fn(&sb); err != nil {
				return err
			}
		}
		sb.Workspace = use.ID
		if err := saveSandbox(w, old, &sb, nil); err != nil {
			return err
		}
		if out = sb; old.Workspace == "" {
			err = takeLease(w, sb, use, session)
		} else if fn != nil {
			err = keepLease(w, sb)
		}
		return errors.Join(err, w.emit(evs))
	})
	return out, err
}

// keepLease gives the lease of a sandbox another nonce, so that a release that has begun
// does not end it.
func keepLease(w *tx, sb agentlab.Sandbox) error {
	l, ok, err := workspaceLeases.one(w.ctx, w, "WHERE sandbox_uid = ?", sb.UID)
	if err == nil && !ok {
		err = agentlab.Errorf(agentlab.CodeInternal, "sandbox %s has a workspace without a lease", sb.Name)
	}
	if err != nil {
		return err
	}
	l.Nonce, l.Release = agentlab.NewUID(), agentlab.ReleaseNone
	return workspaceLeases.update(w, &l)
}

// ReleaseWorkspace ends the lease of a sandbox with that nonce, whose workspace is
// detached, and gives the workspace to the next one in the queue. The sandbox then has
// no workspace. Without such a lease it does nothing.
func (s *Store) ReleaseWorkspace(ctx context.Context, nonce string) error {
	return s.write(ctx, func(w *tx) error {
		l, ok, err := workspaceLeases.one(w.ctx, w, "WHERE nonce = ?", nonce)
		if err != nil || !ok {
			return err
		}
		if err := endLease(w, l.UID); err != nil {
			return err
		}
		sb, err := sandboxByVMID(w.ctx, w, l.VMID)
		if agentlab.CodeOf(err) == agentlab.CodeNotFound || err == nil && sb.UID != l.UID {
			return nil
		}
		if err != nil || sb.State.Final() {
			return err
		}
		old := sb
		sb.Workspace = ""
		return saveSandbox(w, old, &sb, nil)
	})
}

// UpdateWorkspaceLease lets fn change the release and the reason of the lease with
// that nonce, and stores the events that it returns. Code: not_found.
func (s *Store) UpdateWorkspaceLease(ctx context.Context, nonce string, fn func(*agentlab.WorkspaceLease) []agentlab.Event) (agentlab.WorkspaceLease, error) {
	var out agentlab.WorkspaceLease
	err := s.write(ctx, func(w *tx) error {
		l, ok, err := workspaceLeases.one(w.ctx, w, "WHERE nonce = ?", nonce)
		switch {
		case err != nil:
			return err
		case !ok:
			return agentlab.Errorf(agentlab.CodeNotFound, "the lease of the workspace has ended")
		}
		old := l
		evs := fn(&l)
		out = old
		if out.Release, out.Reason = l.Release, l.Reason; out != old {
			if err := workspaceLeases.update(w, &out); err != nil {
				return err
			}
		}
		return w.emit(evs)
	})
	return out, err
}

// WorkspaceLease returns the lease of a sandbox; ok is false if it has none.
func (s *Store) WorkspaceLease(ctx context.Context, uid string) (l agentlab.WorkspaceLease, ok bool, err error) {
	return workspaceLeases.one(ctx, s.r, "WHERE sandbox_uid = ?", uid)
}

// WorkspaceLeases lists the leases of a workspace, or of all for "": the owner of each
// first, then its queue in order.
func (s *Store) WorkspaceLeases(ctx context.Context, workspaceID string) ([]agentlab.WorkspaceLease, error) {
	return workspaceLeases.query(ctx, s.r, "WHERE ? IN ('', workspace_id) ORDER BY workspace_id, number", workspaceID)
}

// WorkspaceBusy returns why a READY workspace cannot be attached yet; "" if it can.
func (s *Store) WorkspaceBusy(ctx context.Context, v agentlab.Workspace) (why string, err error) {
	copied, ok, err := workspaces.one(ctx, s.r, "WHERE state = 'CREATING' AND from_uid = ? AND from_snapshot = ''", v.UID)
	if err != nil || ok {
		return "it is being copied to workspace " + copied.Name, err
	}
	snap, ok, err := workspaceSnapshots.one(ctx, s.r, "WHERE workspace_id = ? AND state = 'SAVING'", v.ID)
	if err != nil || ok {
		return "snapshot " + snap.Name + " of it is being saved", err
	}
	return "", nil
}

// CountWorkspaceLeases counts the leases of workspaces: those of owners as acquired,
// and those that wait as queued.
func (s *Store) CountWorkspaceLeases(ctx context.Context) (map[agentlab.LeaseStep]int, error) {
	return countBy[agentlab.LeaseStep](ctx, s.r, "workspace_leases", "CASE WHEN acquired_at = '' THEN 'queued' ELSE 'acquired' END")
}
