package qemu

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// A snapshot is a directory in StateDir/snapshots with the config.json of its
// sandbox, the disk, the memory if the sandbox was not stopped, and
// snapshot.json. It does not depend on its sandbox: everything that is large is
// shared by hard links, and never changes (layers.go).

// fileSnapshot is a savedSnapshot. It is written last and removed first: without
// it the snapshot is partial.
const fileSnapshot = "snapshot.json"

// snapshotVersion is the format of snapshot.json and the files beside it.
const snapshotVersion = 1

// savedSnapshot is the content of snapshot.json.
type savedSnapshot struct {
	Version  int       `json:"version"`
	DiskSize int64     `json:"disk_size"` // in bytes
	Memory   bool      `json:"memory"`    // the directory has a memory
	Saved    time.Time `json:"saved"`
}

func (d *Driver) snapshots() string { return filepath.Join(d.cfg.StateDir, "snapshots") }

// foundSnapshot is a snapshot in the state directory.
type foundSnapshot struct {
	uid    string
	dir    string // it may not exist
	exists bool
	handle // that of the sandbox when it was saved; zero if it is not known
	whole  bool
	saved  savedSnapshot // if whole
}

// findSnapshot looks for the snapshot with a uid.
func (d *Driver) findSnapshot(uid string) (foundSnapshot, error) {
	s := foundSnapshot{uid: uid, dir: filepath.Join(d.snapshots(), uid)}
	if !vmdir.UIDName.MatchString(uid) {
		return s, nil
	}
	if _, err := os.Lstat(s.dir); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return s, nil
		}
		return s, fault(err, "cannot check snapshot %s", uid)
	}
	s.exists = true
	h, err := vmdir.ReadHandle(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return s, vmdir.AsError(err, "cannot read snapshot %s", uid)
	}
	s.handle = h
	s.whole, err = s.saved.read(s.dir, uid)
	return s, err
}

// read reads the snapshot in dir. whole is false without an error if it is partial.
func (s *savedSnapshot) read(dir, uid string) (whole bool, err error) {
	err = durable.ReadJSON(filepath.Join(dir, fileSnapshot), s)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, vmdir.AsError(err, "cannot read snapshot %s", uid)
	case s.Version != snapshotVersion:
		return false, agentlab.Errorf(agentlab.CodeUnsupported, "snapshot %s has format %d; this program supports format %d", uid, s.Version, snapshotVersion)
	}
	return true, nil
}

// wholeSnapshot finds a snapshot that can be used.
func (d *Driver) wholeSnapshot(ref backend.SnapshotRef) (foundSnapshot, error) {
	s, err := d.findSnapshot(ref.UID)
	if err == nil && (!s.whole || s.Spec.UID != ref.Of.UID) {
		err = agentlab.Errorf(agentlab.CodeNotFound, "there is no snapshot %q of this sandbox on this host", ref.UID)
	}
	return s, err
}

// view returns the snapshot as the contract has it.
func (s foundSnapshot) view() (backend.Snapshot, error) {
	v := backend.Snapshot{
		Ref:    backend.SnapshotRef{UID: s.uid, Of: backend.Ref{UID: s.Spec.UID}},
		Memory: s.saved.Memory, Saved: s.saved.Saved, Partial: !s.whole,
	}
	if s.whole {
		v.Spec = &s.Spec
	}
	var err error
	if v.Bytes, err = occupiedBy(s.dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return v, fault(err, "cannot check snapshot %s", s.uid)
	}
	return v, nil
}

// Snapshots implements backend.Snapshots. A snapshot that cannot be read is
// partial, so that it is not taken for absent.
func (d *Driver) Snapshots(ctx context.Context) ([]backend.Snapshot, error) {
	entries, err := os.ReadDir(d.snapshots())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fault(err, "cannot read %s", d.snapshots())
	}
	var all []backend.Snapshot
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return nil, agentlab.Errorf(agentlab.CodeUnavailable, "listing snapshots: %w", context.Cause(ctx))
		}
		if !e.IsDir() || !vmdir.UIDName.MatchString(e.Name()) {
			continue
		}
		s, err := d.findSnapshot(e.Name())
		if err != nil {
			d.log.Warn("a snapshot cannot be read", "snapshot", e.Name(), "err", err)
		}
		if !s.exists {
			continue
		}
		v, err := s.view()
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}

// SaveSnapshot implements backend.Snapshots.
func (d *Driver) SaveSnapshot(ctx context.Context, ref backend.Ref, uid string) (backend.Snapshot, error) {
	if !vmdir.UIDName.MatchString(uid) {
		return backend.Snapshot{}, agentlab.Errorf(agentlab.CodeInvalid, "%q does not name a snapshot", uid)
	}
	unlock, err := d.set.Begin(ctx, ref)
	if err != nil {
		return backend.Snapshot{}, err
	}
	defer unlock()
	s, err := d.findSnapshot(uid)
	switch {
	case err != nil:
		return backend.Snapshot{}, err
	case s.Spec.UID != "" && s.Spec.UID != ref.UID:
		return backend.Snapshot{}, agentlab.Errorf(agentlab.CodeExists, "snapshot %s is one of another sandbox", uid)
	case s.whole:
		return s.view()
	}
	f, err := d.load(ref)
	if err == nil {
		err = vmdir.NoVolume(f.Dir)
	}
	if err != nil {
		return backend.Snapshot{}, err
	}
	if err := d.save(ctx, f, s.dir); err != nil {
		if eerr := vmdir.Empty(s.dir); eerr != nil { // it stays as a partial one
			d.log.Warn("after a failed snapshot", "err", eerr)
		}
		return backend.Snapshot{}, vmdir.AsError(err, "cannot save sandbox %d", f.VMID)
	}
	if s, err = d.findSnapshot(uid); err != nil {
		return backend.Snapshot{}, err
	}
	return s.view()
}

// save saves a sandbox in the directory of a snapshot.
func (d *Driver) save(ctx context.Context, f found, dir string) error {
	in, err := d.instance(f)
	if err != nil {
		return err
	}
	if in.Power == backend.PowerPartial {
		return agentlab.Errorf(agentlab.CodeUnavailable, "sandbox %d is not complete: %s", f.VMID, in.Reason)
	}
	if err := vmdir.Empty(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fault(err, "cannot create %s", dir)
	}
	d.at("snapshot begun")
	if err := durable.ReplaceJSON(filepath.Join(dir, vmdir.FileConfig), f.Handle, durable.Content); err != nil {
		return fault(err, "cannot write %s", vmdir.FileConfig)
	}
	d.at("snapshot marked")
	s := savedSnapshot{Version: snapshotVersion, Saved: d.cfg.Now().UTC()}
	running := in.Power == backend.PowerRunning || in.Power == backend.PowerSuspended
	if in.Power == backend.PowerRunning || running && !onDisk(f.Dir) {
		err = d.supervised(f).Save(ctx, supervisor.SaveTo{Dir: dir, Continue: true, Durable: true})
	} else {
		err = d.saveStopped(ctx, f, dir)
	}
	if err != nil {
		return err
	}
	d.at("snapshot saved")
	if s.DiskSize, err = savedSize(f.Handle, dir); err != nil {
		return err
	}
	s.Memory = running
	if err := durable.SyncPath(dir); err != nil {
		return fault(err, "cannot sync %s", dir)
	}
	if err := durable.ReplaceJSON(filepath.Join(dir, fileSnapshot), s, durable.Content); err != nil {
		return fault(err, "cannot write %s", fileSnapshot)
	}
	d.at("snapshot complete")
	return nil
}

// savedSize returns the size of the disk in dir, in bytes: the one that its guest
// has seen, or that of the sandbox.
func savedSize(h handle, dir string) (int64, error) {
	saved, err := readMemory(dir)
	switch {
	case err == nil:
		return saved.DiskSize, nil
	case errors.Is(err, fs.ErrNotExist):
		return h.DiskSize()
	default:
		return 0, vmdir.AsError(err, "cannot read %s", fileMemoryState)
	}
}

// saveStopped saves a sandbox without a VM: its disk, and the memory if it is
// suspended to disk.
func (d *Driver) saveStopped(ctx context.Context, f found, dir string) error {
	if err := d.host.Ready(ctx); err != nil {
		return err
	}
	lock, err := d.supervised(f).LockProcess() // no QEMU writes to the disk
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	d.tidyLayers(ctx, f)
	size, err := savedSize(f.Handle, f.Dir)
	if err != nil {
		return err
	}
	layer, err := freezeDisk(ctx, d.host.QEMUImg(), f.Dir, size)
	if err != nil {
		return err
	}
	d.at("disk frozen")
	if err := linkDisk(ctx, d.host.QEMUImg(), f.Dir, dir, layer, size, durable.Content); err != nil {
		return err
	}
	if onDisk(f.Dir) {
		if err := linkFiles(f.Dir, dir, fileMemory, fileDevices, fileMemoryState); err != nil {
			return fault(err, "cannot link the memory")
		}
	}
	return nil
}

// DeleteSnapshot implements backend.Snapshots.
func (d *Driver) DeleteSnapshot(ctx context.Context, ref backend.SnapshotRef) error {
	unlock, err := d.set.Begin(ctx, ref.Of)
	if err != nil {
		return err
	}
	defer unlock()
	s, err := d.findSnapshot(ref.UID)
	if err != nil && s.Spec.UID == "" { // it may be another sandbox's
		return err
	}
	if !s.exists || s.Spec.UID != "" && s.Spec.UID != ref.Of.UID {
		return nil
	}
	err = os.Remove(filepath.Join(s.dir, fileSnapshot))
	if err == nil {
		err = durable.SyncPath(s.dir)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fault(err, "cannot remove %s", fileSnapshot)
	}
	d.at("snapshot unmarked")
	return vmdir.Empty(s.dir)
}
