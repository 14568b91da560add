package proxmox

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// A volume is the only disk of a VM of its own, its holder, which never runs.
// Proxmox destroys a disk with the VM whose number is in its name, so the number
// of the holder is in the name: a sandbox has the disk only in its configuration,
// and destroying the sandbox leaves it. The description of the holder has the mark.

const (
	holderSlot = "scsi0" // of the volume in its holder
	volumeSlot = "scsi9" // and in its sandbox

	markVolume = "agentlab-volume: "
	tagVolume  = "agentlab-volume"
)

// volumeTasks are the types of tasks that change a holder.
var volumeTasks = append([]string{"qmcreate", "qmclone", "qmconfig", "qmdestroy", "resize"}, snapshotTasks...)

// holderMark is the description of a holder.
func (d *Driver) holderMark(v *volume) string {
	return "Volume of AgentLab: this VM only holds its disk, and never runs.\n" + d.volumeMark(v)
}

// volumeMark returns the lines that are the mark. Proxmox cuts white space at the end
// of a description, so that the whole description is never compared.
func (d *Driver) volumeMark(v *volume) string {
	return markVolume + v.UID + "\n" + markVMID + strconv.Itoa(v.VMID) + "\n" + markInstallation + d.installation
}

// holds reports whether a configuration has the mark of a volume of this installation.
func (d *Driver) holds(cfg pve.Config, v *volume) bool {
	m := readMarks(cfg)
	return m.volume == v.UID && m.vmid == strconv.Itoa(v.VMID) && m.installation == d.installation && cfg["template"] != "1"
}

// holder is the VM of a volume, as the node has it.
type holder struct {
	exists bool // a VM or container has its number
	ours   bool // and it has the mark
	// traces: it does not have the mark, but contains the UID: a user may have edited
	// it. A user's clone of another holder has the number of that in its mark.
	traces bool
	cfg    pve.Config
	volid  string // "" without a disk
	sizeGB int    // of the disk; 0 unless ready has read it
}

// holderOf looks for the holder of a volume on all nodes.
func (d *Driver) holderOf(ctx context.Context, v *volume) (holder, error) {
	id := vmID{VMID: v.VMID, UID: v.UID}
	s, err := d.lookupOn(ctx, id, nil, v.Node)
	if code := agentlab.CodeOf(err); err == nil && !s.exists || code == agentlab.CodeDenied {
		s, err = d.lookup(ctx, id, nil)
	}
	if err != nil || !s.exists {
		return holder{}, err
	}
	if s.unreadable {
		return holder{}, agentlab.Errorf(agentlab.CodeUnavailable, "cannot determine whether VM %d of a volume still exists: %w", v.VMID, errUnreadable).
			WithHint("add the VM to the pool of the token again, if it is the volume's")
	}
	ho := holder{exists: true, cfg: s.cfg, ours: d.holds(s.cfg, v)}
	if number, err := strconv.Atoi(readMarks(s.cfg).vmid); !ho.ours && (err != nil || number == v.VMID) {
		ho.traces = strings.Contains(s.cfg["description"], v.UID)
	}
	if volid, ok := driveVolume(s.cfg[holderSlot]); ok && volumeOwner(volid) == v.VMID {
		ho.volid = volid
	}
	if ho.ours && s.node != v.Node {
		v.Node = s.node
		return ho, d.saveVolume(v)
	}
	return ho, nil
}

// settleVolume waits until no change of a volume that this driver sent is running.
// A clone is a task of its source.
func (d *Driver) settleVolume(ctx context.Context, v *volume) error {
	node, vmid := v.Node, v.VMID
	if v.Source != nil && v.Phase != volumeMade {
		vmid = v.Source.VMID
	}
	return d.settleNoted(ctx, node, vmid, &v.Change, volumeTasks, func() error { return d.saveVolume(v) })
}

// changeVolume is change for a volume.
func (d *Driver) changeVolume(ctx context.Context, v *volume, begin func() (pve.UPID, error)) error {
	return d.changeNoted(ctx, &v.Change, func() error { return d.saveVolume(v) }, begin)
}

// sizeOf returns the size of a volume in GiB, as its storage has it: after an
// interrupted resize the configuration has another one.
func (d *Driver) sizeOf(ctx context.Context, v *volume, ho holder) (int, error) {
	list, err := d.pve.Content(ctx, v.Node, v.Storage, "images", v.VMID)
	if err != nil {
		return 0, err
	}
	for _, c := range list {
		if lastComponent(c.VolID) == lastComponent(ho.volid) {
			size := int64(c.Size)
			if size == 0 { // it is slow to read
				size = driveSize(ho.cfg[holderSlot])
			}
			return int(size >> 30), nil
		}
	}
	return 0, agentlab.Errorf(agentlab.CodeUnavailable, "storage %s does not list disk %s of VM %d", v.Storage, clip(ho.volid), v.VMID)
}

// view returns a volume as a backend.Volume. Code not_found means that a volume
// that was complete no longer exists.
func (d *Driver) view(ctx context.Context, v *volume) (backend.Volume, error) {
	out, ho, err := d.look(ctx, v)
	if err == nil && !out.Partial {
		out, _, err = d.sized(ctx, v, out, ho)
	}
	return out, err
}

// look is view without the size and with the holder, of which it returns none if the
// volume is partial.
func (d *Driver) look(ctx context.Context, v *volume) (backend.Volume, holder, error) {
	out := backend.Volume{Ref: backend.VolumeRef{UID: v.UID, Handle: strconv.Itoa(v.VMID)}, Storage: v.Storage, Partial: true}
	var err error
	if out.AttachedTo, err = d.attachedTo(ctx, v); err != nil {
		return out, holder{}, err
	}
	switch {
	case v.Restoring != "":
		out.Reason = "the restoration of a snapshot was interrupted"
		return out, holder{}, nil
	case v.Phase == volumeDeleting:
		out.Reason = "its creation or deletion was interrupted: VM " + strconv.Itoa(v.VMID)
		return out, holder{}, nil
	case v.Phase == volumeMaking:
		out.Reason = "its creation was interrupted"
		return out, holder{}, nil
	}
	ho, err := d.holderOf(ctx, v)
	switch {
	case err != nil:
		return out, holder{}, err
	case !ho.exists:
		return out, holder{}, noVolume(v.UID)
	case !ho.ours:
		out.Reason = "VM " + strconv.Itoa(v.VMID) + " does not have the mark of the volume"
		return out, holder{}, nil
	case ho.volid == "":
		out.Reason = "VM " + strconv.Itoa(v.VMID) + " has lost its disk"
		return out, holder{}, nil
	}
	out.Partial = false
	return out, ho, nil
}

// sized adds the size to what look returns.
func (d *Driver) sized(ctx context.Context, v *volume, out backend.Volume, ho holder) (backend.Volume, holder, error) {
	size, err := d.sizeOf(ctx, v, ho)
	switch {
	case pve.UnreadableFile(err) != "":
		out.Partial, out.Reason = true, agentlab.OneLine(err.Error(), 200)
		return out, holder{}, nil
	case err != nil:
		return out, holder{}, err
	}
	out.SizeGB, ho.sizeGB = size, size
	return out, ho, nil
}

// ready is whole for callers that read or change the content: its storage has the disk.
func (d *Driver) ready(ctx context.Context, uid string) (*volume, holder, error) {
	v, ho, err := d.whole(ctx, uid)
	if err != nil {
		return v, holder{}, err
	}
	b, ho, err := d.sized(ctx, v, backend.Volume{}, ho)
	if err == nil && b.Partial {
		err = partialVolume(b.Reason, uid)
	}
	return v, ho, err
}

func partialVolume(reason, uid string) error {
	return agentlab.Errorf(agentlab.CodeConflict, "volume %s is partial: %s", uid, reason).
		WithHint("repeat what was interrupted, or delete the volume")
}

// whole returns a volume that is complete, and its holder, without a running task.
func (d *Driver) whole(ctx context.Context, uid string) (*volume, holder, error) {
	v, err := d.readVolume(uid)
	if err == nil && v == nil {
		err = noVolume(uid)
	}
	if err != nil {
		return nil, holder{}, err
	}
	if v.Phase == volumeMade && v.Restoring == "" {
		err = d.settleVolume(ctx, v)
	}
	if err != nil {
		return v, holder{}, err
	}
	b, ho, err := d.look(ctx, v)
	if err != nil {
		return v, holder{}, err
	}
	if b.Partial {
		return v, holder{}, partialVolume(b.Reason, uid)
	}
	return v, ho, nil
}

// unattached is ready for a volume that no sandbox has.
func (d *Driver) unattached(ctx context.Context, uid string) (*volume, holder, error) {
	v, ho, err := d.ready(ctx, uid)
	if err == nil {
		err = d.notAttached(ctx, v)
	}
	return v, ho, err
}

func (d *Driver) notAttached(ctx context.Context, v *volume) error {
	ref, err := d.attachedTo(ctx, v)
	if err == nil && ref != (backend.Ref{}) {
		err = agentlab.Errorf(agentlab.CodeConflict, "volume %s is attached to sandbox %s", v.UID, ref.UID).WithHint("detach the volume first")
	}
	return err
}

// freeHolder returns a holder that no killed task has locked.
func (d *Driver) freeHolder(ctx context.Context, v *volume, ho holder) error {
	lock := ho.cfg["lock"]
	if lock == "" {
		return nil
	}
	return d.unlock(ctx, v.Node, v.VMID, lock)
}

// InspectVolume implements backend.Volumes.
func (d *Driver) InspectVolume(ctx context.Context, ref backend.VolumeRef) (backend.Volume, error) {
	if err := d.adoptVolumes(ctx, ref.UID); err != nil {
		return backend.Volume{}, err
	}
	v, err := d.readVolume(ref.UID)
	if err == nil && v == nil {
		err = noVolume(ref.UID)
	}
	if err != nil {
		return backend.Volume{}, err
	}
	return d.view(ctx, v)
}

// ListVolumes implements backend.Volumes.
func (d *Driver) ListVolumes(ctx context.Context) ([]backend.Volume, error) {
	if err := d.adoptVolumes(ctx, ""); err != nil {
		return nil, err
	}
	all, err := d.volumes()
	if err != nil {
		return nil, err
	}
	return each(all, func(v *volume) ([]backend.Volume, error) {
		b, err := d.view(ctx, v)
		if agentlab.CodeOf(err) == agentlab.CodeNotFound {
			return nil, nil
		}
		return []backend.Volume{b}, err
	})
}

// GrowVolume implements backend.Volumes.
func (d *Driver) GrowVolume(ctx context.Context, ref backend.VolumeRef, sizeGB int) error {
	if err := (backend.VolumeSpec{UID: ref.UID, SizeGB: sizeGB}).Check(); err != nil {
		return err
	}
	unlock, err := d.holdVolumes(ctx, ref.UID)
	if err != nil {
		return err
	}
	defer unlock()
	v, ho, err := d.unattached(ctx, ref.UID)
	if err != nil {
		return err
	}
	switch {
	case ho.sizeGB == sizeGB:
		return nil
	case ho.sizeGB > sizeGB:
		return agentlab.Errorf(agentlab.CodeInvalid, "volume %s has %d GiB, and a volume cannot be shrunk", v.UID, ho.sizeGB).WithField("size_gb")
	}
	if err := d.freeHolder(ctx, v, ho); err != nil {
		return err
	}
	return d.changeVolume(ctx, v, func() (pve.UPID, error) {
		return d.pve.Resize(ctx, v.Node, v.VMID, holderSlot, strconv.Itoa(sizeGB)+"G")
	})
}

// DeleteVolume implements backend.Volumes.
func (d *Driver) DeleteVolume(ctx context.Context, ref backend.VolumeRef) error {
	unlock, err := d.holdVolumes(ctx, ref.UID)
	if err != nil {
		return err
	}
	defer unlock()
	v, err := d.readVolume(ref.UID)
	if err != nil || v == nil {
		return err
	}
	if err := d.notAttached(ctx, v); err != nil {
		return err
	}
	return d.deleteVolume(ctx, v)
}

func (d *Driver) deleteVolume(ctx context.Context, v *volume) error {
	if err := d.settleVolume(ctx, v); err != nil {
		return err
	}
	v.Phase, v.Source = volumeDeleting, nil
	if err := d.saveVolume(v); err != nil {
		return err
	}
	d.at("end of the volume noted")
	ho, err := d.holderOf(ctx, v)
	if err != nil {
		return err
	}
	switch {
	case ho.ours:
		if err := d.destroyHolder(ctx, v, ho); err != nil {
			return err
		}
	case ho.traces:
		return d.unmarkedHolder(v)
	case ho.exists:
		d.log.Warn("the VM with the number of a volume is not AgentLab's; not deleting it", "vmid", v.VMID, "volume", v.UID)
	}
	d.at("holder gone")
	if err := d.destroyStrays(ctx, v); err != nil {
		return err
	}
	return d.forgetVolume(v)
}

// destroyHolder destroys the VM of a volume that was proved to be AgentLab's, with
// the volume. A disk that a killed task left without an entry in the configuration
// gets one first.
func (d *Driver) destroyHolder(ctx context.Context, v *volume, ho holder) error {
	if err := d.checkNumber(v.VMID); err != nil {
		return err
	}
	if err := d.freeHolder(ctx, v, ho); err != nil {
		return err
	}
	set := map[string]string{"protection": "0"}
	if v.Proved {
		list, err := d.pve.Content(ctx, v.Node, v.Storage, "images", v.VMID)
		if err != nil && pve.UnreadableFile(err) == "" {
			return err
		}
		known := volumesOf(ho.cfg, v.VMID)
		for i, c := range list {
			if !hasVolume(known, c.VolID) {
				set["unused"+strconv.Itoa(i+100)] = c.VolID
			}
		}
	}
	if err := d.pve.Set(ctx, v.Node, v.VMID, pve.Changes{Set: set}); err != nil {
		return err
	}
	task := pve.UPID("")
	err := d.changeVolume(ctx, v, func() (upid pve.UPID, err error) {
		task, err = d.pve.Destroy(ctx, v.Node, v.VMID, false)
		return task, err
	})
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
		return err
	}
	left, err := d.pve.NotRemoved(ctx, task)
	if i := slices.IndexFunc(left, func(volid string) bool { return volumeOwner(volid) == v.VMID }); task != "" && err == nil && i >= 0 {
		return agentlab.Errorf(agentlab.CodeBusy, "disk %s of volume %s could not be deleted", clip(left[i]), v.UID).
			WithHint("run on node %s: pvesm free %s", v.Node, left[i])
	}
	return nil
}
