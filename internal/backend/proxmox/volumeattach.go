package proxmox

import (
	"context"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// The state of a volume says which sandbox has it, from before the change of the
// configuration of the sandbox until after the change that takes it away. Every
// start makes the configuration equal to it.

// has reports whether a volume is attached to a sandbox.
func (v *volume) has(h *handle) bool {
	return v.Attached != nil && v.Attached.UID == h.Spec.UID && (h.Adopted || v.Attached.Created.Equal(h.Created))
}

// attachedTo returns the sandbox that has a volume. If its handle was lost, its VM
// decides.
func (d *Driver) attachedTo(ctx context.Context, v *volume) (backend.Ref, error) {
	if v.Attached == nil {
		return backend.Ref{}, nil
	}
	all, err := d.readHandles(v.Attached.UID)
	if err != nil {
		return backend.Ref{}, err
	}
	for _, h := range all {
		if v.has(h) {
			return refOf(h.id()), nil
		}
	}
	if len(all) > 0 {
		return backend.Ref{}, nil
	}
	id := vmID{VMID: v.Attached.VMID, UID: v.Attached.UID}
	s, err := d.lookup(ctx, id, nil)
	if err != nil || !s.exists {
		return backend.Ref{}, err
	}
	if s.unreadable || s.cfg[volumeSlot] != "" && volumeOwner(firstProp(s.cfg[volumeSlot])) == v.VMID {
		return refOf(id), nil
	}
	return backend.Ref{}, nil
}

func firstProp(value string) string {
	volid, _ := driveVolume(value)
	return volid
}

// volumeOf returns the volume of a sandbox, nil if it has none.
func (d *Driver) volumeOf(h *handle) (*volume, error) {
	all, err := d.volumes()
	if i := slices.IndexFunc(all, func(v *volume) bool { return v.has(h) }); err == nil && i >= 0 {
		return all[i], nil
	}
	return nil, err
}

// noVolumeIn returns an error if a sandbox has a volume: a snapshot of its VM would
// contain it, and a rollback would change it.
func (d *Driver) noVolumeIn(h *handle) error {
	v, err := d.volumeOf(h)
	if err == nil && v != nil {
		err = agentlab.Errorf(agentlab.CodeConflict, "volume %s is attached to sandbox %d", v.UID, h.Spec.VMID).WithHint("detach the volume first")
	}
	return err
}

// volumeDrive returns the option of a sandbox that is its volume.
func volumeDrive(ho holder) string {
	return ho.volid + ",backup=0,discard=on,serial=" + backend.VolumeSerial
}

// diskUnused returns an error if a VM other than that of the sandbox uses a volume, as
// far as its node shows: Proxmox VE starts two VMs with one disk, and both write to it.
// A sandbox that this driver started has what its state says. Other VMs in the range
// of numbers can have anything; those outside of it are not AgentLab's to read. vms are
// the VMs of all nodes, listed just now.
func (d *Driver) diskUnused(ctx context.Context, h *handle, v *volume, ho holder, vms map[string][]pve.VM) error {
	if err := d.freeHolder(ctx, v, ho); err != nil {
		return err
	}
	if vms[v.Node] == nil { // a user migrated the holder
		st, err := d.pve.Status(ctx, v.Node, v.VMID)
		if err == nil && st.Running() {
			err = volumeUsed(v, v.VMID, v.Node)
		}
		if err != nil {
			return err
		}
	}
	handles, err := d.handles()
	if err != nil {
		return err
	}
	for node, list := range vms {
		for _, vm := range list {
			n := int(vm.VMID)
			started := slices.ContainsFunc(handles, func(k *handle) bool {
				return k.id().VMID == n && k.Phase == phaseCreated && k.Power != powerOff
			})
			if vm.Status == "stopped" || !d.inRange(n) || started || n == h.id().VMID {
				continue
			}
			if n != v.VMID {
				cfg, err := d.pve.CurrentConfig(ctx, node, n)
				if code := agentlab.CodeOf(err); code == agentlab.CodeNotFound || code == agentlab.CodeDenied || err == nil && !uses(cfg, v.VMID) {
					continue
				}
				if err != nil {
					return err
				}
			}
			return volumeUsed(v, n, node)
		}
	}
	return nil
}

func volumeUsed(v *volume, vmid int, node string) error {
	return agentlab.Errorf(agentlab.CodeConflict, "VM %d runs, and has the disk of volume %s", vmid, v.UID).
		WithHint("stop it on node %s: qm stop %d", node, vmid)
}

// uses reports whether a configuration has a disk of another VM as a drive.
func uses(cfg pve.Config, owner int) bool {
	for key, value := range cfg {
		if volid := firstProp(value); driveOption.MatchString(key) && !unusedOption.MatchString(key) && volid != "" && volumeOwner(volid) == owner {
			return true
		}
	}
	return false
}

// plugged reports whether the configuration of a sandbox has the disk of its volume.
func plugged(cfg pve.Config, ho holder) bool {
	return sameOption(volumeSlot, cfg[volumeSlot], volumeDrive(ho))
}

// plug gives the VM of a sandbox that does not run the disk of its volume.
func (d *Driver) plug(ctx context.Context, h *handle, cfg pve.Config, ho holder) error {
	if plugged(cfg, ho) {
		return nil
	}
	return d.pve.Set(ctx, h.Node, h.id().VMID, pve.Changes{Set: map[string]string{volumeSlot: volumeDrive(ho)}, Digest: cfg.Digest()})
}

// replug makes the configuration of a sandbox that is about to start equal to the
// state of its volume. It returns the holder of the volume, if the sandbox has one.
func (d *Driver) replug(ctx context.Context, h *handle, s lookupResult) (lookupResult, holder, error) {
	v, err := d.volumeOf(h)
	if err != nil || v == nil {
		return s, holder{}, err
	}
	ho, err := d.holderOf(ctx, v)
	if err != nil {
		return s, holder{}, err
	}
	if !ho.ours || ho.volid == "" {
		return s, holder{}, agentlab.Errorf(agentlab.CodeUnavailable, "VM %d, which has volume %s of sandbox %d, has lost its mark or its disk", v.VMID, v.UID, h.Spec.VMID).
			WithHint("detach the volume")
	}
	vms, err := d.listed(ctx)
	if err != nil {
		return s, holder{}, err
	}
	if err := d.diskUnused(ctx, h, v, ho, vms); err != nil {
		return s, holder{}, err
	}
	if plugged(s.cfg, ho) {
		return s, ho, nil
	}
	if err := d.plug(ctx, h, s.cfg, ho); err != nil {
		return s, holder{}, err
	}
	s, err = d.lookupOwned(ctx, h.id(), h)
	return s, ho, err
}

// AttachVolume implements backend.Volumes.
func (d *Driver) AttachVolume(ctx context.Context, ref backend.Ref, volume backend.VolumeRef) error {
	unlockVolume, err := d.holdVolumes(ctx, volume.UID)
	if err != nil {
		return err
	}
	defer unlockVolume()
	v, ho, err := d.whole(ctx, volume.UID)
	if err != nil {
		return err
	}
	unlock, err := d.lock(ctx, ref.UID)
	if err != nil {
		return err
	}
	defer unlock()
	h, s, err := d.ownedVM(ctx, ref)
	if err != nil {
		return err
	}
	if v.has(h) && plugged(s.cfg, ho) {
		return nil
	}
	if !v.has(h) {
		if err := d.mayAttach(ctx, v, h); err != nil {
			return err
		}
	}
	if err := d.settle(ctx, h); err != nil {
		return err
	}
	vms, err := d.listed(ctx)
	if err != nil {
		return err
	}
	if err := d.mustBeOff(ctx, h, vms, "attached"); err != nil {
		return err
	}
	if err := d.diskUnused(ctx, h, v, ho, vms); err != nil {
		return err
	}
	v.Attached = &attachment{UID: h.Spec.UID, VMID: h.id().VMID, Created: h.Created}
	if err := d.saveVolume(v); err != nil {
		return err
	}
	d.at("attachment noted")
	if err := d.plug(ctx, h, s.cfg, ho); err != nil {
		return err
	}
	d.at("volume attached")
	return nil
}

// mayAttach returns why a volume cannot be attached to a sandbox.
func (d *Driver) mayAttach(ctx context.Context, v *volume, h *handle) error {
	if err := d.notAttached(ctx, v); err != nil {
		return err
	}
	if err := d.noVolumeIn(h); err != nil {
		return err
	}
	if v.Node == h.Node {
		return nil
	}
	st, err := d.pve.StorageStatus(ctx, v.Node, v.Storage)
	if err == nil && !st.Shared {
		err = agentlab.Errorf(agentlab.CodeConflict, "volume %s is on node %s, and sandbox %d on node %s", v.UID, v.Node, h.Spec.VMID, h.Node).
			WithHint("use a storage for volumes that all nodes share")
	}
	return err
}

// mustBeOff returns an error unless the VM of a sandbox does not run. If it is not in
// vms, which were listed just now, its node is asked.
func (d *Driver) mustBeOff(ctx context.Context, h *handle, vms map[string][]pve.VM, what string) error {
	var st pve.Status
	if i := slices.IndexFunc(vms[h.Node], func(vm pve.VM) bool { return int(vm.VMID) == h.id().VMID }); i >= 0 {
		st.Status, st.Lock = vms[h.Node][i].Status, vms[h.Node][i].Lock
	} else {
		var err error
		if st, err = d.pve.Status(ctx, h.Node, h.id().VMID); err != nil {
			return err
		}
	}
	if st.Running() || st.Lock == lockSuspended {
		return agentlab.Errorf(agentlab.CodeConflict, "a volume cannot be %s while sandbox %d runs or is suspended", what, h.Spec.VMID).
			WithHint("stop the sandbox first")
	}
	return nil
}

// DetachVolume implements backend.Volumes.
func (d *Driver) DetachVolume(ctx context.Context, ref backend.Ref, volume backend.VolumeRef) error {
	unlockVolume, err := d.holdVolumes(ctx, volume.UID)
	if err != nil {
		return err
	}
	defer unlockVolume()
	v, err := d.readVolume(volume.UID)
	if err != nil || v == nil {
		return err
	}
	if has, err := d.attachedTo(ctx, v); err != nil || has.UID != ref.UID || ref.UID == "" {
		return err
	}
	unlock, err := d.lock(ctx, ref.UID)
	if err != nil {
		return err
	}
	defer unlock()
	h, s, err := d.createdVM(ctx, ref)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return d.detachAbsent(ctx, ref, v)
	}
	if err != nil {
		return err
	}
	if err := d.settle(ctx, h); err != nil {
		return err
	}
	if err := d.mustBeOff(ctx, h, nil, "detached"); err != nil {
		return err
	}
	if volid := firstProp(s.cfg[volumeSlot]); volid != "" && volumeOwner(volid) == v.VMID {
		if err := d.pve.Set(ctx, h.Node, h.id().VMID, pve.Changes{Delete: []string{volumeSlot}}); err != nil {
			return err
		}
	}
	d.at("volume detached")
	v.Attached = nil
	return d.saveVolume(v)
}

// detachAbsent detaches a volume from a sandbox whose VM no longer exists. If a user
// restores and starts the VM, it does not count as started by this driver.
func (d *Driver) detachAbsent(ctx context.Context, ref backend.Ref, v *volume) error {
	h, err := d.handleOf(ctx, ref)
	if err == nil {
		err = d.setPower(h, powerOff)
	}
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
		return err
	}
	d.log.Warn("the VM of a sandbox no longer exists; its volume is detached", "uid", ref.UID, "volume", v.UID)
	v.Attached = nil
	return d.saveVolume(v)
}
