package lima

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
	name := vmdir.Name(spec.VMID, spec.UID)
	if _, _, ok := vmdir.ParseName(name); !ok {
		return agentlab.Errorf(agentlab.CodeInvalid, "%d-%q does not name a sandbox", spec.VMID, spec.UID)
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
	case f.Dir == "":
		f.Dir = filepath.Join(d.sandboxes(), name)
		if _, err := os.Lstat(f.Dir); err == nil {
			return agentlab.Errorf(agentlab.CodeExists, "%s is not a sandbox's directory", f.Dir).WithHint("move it away")
		}
		f.Handle, err = d.newHandle(ctx, f.Dir, spec)
	case filepath.Base(f.Dir) != name, f.Err == nil && !sameMachine(f.Spec, spec):
		return agentlab.Errorf(agentlab.CodeExists, "sandbox %d exists with another specification", f.VMID)
	case errors.Is(f.Err, fs.ErrNotExist):
		f.Handle, err = d.newHandle(ctx, f.Dir, spec)
	case f.Err != nil:
		return vmdir.AsError(f.Err, "cannot read sandbox %d", f.VMID)
	case !sameSpec(f.Spec, spec): // the caller's name and policy are newer
		f.Spec.Name = spec.Name
		err = d.updateNetwork(ctx, f, spec.Network)
	}
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
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return vmdir.Handle{}, vmdir.Fault(err, "cannot create the directory of sandbox %d", spec.VMID)
	}
	d.at("directory made")
	if err := h.Write(dir); err != nil {
		return vmdir.Handle{}, err
	}
	d.at("mark written")
	return h, nil
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
	unlock, err := d.begin(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	f, err := d.find(ref.UID)
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
	return vmdir.Empty(trash)
}

// Inspect implements backend.Driver.
func (d *Driver) Inspect(_ context.Context, ref backend.Ref) (backend.Instance, error) {
	f, err := d.find(ref.UID)
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
	in := backend.Instance{Ref: backend.Ref{UID: f.UID}, VMID: f.VMID, Power: backend.PowerPartial, Reason: "its creation was interrupted"}
	switch {
	case f.Dir == "":
		in.Reason = "its destruction was interrupted"
		return in, nil
	case errors.Is(f.Err, fs.ErrNotExist):
		return in, nil
	case f.Err != nil:
		return in, vmdir.AsError(f.Err, "cannot read sandbox %d", f.VMID)
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

// List implements backend.Driver. A sandbox that cannot be read is partial, with
// the reason, so that it is not taken for absent.
func (d *Driver) List(ctx context.Context) ([]backend.Instance, error) {
	all, err := vmdir.Find(d.sandboxes(), "")
	if err != nil {
		return nil, err
	}
	var list []backend.Instance
	for _, f := range all {
		if err := ctx.Err(); err != nil {
			return nil, agentlab.Errorf(agentlab.CodeUnavailable, "listing sandboxes: %w", context.Cause(ctx))
		}
		in, err := d.state(f)
		if err != nil {
			in.Power, in.Reason = backend.PowerPartial, agentlab.Reason(err.Error())
		}
		list = append(list, in)
	}
	return list, nil
}

// sameSpec compares two specifications as config.json has them.
func sameSpec(a, b backend.Spec) bool {
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && bytes.Equal(x, y)
}

// sameMachine reports whether two differ at most in what can change: the name and the
// network.
func sameMachine(a, b backend.Spec) bool {
	a.Name, b.Name = "", ""
	a.Network, b.Network = agentlab.Network{}, agentlab.Network{}
	return sameSpec(a, b)
}
