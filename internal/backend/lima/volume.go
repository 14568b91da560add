package lima

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// A volume is a disk of Lima: LIMA_HOME/_disks/<uid>/ with the files of Lima, a raw
// datadisk and, while a sandbox has it, the link in_use_by, which is Lima's lock. Beside
// them are the mark of vmdir.Volumes and the snapshots, which are copies.
//
// The lima.yaml of an instance does not name the disk: limactl would read its begin, and
// a guest would choose by what it writes there which format the disk has, and which file
// of the host it reads from. For the same reason the disk is made, enlarged and deleted
// without limactl, which makes qcow2 even for --format raw (1.2).

// Names that Lima gives (https://lima-vm.io/docs/dev/internals).
const (
	limaDisks    = "_disks"
	limaDataDisk = "datadisk"
	limaInUseBy  = "in_use_by" // a link to the directory of an instance
)

// disks is the driver for vmdir.Volumes.
type disks struct{ *Driver }

// Opened implements vmdir.VolumeSource.
func (d disks) Opened(ctx context.Context, ref backend.Ref) (vmdir.Found, func(), error) {
	return d.open(ctx, ref)
}

// SupervisedIn implements vmdir.VolumeSource.
func (d disks) SupervisedIn(f vmdir.Found) supervisor.Dir { return d.supervised(f) }

// Power implements vmdir.VolumeSource.
func (d disks) Power(f vmdir.Found, in *backend.Instance) error { return d.supervised(f).Power(in) }

// Ready implements vmdir.Disks.
func (d disks) Ready(ctx context.Context) error { return d.ready(ctx) }

// Room implements vmdir.Disks.
func (d disks) Room() error {
	return qemuvm.RoomFor("a volume", d.cfg.StateDir, d.cfg.PauseBelow, 1<<20)
}

// CheckPlace implements vmdir.Disks.
func (d disks) CheckPlace(dir string) error { return checkPlace(d.home(), dir) }

// checkPlace returns an error if a directory of the disks in home is a link: what it leads
// to is not AgentLab's.
func checkPlace(home, dir string) error {
	for _, path := range []string{filepath.Join(home, limaDisks), dir} {
		st, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return vmdir.Fault(err, "cannot check %s", path)
		}
		if !st.IsDir() {
			return agentlab.Errorf(agentlab.CodeDenied, "%s is not a directory, and is not followed", path).WithHint("move it away")
		}
	}
	return nil
}

// Make implements vmdir.Disks.
func (d disks) Make(_ context.Context, path string, size int64) error {
	f, err := newDisk(path, size)
	if err == nil {
		err = f.Close()
	}
	return err
}

// newDisk makes a disk that reads as zeros.
func newDisk(path string, size int64) (*os.File, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	if err := f.Truncate(size); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Size implements vmdir.Disks.
func (d disks) Size(dir string) (int64, error) { return diskSize(dir) }

// diskSize returns the size of the disk in dir, in bytes.
func diskSize(dir string) (int64, error) { return rawSize(filepath.Join(dir, limaDataDisk)) }

// rawSize returns the size of the disk at path, in bytes.
func rawSize(path string) (int64, error) {
	st, err := os.Lstat(path)
	if err != nil {
		return 0, err
	}
	if n := st.Size(); !st.Mode().IsRegular() || n == 0 || n%(1<<30) != 0 || n > backend.MaxVolumeGB<<30 {
		return 0, fmt.Errorf("%s is not a disk that AgentLab made", path)
	}
	return st.Size(), nil
}

// Bytes implements vmdir.Disks.
func (d disks) Bytes(dir string) (int64, error) {
	var st syscall.Stat_t
	err := syscall.Lstat(filepath.Join(dir, limaDataDisk), &st)
	sum := st.Blocks * 512
	saved, _ := filepath.Glob(savedPath(dir, "*"))
	for _, path := range saved {
		if syscall.Lstat(path, &st) == nil {
			sum += st.Blocks * 512
		}
	}
	return sum, err
}

// Grow implements vmdir.Disks.
func (d disks) Grow(_ context.Context, dir string, size int64) error {
	f, err := os.OpenFile(filepath.Join(dir, limaDataDisk), os.O_WRONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(size), f.Sync(), f.Close())
}

// Claim implements vmdir.Disks. A link to an instance of AgentLab is the rest of a call
// that was interrupted, as the caller knows who has the volume.
func (d disks) Claim(dir, sandbox string) error {
	link, want := filepath.Join(dir, limaInUseBy), ""
	if sandbox != "" {
		want = d.instance(sandbox)
	}
	now, err := os.Readlink(link)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return vmdir.Fault(err, "cannot read %s", link)
	case now == want:
		return nil
	default:
		if err := d.notForeign(now); err != nil {
			return err
		}
		if err := os.Remove(link); err != nil {
			return vmdir.Fault(err, "cannot remove %s", link)
		}
	}
	if want == "" {
		return nil
	}
	if err := os.Symlink(want, link); err != nil {
		return vmdir.Fault(err, "cannot create %s", link)
	}
	return nil
}

// notForeign returns an error with code conflict if there is an instance in dir that is not
// of AgentLab.
func (d *Driver) notForeign(dir string) error {
	if exists, err := vmdir.Exists(dir); err != nil || !exists {
		return err
	}
	all, err := vmdir.Find(d.set.Root, "")
	if err != nil || slices.ContainsFunc(all, func(f vmdir.Found) bool { return d.instance(f.UID) == dir }) {
		return err
	}
	return agentlab.Errorf(agentlab.CodeConflict, "the volume is in use by %s, which is not an instance of AgentLab", dir).
		WithHint("stop that instance, and release the disk with 'limactl disk unlock'")
}

// released shows Lima that a destroyed sandbox no longer has a volume. trash is the rest of its
// directory.
func (d *Driver) released(ctx context.Context, trash string) {
	dir, err := vmdir.Attached(trash)
	if err == nil && dir != "" {
		var unlock func()
		if _, unlock, err = d.Volumes.Free(ctx, filepath.Base(dir)); err == nil {
			unlock()
		}
	}
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeConflict { // another sandbox may have it already
		d.log.Warn("Lima still has a volume of a destroyed sandbox as in use", "err", err)
	}
}

// SetVolume implements supervisor.VolumeHolder.
func (m *machine) SetVolume(ctx context.Context, dir string) error {
	return m.volume.Set(ctx, m.QMP, dir, func(dir string) (qemuvm.Disk, error) { return volumeDisk(m.cfg.Home, dir) })
}

// volumeDisk returns the disk of a volume in home for QEMU.
func volumeDisk(home, dir string) (qemuvm.Disk, error) {
	if filepath.Dir(dir) != filepath.Join(home, limaDisks) || !vmdir.UIDName.MatchString(filepath.Base(dir)) {
		return qemuvm.Disk{}, agentlab.Errorf(agentlab.CodeDenied, "%s is not a volume of AgentLab", dir)
	}
	if err := checkPlace(home, dir); err != nil {
		return qemuvm.Disk{}, err
	}
	size, err := diskSize(dir)
	if err != nil {
		return qemuvm.Disk{}, vmdir.AsError(err, "cannot read the volume")
	}
	return qemuvm.Disk{Path: filepath.Join(dir, limaDataDisk), Size: size, Format: map[string]any{"driver": "raw"}}, nil
}

// SaveVolume implements supervisor.VolumeHolder.
func (m *machine) SaveVolume(context.Context, string, string) error {
	return agentlab.Errorf(agentlab.CodeUnsupported, "volumes are not saved while a sandbox has them")
}
