package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
)

// Create implements backend.Driver. Its steps are atomic: the directory,
// config.json, the root disk.
func (d *Driver) Create(ctx context.Context, spec backend.Spec) error {
	if err := d.Validate(spec); err != nil {
		return err
	}
	name := dirName(spec.VMID, spec.UID)
	if _, _, ok := parseDirName(name); !ok {
		return agentlab.Errorf(agentlab.CodeInvalid, "%d-%q does not name a sandbox", spec.VMID, spec.UID)
	}
	if spec.From != nil { // where they are does not matter
		spec.From = &backend.SnapshotRef{UID: spec.From.UID, Of: backend.Ref{UID: spec.From.Of.UID}}
	}
	unlock, err := d.begin(ctx, spec.Ref())
	if err != nil {
		return err
	}
	defer unlock()
	f, err := d.find(spec.UID)
	if err != nil {
		return err
	}
	switch {
	case f.dir == "":
		f.dir = filepath.Join(d.sandboxes(), name)
		if _, err := os.Lstat(f.dir); err == nil {
			return agentlab.Errorf(agentlab.CodeExists, "%s is not a sandbox's directory", f.dir).WithHint("move it away")
		}
		f.handle, err = d.newHandle(ctx, f.dir, spec)
	case filepath.Base(f.dir) != name, f.err == nil && !sameMachine(f.Spec, spec):
		return agentlab.Errorf(agentlab.CodeExists, "sandbox %d exists with another specification", f.vmid)
	case errors.Is(f.err, fs.ErrNotExist):
		f.handle, err = d.newHandle(ctx, f.dir, spec)
	case f.err != nil:
		return asError(f.err, "cannot read sandbox %d", f.vmid)
	case !sameSpec(f.Spec, spec): // the caller's name and policy are newer
		f.Spec.Name = spec.Name
		err = d.updateNetwork(ctx, f, spec.Network)
	}
	if err != nil {
		return err
	}
	if restoring(f.dir) {
		return d.finishRestore(ctx, f)
	}
	return d.makeDisk(ctx, f.dir, f.handle)
}

// sameSpec compares two specifications as config.json has them.
func sameSpec(a, b backend.Spec) bool {
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && bytes.Equal(x, y)
}

// sameMachine reports whether two differ at most in what can change: the name, when
// the warm pool hands a sandbox out, and the network.
func sameMachine(a, b backend.Spec) bool {
	a.Name, b.Name = "", ""
	a.Network, b.Network = agentlab.Network{}, agentlab.Network{}
	return sameSpec(a, b)
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
		return handle{}, asError(err, "cannot find image %s", spec.Image)
	}
	h := handle{Version: handleVersion, Spec: spec, Image: img, Created: d.cfg.Now().UTC()}
	if _, err := diskSize(h); err != nil {
		return handle{}, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return handle{}, fault(err, "cannot create the directory of sandbox %d", spec.VMID)
	}
	d.at("directory made")
	if err := durable.ReplaceJSON(filepath.Join(dir, fileConfig), h, durable.Content); err != nil {
		return handle{}, fault(err, "cannot write %s of sandbox %d", fileConfig, spec.VMID)
	}
	d.at("mark written")
	return h, nil
}

// diskSize returns the size of the root disk in bytes.
func diskSize(h handle) (int64, error) {
	st, err := os.Stat(h.Image.RootDisk)
	if err != nil {
		return 0, imageGone(h, err)
	}
	size := st.Size()
	if gb := h.Spec.Resources.RootSizeGB; gb > 0 {
		if err := backend.CheckDisk(gb, size); err != nil {
			return 0, err
		}
		size = int64(gb) << 30
	}
	return size, nil
}

func imageGone(h handle, err error) error {
	if !errors.Is(err, fs.ErrNotExist) {
		return fault(err, "cannot read image %s", h.Image.Ref)
	}
	return agentlab.Errorf(agentlab.CodeNotFound, "image %s no longer exists: %w", h.Image.Ref, err).
		WithHint("build it again with 'agentlab image build', and create a new sandbox if its digest has changed")
}

// makeDisk creates the overlay if it does not exist.
func (d *Driver) makeDisk(ctx context.Context, dir string, h handle) error {
	path := filepath.Join(dir, fileRoot)
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	size, err := diskSize(h)
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
	from := d.tmpl.find(cfg.Machine)
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
	unlock, err := d.begin(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	f, err := d.load(ref)
	switch {
	case err == nil:
	case f.dir != "" && restoring(f.dir):
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
		return asError(err, "stopping sandbox %d", f.vmid)
	}
	d.at("halted")
	if err := dropMemory(f.dir, durable.Content); err != nil { // of a sandbox that was suspended to disk
		return err
	}
	return s.Settle(d.cfg.Now())
}

// Destroy implements backend.Driver. It renames the directory to trash in one
// step, so that the rest after a crash is not read as a sandbox.
func (d *Driver) Destroy(ctx context.Context, ref backend.Ref) error {
	unlock, err := d.begin(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	f, err := d.find(ref.UID)
	if err != nil {
		return err
	}
	if f.dir == "" {
		return empty(f.trash)
	}
	if err := d.supervised(f).Halt(ctx, 0); err != nil {
		return asError(err, "destroying sandbox %d", f.vmid)
	}
	d.at("halted")
	if err := empty(f.trash); err != nil {
		return err
	}
	trash := filepath.Join(d.sandboxes(), trashPrefix+filepath.Base(f.dir))
	if err := os.Rename(f.dir, trash); err != nil {
		return fault(err, "cannot move sandbox %d to the trash", f.vmid)
	}
	d.at("in the trash")
	return empty(trash)
}

// empty removes a directory; "" is none.
func empty(trash string) error {
	if err := os.RemoveAll(trash); err != nil {
		return fault(err, "cannot empty %s", trash)
	}
	return nil
}
