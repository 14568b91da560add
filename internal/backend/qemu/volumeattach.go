package qemu

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// readAttachment reads which volume the sandbox in dir has; without one the error is
// fs.ErrNotExist.
func readAttachment(dir string) (attachment, error) {
	var a attachment
	if err := durable.ReadJSON(filepath.Join(dir, fileVolume), &a); err != nil {
		return a, err
	}
	if a.Version != volumeVersion || !snapshotName.MatchString(a.UID) || !filepath.IsAbs(a.Dir) {
		return a, agentlab.Errorf(agentlab.CodeUnsupported, "%s has format %d; this program supports format %d", filepath.Join(dir, fileVolume), a.Version, volumeVersion)
	}
	return a, nil
}

// owners returns the sandbox of each volume that is attached, by UID. A sandbox that
// is being destroyed has none.
func (d *Driver) owners() (map[string]string, error) {
	all, err := vmdir.Find(d.sandboxes(), "")
	if err != nil {
		return nil, err
	}
	owners := map[string]string{}
	for _, f := range all {
		if f.Dir == "" {
			continue
		}
		a, err := readAttachment(f.Dir)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return nil, vmdir.AsError(err, "cannot read which volume sandbox %d has", f.VMID)
		default:
			owners[a.UID] = f.UID
		}
	}
	return owners, nil
}

// ownerOf returns the sandbox that has a volume; "" is none.
func (d *Driver) ownerOf(uid string) (string, error) {
	owners, err := d.owners()
	return owners[uid], err
}

// detached returns an error with code conflict if a sandbox has the volume.
func (d *Driver) detached(uid string) error {
	owner, err := d.ownerOf(uid)
	if err != nil {
		return err
	}
	return attachedTo(owner)
}

// attachedTo is the error with code conflict for a volume that a sandbox has; nil if
// owner is "".
func attachedTo(owner string) error {
	if owner == "" {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeConflict, "the volume is attached to sandbox %s", owner).WithHint("detach it first")
}

// noVolume returns an error with code conflict if the sandbox in dir has a volume.
func noVolume(dir string) error {
	a, err := readAttachment(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return vmdir.AsError(err, "cannot read %s", fileVolume)
	}
	return agentlab.Errorf(agentlab.CodeConflict, "the sandbox has volume %s", a.UID).WithHint("detach the volume first")
}

// AttachVolume implements backend.Volumes. The sandbox names the volume before its VM
// gets it.
func (d *Driver) AttachVolume(ctx context.Context, ref backend.Ref, to backend.VolumeRef) error {
	f, unlock, err := d.open(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	v, unlockVolume, err := d.openVolume(ctx, to.UID)
	if err != nil {
		return err
	}
	defer unlockVolume()
	if err := v.usable(); err != nil {
		return err
	}
	owner, err := d.ownerOf(v.uid)
	if err != nil {
		return err
	}
	if owner != ref.UID {
		if err := attachedTo(owner); err != nil {
			return err
		}
		if err := noVolume(f.Dir); err != nil {
			return err
		}
		if err := d.mayHotplug(f); err != nil {
			return err
		}
		a := attachment{Version: volumeVersion, UID: v.uid, Dir: v.dir}
		if err := durable.ReplaceJSON(filepath.Join(f.Dir, fileVolume), a, durable.Content); err != nil {
			return fault(err, "cannot write %s", fileVolume)
		}
	}
	d.at("volume named")
	var in backend.Instance
	if err := d.power(f, &in); err != nil || in.Power == backend.PowerSuspended {
		return err // it is attached to a suspended sandbox
	}
	err = d.supervised(f).Volume(ctx, supervisor.VolumeTo{Dir: v.dir}, func() error { return nil })
	if err == nil {
		d.at("volume plugged")
	}
	return err
}

// mayHotplug returns an error if the power state of a sandbox does not allow that a
// volume is attached or detached: the memory of a suspended guest has its state.
func (d *Driver) mayHotplug(f found) error {
	var in backend.Instance
	if err := d.power(f, &in); err != nil {
		return err
	}
	if in.Power == backend.PowerSuspended {
		return agentlab.Errorf(agentlab.CodeConflict, "sandbox %d is suspended", f.VMID).WithHint("resume or stop the sandbox first")
	}
	return nil
}

// DetachVolume implements backend.Volumes. The sandbox names the volume until no QEMU
// has it open.
func (d *Driver) DetachVolume(ctx context.Context, ref backend.Ref, from backend.VolumeRef) error {
	unlock, err := d.set.Begin(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	f, err := d.find(ref.UID)
	if err != nil || f.Dir == "" {
		return err
	}
	a, err := readAttachment(f.Dir)
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && a.UID != from.UID:
		return nil
	case err != nil:
		return vmdir.AsError(err, "cannot read %s", fileVolume)
	}
	if err := d.mayHotplug(f); err != nil {
		return err
	}
	err = d.supervised(f).Volume(ctx, supervisor.VolumeTo{}, func() error {
		lock, err := d.supervised(f).LockProcess() // a QEMU whose supervisor was killed has ended
		if err == nil {
			err = lock.Close()
		}
		return err
	})
	if err != nil {
		return err
	}
	d.at("volume unplugged")
	if err := removeFiles(f.Dir, durable.Content, fileVolume); err != nil {
		return err
	}
	d.at("volume not named")
	return nil
}
