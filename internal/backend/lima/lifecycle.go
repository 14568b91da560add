package lima

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// Files in a sandbox's directory, beside those of vmdir and the supervisor.
const (
	fileYAML    = "lima.yaml"    // template of the instance
	fileMade    = "made"         // empty; exists once Create has finished
	fileWrapper = "wrapper.sock" // the supervisor waits here for the wrapper
	fileLimaLog = "limactl.log"  // output of limactl

	// processName is supervisor.Dir.Process: QEMU's files are qemu.lock and
	// qemu.pid.
	processName = "qemu"
)

// startPatience limits a start: limactl starts several processes before it starts
// QEMU, each of which a busy host delays.
const startPatience = 3 * time.Minute

// Create implements backend.Driver. Its steps are atomic: the directory, config.json,
// the instance, the mark that it is whole.
func (d *Driver) Create(ctx context.Context, spec backend.Spec) error {
	if err := d.Validate(spec); err != nil {
		return err
	}
	unlock, err := d.set.Begin(ctx, spec.Ref())
	if err != nil {
		return err
	}
	defer unlock()
	f, err := d.set.Claim(spec, func(dir string) (vmdir.Handle, error) { return d.newHandle(ctx, dir, spec) },
		func(f vmdir.Found) error { return d.updateNetwork(ctx, f, spec.Network) })
	if err != nil {
		return err
	}
	return d.makeInstance(ctx, f.Dir, f.Handle)
}

// newHandle finds the image, then creates the directory and config.json.
func (d *Driver) newHandle(ctx context.Context, dir string, spec backend.Spec) (vmdir.Handle, error) {
	if err := d.ready(ctx); err != nil {
		return vmdir.Handle{}, err
	}
	img, err := d.cfg.Images(ctx, spec.Image)
	if err != nil {
		return vmdir.Handle{}, vmdir.AsError(err, "cannot find image %s", spec.Image)
	}
	h := vmdir.Handle{Version: vmdir.Version, Spec: spec, Image: img, Created: d.cfg.Now().UTC()}
	if _, err := h.DiskSize(); err != nil {
		return vmdir.Handle{}, err
	}
	return h, h.Mark(dir, d.at)
}

// Start implements backend.Driver.
func (d *Driver) Start(ctx context.Context, ref backend.Ref) error {
	f, unlock, err := d.open(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Lstat(filepath.Join(f.Dir, fileMade)); err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the creation of sandbox %d was interrupted", f.VMID)
	}
	for _, name := range []string{limaDiffDisk, limaConfig} { // else limactl makes an empty disk, or another instance
		if _, err := os.Lstat(filepath.Join(d.instance(f.UID), name)); err != nil {
			return agentlab.Errorf(agentlab.CodeConflict, "the instance of sandbox %d has lost its %s: %w", f.VMID, name, err).
				WithHint("its disk is gone; destroy the sandbox with 'agentlab sandbox destroy %d'", f.VMID)
		}
	}
	if dir, err := vmdir.Attached(f.Dir); err != nil {
		return err
	} else if dir != "" {
		if err := (disks{d}).Claim(dir, f.UID); err != nil {
			return err
		}
	}
	return d.supervised(f).Start(ctx, d.cfg.Supervisor, func(ctx context.Context) (supervisor.Config, error) {
		return d.startConfig(ctx, f.Handle)
	})
}

// startConfig examines the host and returns what the supervisor runs.
func (d *Driver) startConfig(ctx context.Context, h vmdir.Handle) (*startConfig, error) {
	if err := d.ready(ctx); err != nil {
		return nil, err
	}
	if _, err := os.Stat(h.Image.Kernel); err != nil {
		return nil, h.ImageGone(err)
	}
	if h.Spec.Resources.Nested == agentlab.NestedOn {
		if err := d.Nested(ctx); err != nil {
			return nil, err
		}
	}
	initrd, err := d.rd.File(ctx, h.Image.Modules)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, h.ImageGone(err)
	}
	if err != nil {
		return nil, vmdir.AsError(err, "cannot create the initrd")
	}
	if err := d.makeBin(); err != nil {
		return nil, err
	}
	c := &startConfig{
		Start: supervisor.Start{
			Backend: Name, PauseBelow: d.cfg.PauseBelow, Reserved: d.cfg.Reserved, UpstreamProxy: d.cfg.UpstreamProxy,
		},
		QEMU: d.host.QEMU(), Initrd: initrd, Home: d.home(), Bin: d.bin(),
	}
	if c.Limactl, err = d.limactl(); err != nil {
		return nil, err
	}
	c.Machine, err = d.host.Machine(ctx, h.Spec.Resources.Nested.Wanted())
	return c, err
}

// Stop implements backend.Driver.
func (d *Driver) Stop(ctx context.Context, ref backend.Ref, grace time.Duration) error {
	f, unlock, err := d.open(ctx, ref)
	if err != nil {
		if f.Dir != "" && agentlab.CodeOf(err) == agentlab.CodeUnavailable { // its creation was interrupted: it does not run
			return nil
		}
		return err
	}
	defer unlock()
	s := d.supervised(f)
	if err := s.Halt(ctx, grace); err != nil {
		return vmdir.AsError(err, "stopping sandbox %d", f.VMID)
	}
	if err := endAgent(f.Dir); err != nil {
		return vmdir.AsError(err, "stopping sandbox %d", f.VMID)
	}
	d.at("halted")
	return s.Settle(d.cfg.Now())
}

// Destroy implements backend.Driver. The directory is renamed in one step, so that the
// rest after a crash is not read as a sandbox. Its name leads to the instance, so the
// instance is removed before the directory.
func (d *Driver) Destroy(ctx context.Context, ref backend.Ref) error {
	unlock, err := d.set.Begin(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	f, err := d.set.Find(ref.UID)
	if err != nil || f.Dir == "" && f.Trash == "" {
		return err
	}
	trash := f.Trash
	if f.Dir != "" {
		err := d.supervised(f).Halt(ctx, 0)
		if err == nil {
			err = endAgent(f.Dir)
		}
		if err != nil {
			return vmdir.AsError(err, "destroying sandbox %d", f.VMID)
		}
		d.at("halted")
		if err := vmdir.Empty(f.Trash); err != nil {
			return err
		}
		if trash, err = vmdir.Discard(f); err != nil {
			return err
		}
		d.at("in the trash")
	}
	if err := d.removeInstance(f.UID); err != nil {
		return err
	}
	d.at("instance removed")
	d.released(ctx, trash)
	return vmdir.Empty(trash)
}

// Inspect implements backend.Driver.
func (d *Driver) Inspect(_ context.Context, ref backend.Ref) (backend.Instance, error) {
	f, err := d.set.Find(ref.UID)
	if err != nil {
		return backend.Instance{}, err
	}
	if f.Dir == "" && f.Trash == "" {
		return backend.Instance{}, vmdir.Absent(ref.UID)
	}
	return d.state(f)
}

// state returns the state of a sandbox that was found.
func (d *Driver) state(f vmdir.Found) (backend.Instance, error) {
	in, marked, err := f.Instance()
	if !marked {
		return in, err
	}
	in.Name, in.Spec = f.Spec.Name, &f.Spec
	if _, err := os.Lstat(filepath.Join(f.Dir, fileMade)); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return in, nil
		}
		return in, vmdir.Fault(err, "cannot check the instance of sandbox %d", f.VMID)
	}
	in.IP = vnet.DefaultGuest.String()
	return in, d.supervised(f).Power(&in)
}

// List implements backend.Driver.
func (d *Driver) List(ctx context.Context) ([]backend.Instance, error) {
	return d.set.List(ctx, d.state)
}
