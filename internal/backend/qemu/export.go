package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
)

const (
	exportPatience = 10 * time.Minute       // for the copy of a disk
	exportLook     = 200 * time.Millisecond // between two looks at what it occupies
	exportSlack    = 64 << 20               // bytes of metadata of the file system
)

// ExportDisk implements backend.Console.
func (d *Driver) ExportDisk(ctx context.Context, ref backend.Ref, path string) error {
	unlock, err := d.set.Begin(ctx, ref)
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
		err = agentlab.Errorf(agentlab.CodeConflict, "sandbox %d is %s, not stopped", f.VMID, in.Power)
	}
	if err == nil {
		err = d.host.Ready(ctx)
	}
	if err != nil {
		return err
	}
	lock, err := d.supervised(f).LockProcess() // no QEMU writes to the disk
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	return d.exportDisk(ctx, f, path)
}

// exportDisk copies a disk that no QEMU uses. The files of the disk are not to be
// trusted: the copy ends when it occupies more than they and the image do.
func (d *Driver) exportDisk(ctx context.Context, f found, path string) error {
	size, err := savedSize(f.Handle, f.Dir)
	var chain []string
	if err == nil {
		chain, err = diskFiles{dir: f.Dir, image: f.Image.RootDisk, size: size}.chain()
	}
	if err != nil {
		return fault(err, "cannot read the disk of sandbox %d", f.VMID)
	}
	use, err := diskUseOf(f.Dir, chain)
	if err != nil {
		return err
	}
	shared, err := blocksOf(f.Image.RootDisk)
	if err != nil {
		return fault(err, "cannot check the image")
	}
	most := use.all + shared + exportSlack
	room := func(bytes int64) error {
		return qemuvm.RoomFor("the copy of a disk", filepath.Dir(path), d.cfg.PauseBelow, bytes)
	}
	if err := room(most); err != nil {
		return err
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return agentlab.Errorf(agentlab.CodeExists, "%s exists", path)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		tick := time.NewTicker(exportLook)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if n, err := blocksOf(path); err == nil && n > most {
				cancel(fmt.Errorf("the disk has more data than its files occupy (%d MiB)", most>>20))
			}
			if err := room(0); err != nil {
				cancel(err)
			}
		}
	}()
	disk := diskChain(append([]string{fileRoot}, chain...), diskFile("raw", f.Image.RootDisk))
	return runQEMUImgFor(ctx, exportPatience, d.host.QEMUImg(), f.Dir, "convert", "-q", "-O", "raw", "-S", "4k", disk, path)
}
