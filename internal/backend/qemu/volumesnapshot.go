package qemu

import (
	"context"
	"os"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// dirSnapshots is the directory of a volume's snapshots in that of the volume. Each
// one is a directory with layers, an empty overlay on the last one, and
// snapshot.json, which is written last and removed first.
const dirSnapshots = "snapshots"

// foundSaved is a snapshot of a volume.
type foundSaved struct {
	uid, of string
	dir     string
	exists  bool
	whole   bool
	saved   savedSnapshot // if whole
}

func (d *Driver) savedDir(of, uid string) string {
	return filepath.Join(d.volumes(), of, dirSnapshots, uid)
}

// findSaved looks for a snapshot of a volume.
func (d *Driver) findSaved(of, uid string) (foundSaved, error) {
	s := foundSaved{uid: uid, of: of, dir: d.savedDir(of, uid)}
	if !vmdir.UIDName.MatchString(uid) || !vmdir.UIDName.MatchString(of) {
		return s, nil
	}
	var err error
	if s.exists, err = vmdir.Exists(s.dir); err != nil || !s.exists {
		return s, err
	}
	s.whole, err = s.saved.read(s.dir, uid)
	return s, err
}

// wholeSaved finds a snapshot that can be used.
func (d *Driver) wholeSaved(ref backend.VolumeSnapshotRef) (foundSaved, error) {
	s, err := d.findSaved(ref.Of.UID, ref.UID)
	if err == nil && !s.whole {
		err = agentlab.Errorf(agentlab.CodeNotFound, "there is no snapshot %q of this volume on this host", ref.UID)
	}
	return s, err
}

func (s foundSaved) view() backend.VolumeSnapshot {
	return backend.VolumeSnapshot{
		Ref:    backend.VolumeSnapshotRef{UID: s.uid, Of: backend.VolumeRef{UID: s.of}},
		SizeGB: int(s.saved.DiskSize >> 30), Partial: !s.whole,
	}
}

// VolumeSnapshots implements backend.Volumes. A snapshot that cannot be
// read is partial, so that it is not taken for absent.
func (d *Driver) VolumeSnapshots(ctx context.Context) ([]backend.VolumeSnapshot, error) {
	dirs, err := filepath.Glob(d.savedDir("*", "*"))
	if err != nil {
		return nil, fault(err, "cannot list snapshots")
	}
	var all []backend.VolumeSnapshot
	for _, dir := range dirs {
		if err := ctx.Err(); err != nil {
			return nil, agentlab.Errorf(agentlab.CodeUnavailable, "listing snapshots: %w", context.Cause(ctx))
		}
		s, err := d.findSaved(filepath.Base(filepath.Dir(filepath.Dir(dir))), filepath.Base(dir))
		if err != nil {
			d.log.Warn("a snapshot cannot be read", "dir", dir, "err", err)
		}
		if !s.exists {
			continue
		}
		all = append(all, s.view())
	}
	return all, nil
}

// openAttached locks a volume, and the sandbox that has it, if there is one.
func (d *Driver) openAttached(ctx context.Context, uid string) (v vmdir.FoundVolume, f found, unlock func(), err error) {
	for {
		owner, err := d.OwnerOf(uid)
		if err != nil {
			return v, f, nil, err
		}
		unlockOwner := func() {}
		if owner != "" {
			if f, unlockOwner, err = d.open(ctx, backend.Ref{UID: owner}); err != nil {
				return v, f, nil, err
			}
		}
		v, unlockVolume, err := d.Volumes.Open(ctx, uid)
		if err != nil {
			unlockOwner()
			return v, f, nil, err
		}
		unlock = func() { unlockVolume(); unlockOwner() }
		now, err := d.OwnerOf(uid)
		if err == nil && now == owner {
			return v, f, unlock, nil
		}
		unlock()
		if err != nil {
			return v, f, nil, err
		}
		f = found{}
	}
}

// SnapshotVolume implements backend.Volumes.
func (d *Driver) SnapshotVolume(ctx context.Context, ref backend.VolumeRef, uid string) (backend.VolumeSnapshot, error) {
	if !vmdir.UIDName.MatchString(uid) {
		return backend.VolumeSnapshot{}, agentlab.Errorf(agentlab.CodeInvalid, "%q does not name a snapshot", uid)
	}
	v, f, unlock, err := d.openAttached(ctx, ref.UID)
	if err != nil {
		return backend.VolumeSnapshot{}, err
	}
	defer unlock()
	others, err := filepath.Glob(d.savedDir("*", uid))
	if err == nil && len(others) > 0 && others[0] != d.savedDir(ref.UID, uid) {
		err = agentlab.Errorf(agentlab.CodeExists, "snapshot %s is one of another volume", uid)
	}
	if err == nil {
		err = v.Usable()
	}
	if err != nil {
		return backend.VolumeSnapshot{}, err
	}
	s, err := d.findSaved(v.UID, uid)
	if err == nil && !s.whole {
		if err = d.saveVolume(ctx, v, f, s.dir); err != nil {
			if eerr := vmdir.Empty(s.dir); eerr != nil { // it stays as a partial one
				d.log.Warn("after a failed snapshot", "err", eerr)
			}
			return backend.VolumeSnapshot{}, vmdir.AsError(err, "cannot save volume %s", v.UID)
		}
		s, err = d.findSaved(v.UID, uid)
	}
	if err != nil {
		return backend.VolumeSnapshot{}, err
	}
	return s.view(), nil
}

// saveVolume saves a volume, which the sandbox f has unless f is zero, in the
// directory of a snapshot.
func (d *Driver) saveVolume(ctx context.Context, v vmdir.FoundVolume, f found, dir string) error {
	if err := d.host.Ready(ctx); err != nil {
		return err
	}
	if err := d.roomForVolume(); err != nil {
		return err
	}
	if err := vmdir.Empty(dir); err != nil { // of an interrupted call
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fault(err, "cannot create %s", dir)
	}
	d.at("volume snapshot begun")
	still := func() error { return d.saveStill(ctx, v, dir) }
	err := error(nil)
	if f.Dir == "" {
		err = still()
	} else {
		err = d.supervised(f).Volume(ctx, supervisor.VolumeTo{Dir: v.Dir, Save: dir}, func() error {
			lock, err := d.supervised(f).LockProcess() // a QEMU whose supervisor was killed has ended
			if err != nil {
				return err
			}
			defer func() { _ = lock.Close() }()
			return still()
		})
	}
	if err != nil {
		return err
	}
	d.at("volume saved")
	for _, path := range []string{dir, filepath.Dir(dir), v.Dir} {
		if err := durable.SyncPath(path); err != nil {
			return fault(err, "cannot sync %s", path)
		}
	}
	s := savedSnapshot{Version: snapshotVersion, DiskSize: v.Size, Saved: d.cfg.Now().UTC()}
	if err := durable.ReplaceJSON(filepath.Join(dir, fileSnapshot), s, durable.Content); err != nil {
		return fault(err, "cannot write %s", fileSnapshot)
	}
	d.at("volume snapshot complete")
	return nil
}

// saveStill saves a volume that no QEMU uses.
func (d *Driver) saveStill(ctx context.Context, v vmdir.FoundVolume, dir string) error {
	layer, err := d.freezeVolume(ctx, v)
	if err != nil {
		return err
	}
	return linkDisk(ctx, d.host.QEMUImg(), v.Dir, dir, layer, v.Size, durable.Content)
}

// freezeVolume makes root.qcow2 of a volume that no QEMU uses an empty overlay on a
// new layer.
func (d *Driver) freezeVolume(ctx context.Context, v vmdir.FoundVolume) (layer string, err error) {
	d.tidyVolume(ctx, v)
	if layer, err = freezeDisk(ctx, d.host.QEMUImg(), v.Dir, v.Size); err != nil {
		return "", err
	}
	if err := durable.SyncPath(filepath.Join(v.Dir, layer)); err != nil {
		return "", fault(err, "cannot sync volume %s", v.UID)
	}
	d.at("volume frozen")
	return layer, nil
}

// tidyVolume removes what interrupted calls left of layers, and merges the layers if
// this is worth it. A volume that cannot be merged stays as it is.
func (d *Driver) tidyVolume(ctx context.Context, v vmdir.FoundVolume) {
	removeMerge(v.Dir)
	layers, err := layersIn(v.Dir)
	if err == nil && len(layers) > 0 {
		err = d.tidyDisk(ctx, diskFiles{dir: v.Dir, size: v.Size}, layers)
	}
	if err != nil {
		d.log.Warn("the layers of a volume were not merged", "volume", v.UID, "layers", len(layers), "err", err)
	}
}

// copyVolume makes tmp in the directory "to" a disk like that in "from", whose
// root.qcow2 is an empty overlay on a layer.
func copyVolume(from, to, tmp string) error {
	layers, err := layersIn(from)
	if err == nil {
		err = linkFiles(from, to, layers...)
	}
	if err == nil {
		err = durable.Copy(filepath.Join(from, fileRoot), tmp, 0o600, durable.None)
	}
	if err != nil {
		return fault(err, "cannot copy the disk of the volume")
	}
	return nil
}

// RestoreVolume implements backend.Volumes. It is one step: root.qcow2 is
// replaced.
func (d *Driver) RestoreVolume(ctx context.Context, ref backend.VolumeSnapshotRef) error {
	v, unlock, err := d.Volumes.Free(ctx, ref.Of.UID)
	if err != nil {
		return err
	}
	defer unlock()
	s, err := d.wholeSaved(ref)
	if err != nil {
		return err
	}
	if err := v.Usable(); err != nil {
		return err
	}
	if err := d.roomForVolume(); err != nil {
		return err
	}
	path := filepath.Join(v.Dir, fileRoot)
	if err := copyVolume(s.dir, v.Dir, path+tmpSuffix); err != nil {
		return err
	}
	d.at("volume restore staged")
	if err := vmdir.ReplaceDisk(path); err != nil {
		return err
	}
	d.at("volume restored")
	v.Size = s.saved.DiskSize
	d.tidyVolume(ctx, v)
	return nil
}

// CloneVolume implements backend.Volumes.
func (d *Driver) CloneVolume(ctx context.Context, ref backend.VolumeRef, uid string) (backend.Volume, error) {
	return d.Clone(ctx, ref, uid, d.Cloneable, func(src vmdir.FoundVolume, dir, tmp string) error {
		if _, err := d.freezeVolume(ctx, src); err != nil {
			return err
		}
		return copyVolume(src.Dir, dir, tmp)
	})
}

// CloneVolumeSnapshot implements backend.Volumes.
func (d *Driver) CloneVolumeSnapshot(ctx context.Context, ref backend.VolumeSnapshotRef, uid string) (backend.Volume, error) {
	usable := func(vmdir.FoundVolume) error {
		_, err := d.wholeSaved(ref)
		return err
	}
	return d.Clone(ctx, ref.Of, uid, usable, func(_ vmdir.FoundVolume, dir, tmp string) error {
		return copyVolume(d.savedDir(ref.Of.UID, ref.UID), dir, tmp)
	})
}

// DeleteVolumeSnapshot implements backend.Volumes.
func (d *Driver) DeleteVolumeSnapshot(ctx context.Context, ref backend.VolumeSnapshotRef) error {
	_, unlock, err := d.Volumes.Open(ctx, ref.Of.UID)
	if err != nil {
		return err
	}
	defer unlock()
	dir := d.savedDir(ref.Of.UID, ref.UID)
	if !vmdir.UIDName.MatchString(ref.UID) || !vmdir.UIDName.MatchString(ref.Of.UID) {
		return nil
	}
	if err := vmdir.RemoveFiles(dir, durable.Content, fileSnapshot); err != nil {
		return err
	}
	d.at("volume snapshot unmarked")
	return vmdir.Empty(dir)
}
