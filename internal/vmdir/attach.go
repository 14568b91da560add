package vmdir

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// ReadAttachment reads which volume the sandbox in dir has; without one the error is
// fs.ErrNotExist.
func ReadAttachment(dir string) (Attachment, error) {
	var a Attachment
	if err := durable.ReadJSON(filepath.Join(dir, FileVolume), &a); err != nil {
		return a, err
	}
	if a.Version != volumeVersion || !UIDName.MatchString(a.UID) || !filepath.IsAbs(a.Dir) {
		return a, agentlab.Errorf(agentlab.CodeUnsupported, "%s has format %d; this program supports format %d", filepath.Join(dir, FileVolume), a.Version, volumeVersion)
	}
	return a, nil
}

// Attached returns the directory of the volume of the sandbox in dir; "" is none.
func Attached(dir string) (string, error) {
	a, err := ReadAttachment(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", nil
	case err != nil:
		return "", AsError(err, "cannot read %s", FileVolume)
	}
	return a.Dir, nil
}

// PlugAttached gives a VM that starts the volume of its sandbox, whose directory is dir: it
// calls set with the directory of the volume, if there is one.
func PlugAttached(ctx context.Context, dir string, set func(ctx context.Context, volume string) error) error {
	volume, err := Attached(dir)
	if err != nil || volume == "" {
		return err
	}
	return set(ctx, volume)
}

// owners returns the sandbox of each volume that is attached, by UID. A sandbox that
// is being destroyed has none.
func (d *Volumes) owners() (map[string]string, error) {
	all, err := Find(d.Set.Root, "")
	if err != nil {
		return nil, err
	}
	owners := map[string]string{}
	for _, f := range all {
		if f.Dir == "" {
			continue
		}
		a, err := ReadAttachment(f.Dir)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return nil, AsError(err, "cannot read which volume sandbox %d has", f.VMID)
		default:
			owners[a.UID] = f.UID
		}
	}
	return owners, nil
}

// OwnerOf returns the sandbox that has a volume; "" is none.
func (d *Volumes) OwnerOf(uid string) (string, error) {
	owners, err := d.owners()
	return owners[uid], err
}

// Detached returns an error with code conflict if a sandbox has the volume.
func (d *Volumes) Detached(uid string) error {
	owner, err := d.OwnerOf(uid)
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

// NoVolume returns an error with code conflict if the sandbox in dir has a volume.
func NoVolume(dir string) error {
	attached, err := Attached(dir)
	if err != nil || attached == "" {
		return err
	}
	return agentlab.Errorf(agentlab.CodeConflict, "the sandbox has volume %s", filepath.Base(attached)).WithHint("detach the volume first")
}

// AttachVolume implements backend.Volumes. The sandbox names the volume before its VM
// gets it.
func (d *Volumes) AttachVolume(ctx context.Context, ref backend.Ref, to backend.VolumeRef) error {
	f, unlock, err := d.Boxes.Opened(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	v, unlockVolume, err := d.Open(ctx, to.UID)
	if err != nil {
		return err
	}
	defer unlockVolume()
	if err := v.Usable(); err != nil {
		return err
	}
	owner, err := d.OwnerOf(v.UID)
	if err != nil {
		return err
	}
	if owner != ref.UID {
		if err := attachedTo(owner); err != nil {
			return err
		}
		if err := NoVolume(f.Dir); err != nil {
			return err
		}
		if err := d.mayHotplug(f); err != nil {
			return err
		}
		a := Attachment{Version: volumeVersion, UID: v.UID, Dir: v.Dir}
		if err := durable.ReplaceJSON(filepath.Join(f.Dir, FileVolume), a, durable.Content); err != nil {
			return Fault(err, "cannot write %s", FileVolume)
		}
	}
	d.At("volume named")
	if err := d.Disks.Claim(v.Dir, f.UID); err != nil {
		return err
	}
	var in backend.Instance
	if err := d.Boxes.Power(f, &in); err != nil || in.Power == backend.PowerSuspended {
		return err // it is attached to a suspended sandbox
	}
	err = d.Boxes.SupervisedIn(f).Volume(ctx, supervisor.VolumeTo{Dir: v.Dir}, func() error { return nil })
	if err == nil {
		d.At("volume plugged")
	}
	return err
}

// mayHotplug returns an error if the power state of a sandbox does not allow that a
// volume is attached or detached: the memory of a suspended guest has its state.
func (d *Volumes) mayHotplug(f Found) error {
	var in backend.Instance
	if err := d.Boxes.Power(f, &in); err != nil {
		return err
	}
	if in.Power == backend.PowerSuspended {
		return agentlab.Errorf(agentlab.CodeConflict, "sandbox %d is suspended", f.VMID).WithHint("resume or stop the sandbox first")
	}
	return nil
}

// DetachVolume implements backend.Volumes. The sandbox names the volume until no QEMU
// has it open.
func (d *Volumes) DetachVolume(ctx context.Context, ref backend.Ref, from backend.VolumeRef) error {
	unlock, err := d.Set.Begin(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	f, err := d.Set.Find(ref.UID)
	if err != nil || f.Dir == "" {
		return err
	}
	a, err := ReadAttachment(f.Dir)
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && a.UID != from.UID:
		return nil
	case err != nil:
		return AsError(err, "cannot read %s", FileVolume)
	}
	if err := d.mayHotplug(f); err != nil {
		return err
	}
	err = d.Boxes.SupervisedIn(f).Volume(ctx, supervisor.VolumeTo{}, func() error {
		lock, err := d.Boxes.SupervisedIn(f).LockProcess() // a QEMU whose supervisor was killed has ended
		if err == nil {
			err = lock.Close()
		}
		return err
	})
	if err != nil {
		return err
	}
	d.At("volume unplugged")
	if err := d.Disks.Claim(filepath.Join(d.Root, a.UID), ""); err != nil {
		return err
	}
	if err := RemoveFiles(f.Dir, durable.Content, FileVolume); err != nil {
		return err
	}
	d.At("volume not named")
	return nil
}
