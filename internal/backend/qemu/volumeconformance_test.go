package qemu

import (
	"context"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/backendtest"
)

// volumes makes the call of a method for volumes.
func (c *doomed) volumes(ctx context.Context, d *Driver) (err error) {
	v := backend.VolumeRef{UID: c.Volume.UID}
	switch c.Method {
	case backendtest.MethodCreateVolume:
		_, err = d.CreateVolume(ctx, c.Volume)
	case backendtest.MethodDeleteVolume:
		err = d.DeleteVolume(ctx, v)
	case backendtest.MethodGrowVolume:
		err = d.GrowVolume(ctx, v, c.Volume.SizeGB)
	case backendtest.MethodAttachVolume:
		err = d.AttachVolume(ctx, c.Attached, v)
	case backendtest.MethodDetachVolume:
		err = d.DetachVolume(ctx, c.Attached, v)
	case backendtest.MethodSnapshotVolume:
		_, err = d.SnapshotVolume(ctx, c.Saved.Of, c.Saved.UID)
	case backendtest.MethodRestoreVolume:
		err = d.RestoreVolume(ctx, c.Saved)
	case backendtest.MethodCloneVolume:
		_, err = d.CloneVolume(ctx, c.Saved.Of, v.UID)
	case backendtest.MethodCloneVolumeSnapshot:
		_, err = d.CloneVolumeSnapshot(ctx, c.Saved, v.UID)
	case backendtest.MethodDeleteVolumeSnapshot:
		err = d.DeleteVolumeSnapshot(ctx, c.Saved)
	}
	return err
}

// doomVolume is doom for a method of volumes: fill sets its arguments.
func (m *mortal) doomVolume(method backendtest.Method, fill func(*doomed)) (error, bool) { //nolint:revive // two results of one call
	m.mu.Lock()
	if m.armed != nil && m.armed.Method == method {
		fill(m.armed)
	}
	m.mu.Unlock()
	return m.doom(method, backend.Ref{})
}

func (m *mortal) CreateVolume(ctx context.Context, spec backend.VolumeSpec) (backend.Volume, error) {
	if err, dead := m.doomVolume(backendtest.MethodCreateVolume, func(c *doomed) { c.Volume = spec }); dead {
		return backend.Volume{}, err
	}
	return m.Driver.CreateVolume(ctx, spec)
}

func (m *mortal) DeleteVolume(ctx context.Context, ref backend.VolumeRef) error {
	if err, dead := m.doomVolume(backendtest.MethodDeleteVolume, func(c *doomed) { c.Volume.UID = ref.UID }); dead {
		return err
	}
	return m.Driver.DeleteVolume(ctx, ref)
}

func (m *mortal) GrowVolume(ctx context.Context, ref backend.VolumeRef, gb int) error {
	if err, dead := m.doomVolume(backendtest.MethodGrowVolume, func(c *doomed) { c.Volume = backend.VolumeSpec{UID: ref.UID, SizeGB: gb} }); dead {
		return err
	}
	return m.Driver.GrowVolume(ctx, ref, gb)
}

func (m *mortal) AttachVolume(ctx context.Context, ref backend.Ref, v backend.VolumeRef) error {
	if err, dead := m.doomVolume(backendtest.MethodAttachVolume, func(c *doomed) { c.Attached, c.Volume.UID = ref, v.UID }); dead {
		return err
	}
	return m.Driver.AttachVolume(ctx, ref, v)
}

func (m *mortal) DetachVolume(ctx context.Context, ref backend.Ref, v backend.VolumeRef) error {
	if err, dead := m.doomVolume(backendtest.MethodDetachVolume, func(c *doomed) { c.Attached, c.Volume.UID = ref, v.UID }); dead {
		return err
	}
	return m.Driver.DetachVolume(ctx, ref, v)
}

func (m *mortal) SnapshotVolume(ctx context.Context, ref backend.VolumeRef, uid string) (backend.VolumeSnapshot, error) {
	saved := backend.VolumeSnapshotRef{UID: uid, Of: ref}
	if err, dead := m.doomVolume(backendtest.MethodSnapshotVolume, func(c *doomed) { c.Saved = saved }); dead {
		return backend.VolumeSnapshot{}, err
	}
	return m.Driver.SnapshotVolume(ctx, ref, uid)
}

func (m *mortal) RestoreVolume(ctx context.Context, ref backend.VolumeSnapshotRef) error {
	if err, dead := m.doomVolume(backendtest.MethodRestoreVolume, func(c *doomed) { c.Saved = ref }); dead {
		return err
	}
	return m.Driver.RestoreVolume(ctx, ref)
}

func (m *mortal) CloneVolume(ctx context.Context, ref backend.VolumeRef, uid string) (backend.Volume, error) {
	if err, dead := m.doomVolume(backendtest.MethodCloneVolume, func(c *doomed) { c.Saved.Of, c.Volume.UID = ref, uid }); dead {
		return backend.Volume{}, err
	}
	return m.Driver.CloneVolume(ctx, ref, uid)
}

func (m *mortal) CloneVolumeSnapshot(ctx context.Context, ref backend.VolumeSnapshotRef, uid string) (backend.Volume, error) {
	if err, dead := m.doomVolume(backendtest.MethodCloneVolumeSnapshot, func(c *doomed) { c.Saved, c.Volume.UID = ref, uid }); dead {
		return backend.Volume{}, err
	}
	return m.Driver.CloneVolumeSnapshot(ctx, ref, uid)
}

func (m *mortal) DeleteVolumeSnapshot(ctx context.Context, ref backend.VolumeSnapshotRef) error {
	if err, dead := m.doomVolume(backendtest.MethodDeleteVolumeSnapshot, func(c *doomed) { c.Saved = ref }); dead {
		return err
	}
	return m.Driver.DeleteVolumeSnapshot(ctx, ref)
}
