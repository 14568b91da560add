package store

import (
	"context"
	"fmt"

	"github.com/agentlab-vm/agentlab"
)

// maxRenumbers is how often a sandbox can get another number.
const maxRenumbers = 5

// RenumberSandbox gives a sandbox that is not made yet another number, because
// somebody else on its backend has taken its own: the row, its job and its
// addresses are otherwise as before, and who asks for the old number finds it
// (RenumberedSandbox). Two events tell of it, one under each number.
//
// Codes: not_found when no sandbox has that number and uid; conflict when it
// is not REQUESTED or PROVISIONING any more; limit when no number is free, or
// it has had too many.
func (s *Store) RenumberSandbox(ctx context.Context, vmid int, uid string, a agentlab.Allocation) (agentlab.Sandbox, error) {
	var sb agentlab.Sandbox
	err := s.write(ctx, func(w *tx) (err error) {
		if sb, err = sandboxByVMID(w.ctx, w, vmid); err != nil {
			return err
		}
		if err := mayRenumber(w, sb, uid); err != nil {
			return err
		}
		next, err := nextVMID(w, a)
		if err != nil {
			return err
		}
		if err := moveNumber(w, sb, next); err != nil {
			return err
		}
		sb.VMID, sb.UpdatedAt = next, w.now
		if err := sandboxes.update(w, &sb); err != nil {
			return err
		}
		w.done.Sandboxes = append(w.done.Sandboxes, sb)
		if err := followSandbox(w, sb, vmid); err != nil {
			return err
		}
		e := agentlab.Event{
			Kind: agentlab.EventSandboxRenumbered, SandboxVMID: vmid, JobID: sb.JobID,
			Message: fmt.Sprintf("sandbox %s is number %d now: something else on the backend took %d", sb.Name, next, vmid),
			Data:    fmt.Sprintf(`{"from":%d,"to":%d}`, vmid, next),
		}
		under := e
		under.SandboxVMID = next
		return w.emit([]agentlab.Event{e, under})
	})
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	return sb, nil
}

func mayRenumber(w *tx, sb agentlab.Sandbox, uid string) error {
	if sb.UID != uid {
		return noSandbox(fmt.Sprint(sb.VMID))
	}
	if sb.State != agentlab.SandboxRequested && sb.State != agentlab.SandboxProvisioning {
		return agentlab.Errorf(agentlab.CodeConflict, "sandbox %s (%d) is %s and keeps its number", sb.Name, sb.VMID, sb.State)
	}
	var had int
	err := w.QueryRowContext(w.ctx, "SELECT count(*) FROM renumbered WHERE sandbox_uid = ?", uid).Scan(&had)
	switch {
	case err != nil:
		return fault(err)
	case had >= maxRenumbers:
		return agentlab.Errorf(agentlab.CodeLimit, "sandbox %s lost its number to somebody else %d times", sb.Name, had).
			WithHint("give vmid_range in config.yaml a range that nobody else uses")
	}
	return nil
}

// moveNumber changes the number of a row. What hangs on the old one was made
// for a guest that there never was.
func moveNumber(w *tx, sb agentlab.Sandbox, next int) error {
	for _, q := range []string{
		"DELETE FROM bootstrap_tokens WHERE vmid = ?", "DELETE FROM grants WHERE vmid = ?", "DELETE FROM egress_cursors WHERE sandbox_vmid = ?",
	} {
		if err := w.exec(q, sb.VMID); err != nil {
			return err
		}
	}
	if err := w.exec("UPDATE sandboxes SET vmid = ? WHERE vmid = ?", next, sb.VMID); err != nil {
		return err
	}
	return w.exec("INSERT INTO renumbered (vmid, sandbox_uid) VALUES (?, ?) ON CONFLICT (vmid) DO UPDATE SET sandbox_uid = excluded.sandbox_uid", sb.VMID, sb.UID)
}

// followSandbox lets the job of a sandbox know its new number, if it knows the
// old one.
func followSandbox(w *tx, sb agentlab.Sandbox, old int) error {
	if sb.JobID == "" {
		return nil
	}
	j, err := jobByID(w.ctx, w, sb.JobID)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return nil // its row is written after the sandbox's, and finds the way then
	}
	if err != nil || j.SandboxVMID != old {
		return err
	}
	before := j
	j.SandboxVMID = sb.VMID
	return saveJob(w, before, &j, nil)
}

// currentNumber brings the number of a job's sandbox up to date: it may have
// been told before the sandbox got another one.
func currentNumber(w *tx, j *agentlab.Job) error {
	if j.SandboxVMID == 0 {
		return nil
	}
	sb, ok, err := renumbered(w.ctx, w, j.SandboxVMID)
	if err == nil && ok && sb.JobID == j.ID {
		j.SandboxVMID = sb.VMID
	}
	return err
}

// RenumberedSandbox returns the sandbox that had that number before it got
// another one, or not_found.
func (s *Store) RenumberedSandbox(ctx context.Context, vmid int) (agentlab.Sandbox, error) {
	sb, ok, err := renumbered(ctx, s.r, vmid)
	if err == nil && !ok {
		err = noSandbox(fmt.Sprint(vmid))
	}
	return sb, err
}

func renumbered(ctx context.Context, q querier, vmid int) (agentlab.Sandbox, bool, error) {
	return sandboxes.one(ctx, q, "WHERE uid = (SELECT sandbox_uid FROM renumbered WHERE vmid = ?)", vmid)
}
