package proxmox

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// adoptVolumes writes the states of volumes whose files were lost, from their
// holders: of one, or with "" of all. It does nothing for a volume that has a file.
func (d *Driver) adoptVolumes(ctx context.Context, uid string) error {
	if uid != "" {
		if v, err := d.readVolume(uid); v != nil || err != nil || !uidForm.MatchString(uid) {
			return err
		}
	}
	vms, err := d.listed(ctx)
	if err != nil {
		return err
	}
	all, err := d.volumes() // after the VMs were listed, so that a new one does not count as lost
	if err != nil {
		return err
	}
	lost := d.unknownHolders(vms, all)
	// Of two holders of a volume, the one with a disk counts.
	for _, empty := range []bool{false, true} {
		for _, vmid := range slices.Sorted(maps.Keys(lost)) {
			if err := d.adoptVolume(ctx, vms, lost[vmid], vmid, uid, empty); err != nil {
				return err
			}
		}
	}
	return nil
}

// unknownHolders returns the VMs with the tag of holders that no state names, with
// their nodes.
func (d *Driver) unknownHolders(vms map[string][]pve.VM, all []*volume) map[int]string {
	out := map[int]string{}
	for node, list := range vms {
		for _, vm := range list {
			vmid := int(vm.VMID)
			known := slices.ContainsFunc(all, func(v *volume) bool { return v.VMID == vmid })
			if !known && d.inRange(vmid) && slices.Contains(vm.Tags(), tagVolume) {
				out[vmid] = node
			}
		}
	}
	return out
}

// volumeIn returns the volume of a holder, without what only its file has; nil if the
// configuration is not that of a holder of this installation.
func (d *Driver) volumeIn(cfg pve.Config, node string, vmid int) *volume {
	v := &volume{UID: readMarks(cfg).volume, VMID: vmid, Node: node, Phase: volumeMade}
	if !uidForm.MatchString(v.UID) || !d.holds(cfg, v) {
		return nil
	}
	return v
}

// strays returns the holders of a volume that its state does not name, by number:
// earlier versions did not find the holders that they had just created, and created
// another one each time. They have the mark, and the number in it is their own.
func (d *Driver) strays(ctx context.Context, of *volume) (map[int]string, error) {
	vms, err := d.listed(ctx)
	if err != nil {
		return nil, err
	}
	all, err := d.volumes()
	if err != nil {
		return nil, err
	}
	found := d.unknownHolders(vms, all)
	for vmid, node := range found {
		cfg, err := d.pve.Config(ctx, node, vmid)
		if _, err := d.wasDeleted(ctx, vmid, err); err != nil {
			return nil, err
		}
		if v := d.volumeIn(cfg, node, vmid); v == nil || v.UID != of.UID {
			delete(found, vmid)
		}
	}
	return found, nil
}

// destroyStrays destroys the strays of a volume that is not complete, or is being
// deleted. In the meantime the state of the volume names the stray: whatever dies, each
// of the holders is in the state or a stray.
func (d *Driver) destroyStrays(ctx context.Context, v *volume) error {
	found, err := d.strays(ctx, v)
	if err != nil || len(found) == 0 {
		return err
	}
	own := *v
	for _, vmid := range slices.Sorted(maps.Keys(found)) {
		v.VMID, v.Node, v.Proved, v.Change = vmid, found[vmid], false, nil
		if err := d.saveVolume(v); err != nil {
			return err
		}
		ho, err := d.holderOf(ctx, v)
		if err != nil {
			return err
		}
		if ho.ours {
			d.log.Warn("destroying a VM that an interrupted creation of a volume left", "vmid", vmid, "volume", v.UID)
			if err := d.destroyHolder(ctx, v, ho); err != nil {
				return err
			}
		}
	}
	*v = own
	return d.saveVolume(v)
}

func (d *Driver) adoptVolume(ctx context.Context, vms map[string][]pve.VM, node string, vmid int, only string, empty bool) error {
	cfg, err := d.pve.Config(ctx, node, vmid)
	if gone, err := d.wasDeleted(ctx, vmid, err); gone || err != nil {
		return err
	}
	v := d.volumeIn(cfg, node, vmid)
	if v == nil || only != "" && v.UID != only || empty != (firstProp(cfg[holderSlot]) == "") {
		return nil
	}
	unlock, err := d.lockVolumes(ctx, v.UID)
	if err != nil {
		return err
	}
	defer unlock()
	if has, err := d.readVolume(v.UID); has != nil || err != nil {
		return err
	}
	cfg, err = d.pve.Config(ctx, node, vmid)
	if gone, err := d.wasDeleted(ctx, vmid, err); gone || err != nil {
		return err
	}
	volid := firstProp(cfg[holderSlot])
	v.Storage, _, _ = strings.Cut(volid, ":")
	switch {
	case volid == "" || cfg["lock"] == lockClone:
		v.Phase = volumeDeleting // nothing says how large it should be
	case cfg["lock"] == "rollback":
		v.Restoring = "unknown"
	}
	if v.Attached, err = d.sandboxWith(ctx, vms, v); err != nil {
		return err
	}
	saved, err := d.pve.Snapshots(ctx, node, vmid)
	if err != nil {
		return err
	}
	for _, s := range saved {
		uid, ours := d.ourSaved(v, s)
		if !ours {
			continue
		}
		then, err := d.pve.SnapshotConfig(ctx, node, vmid, s.Name)
		if err != nil {
			return err
		}
		v.Snapshots = append(v.Snapshots, savedVolume{UID: uid, SizeGB: int(driveSize(then[holderSlot]) >> 30)})
	}
	d.log.Warn("the file of a volume was lost; its VM has what is needed", "volume", v.UID, "vmid", vmid)
	return d.saveVolume(v)
}

// sandboxWith returns the sandbox that has a volume in its configuration.
func (d *Driver) sandboxWith(ctx context.Context, vms map[string][]pve.VM, v *volume) (*attachment, error) {
	for node, list := range vms {
		for _, vm := range list {
			uid := taggedUID(string(vm.TagList))
			if uid == "" || !d.inRange(int(vm.VMID)) {
				continue
			}
			cfg, err := d.pve.Config(ctx, node, int(vm.VMID))
			gone, err := d.wasDeleted(ctx, int(vm.VMID), err)
			if err != nil {
				return nil, err
			}
			if gone || volumeOwner(firstProp(cfg[volumeSlot])) != v.VMID {
				continue
			}
			a := &attachment{UID: uid, VMID: int(vm.VMID)}
			handles, err := d.readHandles(uid)
			for _, h := range handles {
				a.Created = h.Created
			}
			return a, err
		}
	}
	return nil, nil
}
