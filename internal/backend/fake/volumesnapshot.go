package fake

import (
	"context"
	"maps"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// changeSaved replaces the state of a snapshot of a volume by what fn makes of it,
// and of the volume: v is nil if there is no volume.
func (h *Host) changeSaved(ref backend.VolumeSnapshotRef, fn func(s *savedVolume, v *volume) error) error {
	h.volMu.Lock()
	defer h.volMu.Unlock()
	var next savedVolume
	if s := h.store.saved[ref.UID]; s != nil {
		next = *s
	}
	if err := fn(&next, h.store.volumes[ref.Of.UID]); err != nil {
		return err
	}
	return h.keep(h.savedFile(ref.UID), &next, func() { h.store.saved[ref.UID] = &next })
}

// wholeSaved returns a snapshot that can be used. The caller holds h.volMu.
func (h *Host) wholeSaved(ref backend.VolumeSnapshotRef) (*savedVolume, error) {
	s := h.store.saved[ref.UID]
	if s == nil || s.Partial || s.Of != ref.Of.UID {
		return nil, agentlab.Errorf(agentlab.CodeNotFound, "there is no snapshot %s of volume %s", ref.UID, ref.Of.UID)
	}
	return s, nil
}

// SnapshotVolume implements backend.Volumes.
func (d *Driver) SnapshotVolume(ctx context.Context, ref backend.VolumeRef, uid string) (backend.VolumeSnapshot, error) {
	if err := d.volumePoint(ctx, OpSnapshotVolume, Before, ref.UID); err != nil {
		return backend.VolumeSnapshot{}, err
	}
	to, exists := backend.VolumeSnapshotRef{UID: uid, Of: ref}, false
	err := d.h.changeSaved(to, func(s *savedVolume, v *volume) error {
		if s.UID != "" && s.Of != ref.UID {
			return agentlab.Errorf(agentlab.CodeExists, "snapshot %s is one of another volume", uid)
		}
		if exists = s.UID != "" && !s.Partial; exists {
			return nil
		}
		if err := d.h.maySave(ref, v); err != nil {
			return err
		}
		*s = savedVolume{UID: uid, Of: ref.UID, Partial: true}
		return nil
	})
	if err == nil && !exists {
		if err = d.volumePoint(ctx, OpSnapshotVolume, Half, ref.UID); err == nil {
			err = d.h.changeSaved(to, func(s *savedVolume, v *volume) error {
				if err := d.h.maySave(ref, v); err != nil {
					return err
				}
				*s = savedVolume{UID: uid, Of: ref.UID, SizeGB: v.SizeGB, Storage: v.Storage, Files: v.Files}
				return nil
			})
		}
	}
	if err == nil {
		err = d.volumePoint(ctx, OpSnapshotVolume, After, ref.UID)
	}
	if err != nil {
		return backend.VolumeSnapshot{}, err
	}
	d.h.volMu.Lock()
	defer d.h.volMu.Unlock()
	s, err := d.h.wholeSaved(to)
	if err != nil {
		return backend.VolumeSnapshot{}, err
	}
	return s.view(), nil
}

// maySave returns an error if the content of a volume cannot be saved. The caller
// holds h.volMu.
func (h *Host) maySave(ref backend.VolumeRef, v *volume) error {
	switch {
	case v == nil:
		return noVolume(ref.UID)
	case v.Storage == StoragePlain:
		return agentlab.Errorf(agentlab.CodeUnsupported, "storage %s has no snapshots", v.Storage).WithHint("use a volume on storage %s", StorageDefault)
	case v.Sandbox != "" && h.cfg.NoAttachedVolumeSnapshots:
		return v.free()
	}
	if err := v.whole(); err != nil {
		return err
	}
	return h.room()
}

// VolumeSnapshots implements backend.Volumes.
func (d *Driver) VolumeSnapshots(ctx context.Context) ([]backend.VolumeSnapshot, error) {
	if err := d.volumePoint(ctx, OpVolumeSnapshots, Before, ""); err != nil {
		return nil, err
	}
	d.h.volMu.Lock()
	defer d.h.volMu.Unlock()
	var all []backend.VolumeSnapshot
	for _, uid := range slices.Sorted(maps.Keys(d.h.store.saved)) {
		all = append(all, d.h.store.saved[uid].view())
	}
	return all, nil
}

// RestoreVolume implements backend.Volumes.
func (d *Driver) RestoreVolume(ctx context.Context, ref backend.VolumeSnapshotRef) error {
	uid := ref.Of.UID
	if err := d.volumePoint(ctx, OpRestoreVolume, Before, uid); err != nil {
		return err
	}
	for _, begun := range []bool{false, true} {
		err := d.h.change(uid, func(v *volume) error {
			s, err := d.h.wholeSaved(ref)
			switch {
			case err != nil:
				return err
			case v.UID == "":
				return noVolume(uid)
			}
			if err := v.free(); err != nil && !v.Restore {
				return err
			}
			if err := d.h.room(); err != nil {
				return err
			}
			if v.Partial, v.Restore = "its restoration was interrupted", true; begun {
				*v = volume{UID: uid, SizeGB: s.SizeGB, Storage: s.Storage, Files: s.Files}
			}
			return nil
		})
		if err != nil {
			return err
		}
		if !begun {
			if err := d.volumePoint(ctx, OpRestoreVolume, Half, uid); err != nil {
				return err
			}
		}
	}
	return d.volumePoint(ctx, OpRestoreVolume, After, uid)
}

// CloneVolume implements backend.Volumes.
func (d *Driver) CloneVolume(ctx context.Context, ref backend.VolumeRef, uid string) (backend.Volume, error) {
	if err := d.volumePoint(ctx, OpCloneVolume, Before, uid); err != nil {
		return backend.Volume{}, err
	}
	return d.newVolume(ctx, OpCloneVolume, uid, func() (volume, error) {
		v := d.h.store.volumes[ref.UID]
		if v == nil {
			return volume{}, noVolume(ref.UID)
		}
		return volume{SizeGB: v.SizeGB, Storage: v.Storage, Files: v.Files}, v.free()
	})
}

// CloneVolumeSnapshot implements backend.Volumes.
func (d *Driver) CloneVolumeSnapshot(ctx context.Context, ref backend.VolumeSnapshotRef, uid string) (backend.Volume, error) {
	if err := d.volumePoint(ctx, OpCloneVolume, Before, uid); err != nil {
		return backend.Volume{}, err
	}
	return d.newVolume(ctx, OpCloneVolume, uid, func() (volume, error) {
		s, err := d.h.wholeSaved(ref)
		if err != nil {
			return volume{}, err
		}
		return volume{SizeGB: s.SizeGB, Storage: s.Storage, Files: s.Files}, nil
	})
}

// DeleteVolumeSnapshot implements backend.Volumes.
func (d *Driver) DeleteVolumeSnapshot(ctx context.Context, ref backend.VolumeSnapshotRef) error {
	if err := d.volumePoint(ctx, OpDeleteVolumeSnapshot, Before, ref.Of.UID); err != nil {
		return err
	}
	for _, begun := range []bool{false, true} {
		if err := d.h.deleteSaved(ref, begun); err != nil {
			return err
		}
		if !begun {
			if err := d.volumePoint(ctx, OpDeleteVolumeSnapshot, Half, ref.Of.UID); err != nil {
				return err
			}
		}
	}
	return d.volumePoint(ctx, OpDeleteVolumeSnapshot, After, ref.Of.UID)
}

// deleteSaved makes a snapshot partial, and then removes it.
func (h *Host) deleteSaved(ref backend.VolumeSnapshotRef, begun bool) error {
	h.volMu.Lock()
	defer h.volMu.Unlock()
	s := h.store.saved[ref.UID]
	if s == nil || s.Of != ref.Of.UID {
		return nil
	}
	if begun {
		return h.drop(h.savedFile(s.UID), func() { delete(h.store.saved, s.UID) })
	}
	half := &savedVolume{UID: s.UID, Of: s.Of, Partial: true}
	return h.keep(h.savedFile(s.UID), half, func() { h.store.saved[s.UID] = half })
}
