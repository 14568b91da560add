package qemu

import (
	"context"
	"os"
	"path/filepath"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// Create implements backend.Driver. Its steps are atomic: the directory,
// config.json, the root disk.
func (d *Driver) Create(ctx context.Context, spec backend.Spec) error {
	if err := d.Validate(spec); err != nil {
		return err
	}
	if spec.From != nil { // where they are does not matter
		spec.From = &backend.SnapshotRef{UID: spec.From.UID, Of: backend.Ref{UID: spec.From.Of.UID}}
	}
	unlock, err := d.set.Begin(ctx, spec.Ref())
	if err != nil {
		return err
	}
	defer unlock()
	f, err := d.set.Claim(spec, func(dir string) (handle, error) { return d.newHandle(ctx, dir, spec) },
		func(f found) error { return d.updateNetwork(ctx, f, spec.Network) })
	if err != nil {
		return err
	}
	if restoring(f.Dir) {
		return d.finishRestore(ctx, f)
	}
	return d.makeDisk(ctx, f.Dir, f.Handle)
}

// newHandle finds the image, then creates the directory and config.json.
func (d *Driver) newHandle(ctx context.Context, dir string, spec backend.Spec) (handle, error) {
	if err := d.host.Ready(ctx); err != nil {
		return handle{}, err
	}
	if spec.From != nil {
		if _, err := d.source(spec); err != nil {
			return handle{}, err
		}
	}
	img, err := d.cfg.Images(ctx, spec.Image)
	if err != nil {
		return handle{}, vmdir.AsError(err, "cannot find image %s", spec.Image)
	}
	h := handle{Version: vmdir.Version, Spec: spec, Image: img, Created: d.cfg.Now().UTC()}
	if _, err := h.DiskSize(); err != nil {
		return handle{}, err
	}
	return h, h.Mark(dir, d.at)
}

// makeDisk creates the overlay if it does not exist.
func (d *Driver) makeDisk(ctx context.Context, dir string, h handle) error {
	path := filepath.Join(dir, fileRoot)
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	size, err := h.DiskSize()
	if err != nil {
		return err
	}
	if err := d.host.Ready(ctx); err != nil {
		return err
	}
	// Of an interrupted copy: its source may have been replaced since.
	if err := dropMemory(dir, durable.None); err != nil {
		return err
	}
	if h.Spec.From != nil {
		if err := d.copySnapshot(ctx, dir, h, size); err != nil {
			return err
		}
		d.at("disk made")
		return nil
	}
	if d.copyDisk(ctx, dir, h, size) {
		d.at("disk made")
		return nil
	}
	if err := dropMemory(dir, durable.None); err != nil { // of a template that could not be used
		return err
	}
	tmp := path + tmpSuffix
	if err := createOverlay(ctx, d.host.QEMUImg(), tmp, h.Image.RootDisk, "raw", size); err != nil {
		return err
	}
	d.at("disk not named")
	if err := os.Rename(tmp, path); err != nil {
		return fault(err, "cannot rename the disk")
	}
	d.at("disk made")
	return nil
}

// copyDisk makes the disk of a sandbox from a template, with the template's
// memory beside it. It reports whether it did. Otherwise the sandbox boots.
func (d *Driver) copyDisk(ctx context.Context, dir string, h handle, size int64) bool {
	if d.tmpl.max == 0 || filepath.Dir(dir) != d.sandboxes() {
		return false
	}
	cfg, err := d.startConfig(ctx, h)
	if err != nil {
		return false // Start reports it
	}
	from := d.tmpl.find(cfg.Key)
	if from == "" {
		return false
	}
	saved, err := readMemory(from)
	if err == nil {
		err = d.copySaved(ctx, from, dir, copyOf{from: saved.DiskSize, size: size, memory: memoryTemplate, needed: true})
	}
	if err != nil {
		d.log.Warn("a template could not be used", "image", h.Image.Ref, "err", err)
	}
	return err == nil
}

// Stop implements backend.Driver.
func (d *Driver) Stop(ctx context.Context, ref backend.Ref, grace time.Duration) error {
	unlock, err := d.set.Begin(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	f, err := d.load(ref)
	switch {
	case err == nil:
	case f.Dir != "" && restoring(f.Dir):
		if err := d.finishRestore(ctx, f); err != nil {
			return err
		}
	case agentlab.CodeOf(err) == agentlab.CodeUnavailable: // its creation was interrupted: it does not run
		return nil
	default:
		return err
	}
	s := d.supervised(f)
	if err := s.Halt(ctx, grace); err != nil {
		return vmdir.AsError(err, "stopping sandbox %d", f.VMID)
	}
	d.at("halted")
	if err := dropMemory(f.Dir, durable.Content); err != nil { // of a sandbox that was suspended to disk
		return err
	}
	return s.Settle(d.cfg.Now())
}

// Destroy implements backend.Driver. It renames the directory to trash in one
// step, so that the rest after a crash is not read as a sandbox.
func (d *Driver) Destroy(ctx context.Context, ref backend.Ref) error {
	unlock, err := d.set.Begin(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	f, err := d.find(ref.UID)
	if err != nil {
		return err
	}
	if f.Dir == "" {
		return vmdir.Empty(f.Trash)
	}
	if err := d.supervised(f).Halt(ctx, 0); err != nil {
		return vmdir.AsError(err, "destroying sandbox %d", f.VMID)
	}
	d.at("halted")
	if err := vmdir.Empty(f.Trash); err != nil {
		return err
	}
	trash, err := vmdir.Discard(f)
	if err != nil {
		return err
	}
	d.at("in the trash")
	return vmdir.Empty(trash)
}
