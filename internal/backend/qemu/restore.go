package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// dirRestore is a directory in that of a sandbox, with the disk and the memory
// that replace those of the sandbox. It exists only when it is complete: the
// sandbox is then partial, until finishRestore has done the rest.
const dirRestore = "restore"

func restoring(dir string) bool {
	_, err := os.Lstat(filepath.Join(dir, dirRestore))
	return err == nil
}

// RestoreSnapshot implements backend.Snapshots.
func (d *Driver) RestoreSnapshot(ctx context.Context, ref backend.SnapshotRef) error {
	unlock, err := d.set.Begin(ctx, ref.Of)
	if err != nil {
		return err
	}
	defer unlock()
	s, err := d.wholeSnapshot(ref)
	if err != nil {
		return err
	}
	f, err := d.find(ref.Of.UID)
	switch {
	case err != nil:
		return err
	case f.Dir == "":
		return vmdir.Absent(ref.Of.UID)
	case f.Err != nil:
		return vmdir.AsError(f.Err, "cannot read sandbox %d", f.VMID)
	}
	if err := vmdir.NoVolume(f.Dir); err != nil {
		return err
	}
	if err := d.host.Ready(ctx); err != nil {
		return err
	}
	if restoring(f.Dir) { // perhaps with another snapshot
		if err := d.finishRestore(ctx, f); err != nil {
			return err
		}
	}
	if err := d.stageRestore(ctx, s, f.Dir); err != nil {
		return vmdir.AsError(err, "cannot restore sandbox %d", f.VMID)
	}
	d.at("restore staged")
	return d.finishRestore(ctx, f)
}

// stageRestore prepares the directory dirRestore in that of a sandbox.
func (d *Driver) stageRestore(ctx context.Context, s foundSnapshot, dir string) (err error) {
	to := filepath.Join(dir, dirRestore)
	tmp := to + tmpSuffix
	if err := vmdir.Empty(tmp); err != nil { // of an interrupted call
		return err
	}
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return fault(err, "cannot create %s", tmp)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, vmdir.Empty(tmp))
		}
	}()
	if err := d.copySaved(ctx, s.dir, tmp, copyOf{from: s.saved.DiskSize, size: s.saved.DiskSize, memory: memorySuspended, needed: s.saved.Memory}); err != nil {
		return err
	}
	if err := durable.SyncPath(tmp); err != nil {
		return fault(err, "cannot sync %s", tmp)
	}
	d.at("restore copied")
	if err := os.Rename(tmp, to); err != nil {
		return fault(err, "cannot rename %s", tmp)
	}
	if err := durable.SyncPath(dir); err != nil {
		return fault(err, "cannot sync %s", dir)
	}
	return nil
}

// finishRestore ends the VM and replaces the disk and the memory. It may be
// called again after a crash at any point.
func (d *Driver) finishRestore(ctx context.Context, f found) error {
	s := d.supervised(f)
	if err := s.Halt(ctx, 0); err != nil {
		return vmdir.AsError(err, "restoring sandbox %d", f.VMID)
	}
	if err := s.Settle(d.cfg.Now()); err != nil {
		return err
	}
	d.at("restore halted")
	if err := dropMemory(f.Dir, durable.Content); err != nil {
		return err
	}
	from := filepath.Join(f.Dir, dirRestore)
	layers, err := layersIn(from)
	if err != nil {
		return fault(err, "cannot read %s", from)
	}
	for _, name := range append(layers, fileRoot, fileMemory, fileDevices, fileMemoryState) {
		tmp := filepath.Join(f.Dir, name+tmpSuffix)
		err := os.Remove(tmp)
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			err = os.Link(filepath.Join(from, name), tmp)
		}
		if err == nil {
			err = os.Rename(tmp, filepath.Join(f.Dir, name))
			_ = os.Remove(tmp) // which a rename to another name of the same file does not
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // a snapshot of a stopped sandbox has no memory
			return fault(err, "cannot restore %s", name)
		}
		d.at("restored " + name)
	}
	if err := durable.SyncPath(f.Dir); err != nil {
		return fault(err, "cannot sync %s", f.Dir)
	}
	done := from + tmpSuffix
	if err := errors.Join(vmdir.Empty(done), os.Rename(from, done)); err != nil {
		return fault(err, "cannot rename %s", from)
	}
	d.at("restore done")
	d.tidyLayers(ctx, f)
	return vmdir.Empty(done)
}

// memoryAs says what a copied memory is for its sandbox.
type memoryAs int

const (
	memoryTemplate  memoryAs = iota // the sandbox is stopped, and boots if the memory cannot be loaded
	memoryFork                      // the sandbox is stopped; its first start needs the memory
	memorySuspended                 // the sandbox is suspended
)

// copyOf says how a disk and its memory are copied.
type copyOf struct {
	from, size int64 // size of the disk, and of its copy, in bytes
	memory     memoryAs
	needed     bool // it is an error if there is no memory
}

// copySaved gives a directory the memory, the devices, the console output and
// last the disk that are in the directory of a template or a snapshot. What is
// large is linked.
func (d *Driver) copySaved(ctx context.Context, from, to string, how copyOf) error {
	layers, err := layersIn(from)
	if err != nil {
		return err
	}
	if err := linkFiles(from, to, layers...); err != nil {
		return err
	}
	if err := copyMemory(from, to, how); err != nil {
		return err
	}
	err = durable.Copy(filepath.Join(from, supervisor.FileConsole), filepath.Join(to, supervisor.FileConsole), 0o600, durable.None)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	root := filepath.Join(to, fileRoot)
	if err := durable.Copy(filepath.Join(from, fileRoot), root+tmpSuffix, 0o600, durable.None); err != nil {
		return err
	}
	if how.size != how.from {
		// The file is ours. What it reads from was written by a guest's QEMU, and is
		// not opened.
		disk := `json:{"driver":"qcow2","file":{"driver":"file","filename":"` + fileRoot + tmpSuffix + `"},"backing":null}`
		if err := runQEMUImg(ctx, d.host.QEMUImg(), to, "resize", "-q", disk, strconv.FormatInt(how.size, 10)); err != nil {
			return err
		}
	}
	if how.memory != memoryTemplate {
		if err := durable.SyncPath(root + tmpSuffix); err != nil {
			return err
		}
	}
	d.at("disk not named")
	return os.Rename(root+tmpSuffix, root)
}

// copyMemory links the memory in a directory, if it has one, into another one.
func copyMemory(from, to string, how copyOf) error {
	saved, err := readMemory(from)
	if errors.Is(err, fs.ErrNotExist) {
		if how.needed {
			return fmt.Errorf("the memory is missing: %w", err)
		}
		return nil
	}
	if err != nil {
		return err
	}
	if err := linkFiles(from, to, fileMemory, fileDevices); err != nil {
		return err
	}
	sync := durable.Content
	switch how.memory {
	case memoryTemplate:
		saved.Boot, sync = supervisor.BootID(), durable.None
	case memoryFork:
		saved.Fork = true
	case memorySuspended:
		saved.Reused = true
	}
	return durable.ReplaceJSON(filepath.Join(to, fileMemoryState), saved, sync)
}

// copySnapshot makes the disk of a sandbox from a snapshot (Spec.From), with the
// memory of the snapshot beside it.
func (d *Driver) copySnapshot(ctx context.Context, dir string, h handle, size int64) error {
	s, err := d.source(h.Spec)
	if err != nil {
		return err
	}
	if size < s.saved.DiskSize {
		return agentlab.Errorf(agentlab.CodeInvalid, "the disk is smaller than that of the snapshot (%d MiB)", s.saved.DiskSize>>20).WithField("storage.root_size_gb")
	}
	if err := d.copySaved(ctx, s.dir, dir, copyOf{from: s.saved.DiskSize, size: size, memory: memoryFork, needed: s.saved.Memory}); err != nil {
		return vmdir.AsError(err, "cannot copy snapshot %s", s.uid)
	}
	return nil
}

// source returns the snapshot from which a sandbox with spec starts.
func (d *Driver) source(spec backend.Spec) (foundSnapshot, error) {
	s, err := d.wholeSnapshot(*spec.From)
	if err != nil {
		return s, err
	}
	return s, spec.CheckFrom(s.Spec)
}
