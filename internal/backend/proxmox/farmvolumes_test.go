package proxmox

import (
	"context"
	"errors"
	"regexp"

	"github.com/agentlab-vm/agentlab/internal/backend"
)

// What is in a volume is in a volume of the fake driver with the same UID. Its size
// and the sandbox that has it are those of the node at each start, copy and snapshot.

var volumeInDescription = regexp.MustCompile(markVolume + `([a-z2-9]{26})`)

// held returns the volume whose holder is a VM, with the size that its disk has.
func (f *farm) held(ctx context.Context, vmid int) (ref backend.VolumeRef, ok bool, err error) {
	cfg := f.node.Config(vmid)
	match := volumeInDescription.FindStringSubmatch(cfg["description"])
	if match == nil {
		return ref, false, nil
	}
	ref.UID = match[1]
	gb := int(driveSize(cfg[holderSlot]) >> 30)
	if _, err := f.drv.CreateVolume(ctx, backend.VolumeSpec{UID: ref.UID, SizeGB: gb}); err != nil {
		return ref, true, err
	}
	return ref, true, f.drv.GrowVolume(ctx, ref, gb)
}

// plugged gives a sandbox of the fake driver that is about to start the volume that
// its VM has, and no other.
func (f *farm) plugged(ctx context.Context, m *machine, cfg map[string]string) error {
	all, err := f.drv.ListVolumes(ctx)
	for _, v := range all {
		if v.AttachedTo.UID == m.id.UID {
			err = errors.Join(err, f.drv.DetachVolume(ctx, m.ref(), v.Ref))
		}
	}
	drive := firstProp(cfg[volumeSlot])
	if err != nil || drive == "" {
		return err
	}
	owner := volumeOwner(drive)
	match := volumeInDescription.FindStringSubmatch(f.node.Config(owner)["description"])
	if match == nil {
		return errors.New("the VM has a disk that is no volume")
	}
	for _, v := range all { // of a sandbox whose end the fake driver does not know
		if v.Ref.UID == match[1] && v.AttachedTo.UID != "" && v.AttachedTo.UID != m.id.UID {
			err = errors.Join(err, f.drv.DetachVolume(ctx, v.AttachedTo, v.Ref))
		}
	}
	if err != nil {
		return err
	}
	v, _, err := f.held(ctx, owner)
	if err != nil {
		return err
	}
	return f.drv.AttachVolume(ctx, m.ref(), v)
}

// loose is held for a volume that is about to be saved, copied or rolled back: no
// sandbox of the fake driver has it.
func (f *farm) loose(ctx context.Context, vmid int) (ref backend.VolumeRef, ok bool, err error) {
	match := volumeInDescription.FindStringSubmatch(f.node.Config(vmid)["description"])
	if match == nil {
		return ref, false, nil
	}
	if v, err := f.drv.InspectVolume(ctx, backend.VolumeRef{UID: match[1]}); err == nil && v.AttachedTo.UID != "" {
		if err := f.drv.DetachVolume(ctx, v.AttachedTo, v.Ref); err != nil {
			return ref, true, err
		}
	}
	return f.held(ctx, vmid)
}
