package proxmox

import (
	"context"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
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
	for node, list := range vms {
		for _, vm := range list {
			vmid := int(vm.VMID)
			known := slices.ContainsFunc(all, func(v *volume) bool { return v.VMID == vmid })
			if known || !d.inRange(vmid) || !slices.Contains(vm.Tags(), tagVolume) {
				continue
			}
			if err := d.adoptVolume(ctx, vms, node, vmid, uid); err != nil {
				return err
			}
		}
	}
	return nil
}

// volumeIn returns the volume of a holder, without what only its file has; nil if the
// configuration is not that of a holder of this installation.
func (d *Driver) volumeIn(cfg pve.Config, node string, vmid int) *volume {
	for line := range strings.Lines(cfg["description"]) {
		uid, is := strings.CutPrefix(strings.TrimSpace(line), markVolume)
		v := &volume{UID: uid, VMID: vmid, Node: node, Phase: volumeMade}
		if is && uidForm.MatchString(uid) && strings.Contains(cfg["description"], d.volumeMark(v)) {
			return v
		}
	}
	return nil
}

func (d *Driver) adoptVolume(ctx context.Context, vms map[string][]pve.VM, node string, vmid int, only string) error {
	cfg, err := d.pve.Config(ctx, node, vmid)
	if err != nil {
		if agentlab.CodeOf(err) == agentlab.CodeNotFound {
			return nil // it was deleted in the meantime
		}
		return err
	}
	v := d.volumeIn(cfg, node, vmid)
	if v == nil || only != "" && v.UID != only {
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
	if cfg, err = d.pve.Config(ctx, node, vmid); err != nil {
		if agentlab.CodeOf(err) == agentlab.CodeNotFound {
			return nil
		}
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
			if agentlab.CodeOf(err) == agentlab.CodeNotFound {
				continue
			}
			if err != nil {
				return nil, err
			}
			if volumeOwner(firstProp(cfg[volumeSlot])) != v.VMID {
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
