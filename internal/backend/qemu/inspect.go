package qemu

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// Inspect implements backend.Driver.
func (d *Driver) Inspect(_ context.Context, ref backend.Ref) (backend.Instance, error) {
	f, err := d.find(ref.UID)
	if err != nil {
		return backend.Instance{}, err
	}
	if f.Dir == "" && f.Trash == "" {
		return backend.Instance{}, vmdir.Absent(ref.UID)
	}
	return d.instance(f)
}

// instance returns the state of a sandbox that was found.
func (d *Driver) instance(f found) (backend.Instance, error) {
	in, marked, err := f.Instance()
	if !marked {
		return in, err
	}
	if restoring(f.Dir) {
		in.Reason = "its restoration was interrupted"
		return in, nil
	}
	in.Name, in.Spec = f.Spec.Name, &f.Spec
	if _, err := os.Lstat(filepath.Join(f.Dir, fileRoot)); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return in, nil
		}
		return in, fault(err, "cannot check the disk of sandbox %d", f.VMID)
	}
	in.IP = vnet.DefaultGuest.String()
	if err := d.power(f, &in); err != nil {
		return in, err
	}
	var started startConfig
	in.Copied = in.Power == backend.PowerRunning && supervisor.ReadStart(f.Dir, &started) == nil && started.Load
	return in, nil
}

// power sets the power state in in. A sandbox whose VM has ended is suspended to
// disk if its memory is there and was not made from a template. It is crashed if
// its memory was lost, whatever its VM has recorded.
func (d *Driver) power(f found, in *backend.Instance) error {
	err := d.supervised(f).Power(in)
	switch {
	case err != nil || in.Power == backend.PowerRunning:
	case onDisk(f.Dir):
		in.Power, in.Reason, in.HostRestarted, in.GuestRebooted = backend.PowerSuspended, "", false, false
	case in.Power != backend.PowerSuspended && !in.Expired && memoryLost(f.Dir):
		why := cmp.Or(in.Reason, "it does not run")
		in.Power, in.HostRestarted, in.GuestRebooted = backend.PowerCrashed, false, false
		in.Reason = agentlab.Reason("its saved memory is lost, because its VM ended while the guest continued: " + why)
	}
	return err
}

// suspendedToDisk reports whether a sandbox has no VM and is suspended. While a
// resumed VM starts, its memory is still on disk.
func (d *Driver) suspendedToDisk(f found) (bool, error) {
	var in backend.Instance
	err := d.power(f, &in)
	return in.Power == backend.PowerSuspended && onDisk(f.Dir), err
}

// List implements backend.Driver.
func (d *Driver) List(ctx context.Context) ([]backend.Instance, error) {
	return d.set.List(ctx, d.instance)
}
