package qemu

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// exportPatience limits the copy of a disk.
const exportPatience = 30 * time.Minute

// ExportDisk implements backend.DiskExporter.
func (d *Driver) ExportDisk(ctx context.Context, ref backend.Ref, path string) error {
	unlock, err := d.begin(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	f, err := d.load(ref)
	if err != nil {
		return err
	}
	in, err := d.instance(f)
	if err == nil && in.Power != backend.PowerStopped {
		err = agentlab.Errorf(agentlab.CodeConflict, "sandbox %d is %s, not stopped", f.vmid, in.Power)
	}
	if err == nil {
		err = d.host.ready(ctx)
	}
	if err != nil {
		return err
	}
	lock, err := d.supervised(f).LockProcess() // no QEMU writes to the disk
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	chain, err := chainOf(f.dir, f.Image.RootDisk)
	if err != nil {
		return fault(err, "cannot read the disk of sandbox %d", f.vmid)
	}
	use, err := diskUseOf(f.dir, chain)
	if err != nil {
		return err
	}
	shared, err := blocksOf(f.Image.RootDisk)
	if err != nil {
		return fault(err, "cannot check the image")
	}
	if err := roomFor("the copy of a disk", filepath.Dir(path), d.cfg.PauseBelow, use.all+shared); err != nil {
		return err
	}
	if _, err := os.Lstat(path); !errors.Is(err, unix.ENOENT) {
		return agentlab.Errorf(agentlab.CodeExists, "%s exists", path)
	}
	// The host never uses the content of the disk.
	disk := diskChain(append([]string{fileRoot}, chain...), diskFile("raw", f.Image.RootDisk))
	return runQEMUImgFor(ctx, exportPatience, d.host.qemuImg(), f.dir, "convert", "-q", "-O", "raw", "-S", "4k", disk, path)
}
