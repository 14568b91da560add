package lima

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// dirSnapshots is the directory of a volume's snapshots in its own. A snapshot is a copy of
// the disk under its UID; while it is made, its name ends with durable.Suffix.
const dirSnapshots = "snapshots"

// savedPath returns the path of a snapshot of the volume in dir.
func savedPath(dir, uid string) string { return filepath.Join(dir, dirSnapshots, uid) }

// saved returns a snapshot of a volume, and whether there is one.
func (d *Driver) saved(of, uid string) (v backend.VolumeSnapshot, ok bool, err error) {
	v.Ref = backend.VolumeSnapshotRef{UID: uid, Of: backend.VolumeRef{UID: of}}
	if !vmdir.UIDName.MatchString(uid) || !vmdir.UIDName.MatchString(of) {
		return v, false, nil
	}
	dir := filepath.Join(d.Volumes.Root, of)
	if err := errors.Join(checkPlace(d.home(), dir), checkPlace(d.home(), filepath.Join(dir, dirSnapshots))); err != nil {
		return v, false, err
	}
	size, err := rawSize(savedPath(dir, uid))
	if errors.Is(err, fs.ErrNotExist) {
		v.Partial = true
		ok, err = vmdir.Exists(savedPath(dir, uid) + durable.Suffix)
		return v, ok, err
	}
	v.SizeGB, v.Partial = int(size>>30), err != nil
	return v, true, err
}

// wholeSaved returns the path of a snapshot that can be used.
func (d *Driver) wholeSaved(ref backend.VolumeSnapshotRef) (string, error) {
	v, ok, err := d.saved(ref.Of.UID, ref.UID)
	if err == nil && (!ok || v.Partial) {
		err = agentlab.Errorf(agentlab.CodeNotFound, "there is no snapshot %q of this volume on this host", ref.UID)
	}
	if err != nil {
		return "", vmdir.AsError(err, "cannot read snapshot %s", ref.UID)
	}
	return savedPath(filepath.Join(d.Volumes.Root, ref.Of.UID), ref.UID), nil
}

// VolumeSnapshots implements backend.Volumes. A snapshot that cannot be read is partial, so
// that it is not taken for absent.
func (d *Driver) VolumeSnapshots(ctx context.Context) ([]backend.VolumeSnapshot, error) {
	paths, err := filepath.Glob(savedPath(filepath.Join(d.Volumes.Root, "*"), "*"))
	if err != nil {
		return nil, vmdir.Fault(err, "cannot list snapshots")
	}
	var all []backend.VolumeSnapshot
	for _, path := range paths {
		if err := ctx.Err(); err != nil {
			return nil, agentlab.Errorf(agentlab.CodeUnavailable, "listing snapshots: %w", context.Cause(ctx))
		}
		uid, making := strings.CutSuffix(filepath.Base(path), durable.Suffix)
		if whole, _ := vmdir.Exists(strings.TrimSuffix(path, durable.Suffix)); making && whole { // a second copy, which nothing needs
			continue
		}
		v, ok, err := d.saved(filepath.Base(filepath.Dir(filepath.Dir(path))), uid)
		if err != nil {
			d.log.Warn("a snapshot cannot be read", "path", path, "err", err)
		}
		if ok {
			all = append(all, v)
		}
	}
	return all, nil
}

// SnapshotVolume implements backend.Volumes.
func (d *Driver) SnapshotVolume(ctx context.Context, ref backend.VolumeRef, uid string) (backend.VolumeSnapshot, error) {
	none := backend.VolumeSnapshot{}
	if !vmdir.UIDName.MatchString(uid) {
		return none, agentlab.Errorf(agentlab.CodeInvalid, "%q does not name a snapshot", uid)
	}
	v, unlock, err := d.Volumes.Open(ctx, ref.UID)
	if err != nil {
		return none, err
	}
	defer unlock()
	others, err := filepath.Glob(savedPath(filepath.Join(d.Volumes.Root, "*"), uid))
	if err == nil && len(others) > 0 && others[0] != savedPath(v.Dir, uid) {
		err = agentlab.Errorf(agentlab.CodeExists, "snapshot %s is one of another volume", uid)
	}
	if err == nil {
		err = v.Usable()
	}
	if err != nil {
		return none, err
	}
	if s, ok, err := d.saved(v.UID, uid); err != nil || ok && !s.Partial {
		return s, err
	}
	if err := d.copyable(v); err != nil {
		return none, err
	}
	path := savedPath(v.Dir, uid)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return none, vmdir.Fault(err, "cannot create %s", filepath.Dir(path))
	}
	if err := d.copyDisk(ctx, filepath.Join(v.Dir, limaDataDisk), path+durable.Suffix); err != nil {
		return none, err
	}
	d.at("volume saved")
	err = vmdir.ReplaceDisk(path)
	if err == nil {
		err = durable.SyncPath(v.Dir)
	}
	if err != nil {
		return none, vmdir.AsError(err, "cannot save volume %s", v.UID)
	}
	d.at("volume snapshot complete")
	s, _, err := d.saved(v.UID, uid)
	return s, err
}

// RestoreVolume implements backend.Volumes. It is one step: the disk is replaced.
func (d *Driver) RestoreVolume(ctx context.Context, ref backend.VolumeSnapshotRef) error {
	v, unlock, err := d.Volumes.Free(ctx, ref.Of.UID)
	if err != nil {
		return err
	}
	defer unlock()
	from, err := d.wholeSaved(ref)
	if err == nil {
		err = v.Usable()
	}
	if err != nil {
		return err
	}
	path := filepath.Join(v.Dir, limaDataDisk)
	if err := d.copyDisk(ctx, from, path+durable.Suffix); err != nil {
		return err
	}
	d.at("volume restore staged")
	if err := vmdir.ReplaceDisk(path); err != nil {
		return err
	}
	d.at("volume restored")
	return nil
}

// CloneVolume implements backend.Volumes.
func (d *Driver) CloneVolume(ctx context.Context, ref backend.VolumeRef, uid string) (backend.Volume, error) {
	return d.Clone(ctx, ref, uid, d.copyable, func(src vmdir.FoundVolume, _, tmp string) error {
		return d.copyDisk(ctx, filepath.Join(src.Dir, limaDataDisk), tmp)
	})
}

// CloneVolumeSnapshot implements backend.Volumes.
func (d *Driver) CloneVolumeSnapshot(ctx context.Context, ref backend.VolumeSnapshotRef, uid string) (backend.Volume, error) {
	var from string
	usable := func(vmdir.FoundVolume) (err error) {
		from, err = d.wholeSaved(ref)
		return err
	}
	return d.Clone(ctx, ref.Of, uid, usable, func(_ vmdir.FoundVolume, _, tmp string) error { return d.copyDisk(ctx, from, tmp) })
}

// copyable returns an error if a guest, or a user's instance, may write to a volume.
func (d *Driver) copyable(v vmdir.FoundVolume) error {
	if err := d.Cloneable(v); err != nil {
		return err
	}
	return disks{d}.Claim(v.Dir, "")
}

// DeleteVolumeSnapshot implements backend.Volumes.
func (d *Driver) DeleteVolumeSnapshot(ctx context.Context, ref backend.VolumeSnapshotRef) error {
	v, unlock, err := d.Volumes.Open(ctx, ref.Of.UID)
	if err != nil {
		return err
	}
	defer unlock()
	if _, ok, err := d.saved(ref.Of.UID, ref.UID); !ok {
		return err
	}
	return vmdir.RemoveFiles(filepath.Join(v.Dir, dirSnapshots), durable.Content, ref.UID, ref.UID+durable.Suffix)
}

// copyDisk copies a disk that no one writes to, without its holes. After an error there is
// no copy.
func (d *Driver) copyDisk(ctx context.Context, from, to string) (err error) {
	var st syscall.Stat_t
	if err := syscall.Lstat(from, &st); err != nil {
		return vmdir.Fault(err, "cannot read %s", from)
	}
	if err := qemuvm.RoomFor("a copy of a volume", d.cfg.StateDir, d.cfg.PauseBelow, st.Blocks*512); err != nil {
		return err
	}
	in, err := os.OpenFile(from, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return vmdir.Fault(err, "cannot read %s", from)
	}
	defer func() { _ = in.Close() }()
	out, err := newDisk(to, st.Size)
	if err != nil {
		return vmdir.Fault(err, "cannot create %s", to)
	}
	err = copyData(ctx, in, out)
	if err = errors.Join(err, out.Close()); err != nil {
		_ = os.Remove(to)
		return vmdir.AsError(err, "cannot copy %s", from)
	}
	return nil
}

// copyStep bounds what is copied before a look at the context, in bytes.
const copyStep = 64 << 20

// copyData copies what is not a hole.
func copyData(ctx context.Context, in, out *os.File) error {
	for at := int64(0); ; {
		if ctx.Err() != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "%w", context.Cause(ctx))
		}
		begin, err := unix.Seek(int(in.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, syscall.ENXIO) { // only a hole follows
			return nil
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(int(in.Fd()), begin, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		at = min(end, begin+copyStep)
		for _, f := range []*os.File{in, out} {
			if _, err := f.Seek(begin, io.SeekStart); err != nil {
				return err
			}
		}
		if _, err := io.CopyN(out, in, at-begin); err != nil {
			return err
		}
	}
}
