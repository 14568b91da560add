package proxmox

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// RestoreSnapshot implements backend.Snapshots. A rollback replaces the
// configuration too, and starts the VM itself if the snapshot has memory: nothing
// can be checked in between. Therefore the present policy is in force before the
// rollback, and the configuration of a snapshot with memory is audited before it,
// as that of the VM is before a start. Only root on the node can change that
// configuration. Policy, address and firewall rules are not part of
// a snapshot.
func (d *Driver) RestoreSnapshot(ctx context.Context, ref backend.SnapshotRef) error {
	if err := validUID(ref.UID); err != nil {
		return err
	}
	unlock, err := d.lock(ctx, ref.Of.UID)
	if err != nil {
		return err
	}
	defer unlock()
	h, _, err := d.createdVM(ctx, ref.Of)
	if err != nil {
		return err
	}
	return d.restore(ctx, h, ref.UID)
}

func (d *Driver) restore(ctx context.Context, h *handle, uid string) error {
	if err := d.noVolumeIn(h); err != nil {
		return err
	}
	if err := d.settle(ctx, h); err != nil {
		return err
	}
	found, all, err := d.wholeSnapshot(ctx, h, uid)
	if err != nil {
		return err
	}
	s, err := d.lookupOwned(ctx, h.id(), h)
	if err == nil {
		err = d.breakLock(ctx, h, s)
	}
	if err != nil {
		return err
	}
	if err := d.secureRestore(ctx, h, *found); err != nil {
		return err
	}
	d.at("network in force for the restore")
	if err := d.rollBack(ctx, h, *found, all); err != nil {
		return err
	}
	return d.restored(ctx, h, *found)
}

// wholeSnapshot returns a snapshot of a sandbox that is complete. all are those of
// its VM.
func (d *Driver) wholeSnapshot(ctx context.Context, h *handle, uid string) (found *pve.Snapshot, all []pve.Snapshot, err error) {
	found, all, err = d.findSnapshot(ctx, h.Node, h.id(), uid)
	switch {
	case err != nil && agentlab.CodeOf(err) != agentlab.CodeExists:
		return nil, nil, err
	case found == nil: // or it is another user's
		return nil, nil, agentlab.Errorf(agentlab.CodeNotFound, "sandbox %d has no snapshot %s", h.Spec.VMID, uid)
	case found.State != "":
		return nil, nil, agentlab.Errorf(agentlab.CodeNotFound, "snapshot %s of sandbox %d is incomplete", uid, h.Spec.VMID).
			WithHint("saving or deleting the snapshot was interrupted: save it again, or delete it")
	}
	return found, all, nil
}

// secureRestore returns nil if the guest of a snapshot may run at once.
func (d *Driver) secureRestore(ctx context.Context, h *handle, s pve.Snapshot) error {
	cfg, err := d.pve.SnapshotConfig(ctx, h.Node, h.id().VMID, s.Name)
	if err != nil {
		return err
	}
	if err := d.checkGroup(ctx, h.options.FirewallGroup); err != nil {
		return err
	}
	if s.Memory {
		then := pve.Config{}
		for key, value := range cfg {
			if !isSnapshotOption(key) && key != "description" {
				then[key] = value
			}
		}
		then["description"] = d.wanted(h)["description"] // a rollback keeps that of the VM
		if err := audit(then, d.wanted(h), h.id().VMID); err != nil {
			return agentlab.Errorf(agentlab.CodeDenied, "the snapshot of sandbox %d has another configuration than the sandbox, and its guest would run with it at once: %w", h.Spec.VMID, err).
				WithHint("restore a newer snapshot, or undo the change of config.yaml since the snapshot was saved")
		}
	}
	net, err := d.network(ctx, h.Node)
	if err != nil {
		return err
	}
	if err := net.Ready(ctx); err != nil {
		return err
	}
	return d.put(ctx, net, h)
}

// rollBack rolls a VM back. From here until restored, the sandbox is partial,
// unless it is proved that nothing has changed.
func (d *Driver) rollBack(ctx context.Context, h *handle, s pve.Snapshot, all []pve.Snapshot) error {
	uid, _ := d.ourSnapshot(s, h.id())
	before, was := *h, h.Restoring
	h.Restoring = uid
	h.Power, h.PowerFrom = powerStopping, d.cfg.Now().UTC()
	if s.Memory {
		h.Power = powerStarting
	}
	d.cache.forget(h.Spec.UID)
	sent := false
	err := d.change(ctx, h, func() (task pve.UPID, err error) {
		task, err = d.pve.Rollback(ctx, h.Node, h.id().VMID, s.Name)
		sent = err == nil
		return task, err
	})
	if err == nil {
		d.at("rolled back")
		return nil
	}
	if h.Change == nil && was == "" && (!sent || refusedRollback(err)) {
		h.Restoring, h.Power, h.PowerFrom = "", before.Power, before.PowerFrom
		if serr := d.save(h); serr != nil {
			return serr
		}
	}
	if newer := d.newerSnapshots(s, all, h.id()); pve.NotNewestSnapshot.Is(err) {
		hint := "run on its node: zfs list -t snapshot; a snapshot of the disk that was made outside of Proxmox VE is newer"
		if len(newer) > 0 {
			hint = "this storage can return only to the newest snapshot: delete the newer ones first: " + strings.Join(newer, ", ")
		}
		return agentlab.Errorf(agentlab.CodeConflict, "the snapshot is not the newest of sandbox %d: %w", h.Spec.VMID, err).WithHint("%s", hint)
	}
	return err
}

var rollbackRefusals = lazyre.New(`^(can't rollback, |unable to rollback to incomplete snapshot|snapshot '[^']*' does not exist|VM is locked \(|Failed to obtain guest migration lock)`)

// refusedRollback reports whether the task of a rollback failed before it changed
// anything.
func refusedRollback(err error) bool {
	f, ok := errors.AsType[*pve.Fault](err)
	return ok && rollbackRefusals.MatchString(f.Message)
}

// newerSnapshots names the snapshots of a VM that are newer than one: those of
// AgentLab by their UID, others by their name in Proxmox. Times have a resolution
// of one second, so the parents of the snapshot decide.
func (d *Driver) newerSnapshots(s pve.Snapshot, all []pve.Snapshot, id vmID) []string {
	all = slices.Clone(all)
	ancestors := func(of pve.Snapshot) map[string]bool {
		found := map[string]bool{of.Name: true}
		for at := of; !found[string(at.Parent)]; {
			i := slices.IndexFunc(all, func(o pve.Snapshot) bool { return o.Name == string(at.Parent) })
			if i < 0 {
				break
			}
			at = all[i]
			found[at.Name] = true
		}
		return found
	}
	slices.SortStableFunc(all, func(a, b pve.Snapshot) int { // several can have the same second
		return cmp.Or(cmp.Compare(a.Time, b.Time), cmp.Compare(len(ancestors(a)), len(ancestors(b))))
	})
	older := ancestors(s)
	var out []string
	for _, o := range all {
		uid, ours := d.ourSnapshot(o, id)
		switch {
		case older[o.Name] || o.Time < s.Time:
		case ours:
			out = append(out, uid)
		default:
			out = append(out, clip(o.Name)+" (not AgentLab's)")
		}
	}
	return out
}

// restored completes a restore. A VM that does not run gets the present
// configuration, because the rollback brought back the one of the snapshot.
func (d *Driver) restored(ctx context.Context, h *handle, s pve.Snapshot) error {
	if e, there := h.entry(strings.TrimPrefix(s.Name, tagUID)); there {
		d.takeSeed(h, e)
	}
	if s.Memory {
		h.Restoring = ""
		h.Power = powerStarting // noteStart finds a change and saves
		return d.noteStart(h, true)
	}
	if err := d.replace(ctx, h, nil); err != nil {
		return err
	}
	d.at("configured after the restore")
	h.Restoring, h.Port = "", portOf(h.id().VMID, d.firewalled(h)) // which the configuration decides
	h.Power = powerStopping
	return d.setPower(h, powerOff)
}
