package lima

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// Suspend implements backend.Power. The guest's memory stays in QEMU's process.
func (d *Driver) Suspend(ctx context.Context, ref backend.Ref) error {
	f, unlock, err := d.open(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	return d.supervised(f).Suspend(ctx)
}

// Resume implements backend.Power.
func (d *Driver) Resume(ctx context.Context, ref backend.Ref) error {
	f, unlock, err := d.open(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	return d.supervised(f).Resume(ctx)
}

// SuspendToDisk implements backend.Power.
func (d *Driver) SuspendToDisk(context.Context, backend.Ref) error {
	return agentlab.Errorf(agentlab.CodeUnsupported, "Lima cannot save the memory of a VM").WithHint("suspend the sandbox in memory, or stop it")
}

// SetDeadline implements backend.Power.
func (d *Driver) SetDeadline(ctx context.Context, ref backend.Ref, to backend.Deadline) error {
	f, unlock, err := d.open(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	return d.supervised(f).SetDeadline(ctx, to)
}

// UpdateNetwork implements backend.Net.
func (d *Driver) UpdateNetwork(ctx context.Context, ref backend.Ref, n agentlab.Network) error {
	if err := vmdir.CheckNetwork(Name, n); err != nil {
		return err
	}
	f, unlock, err := d.open(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	return d.updateNetwork(ctx, f, n)
}

// updateNetwork is UpdateNetwork for a caller that holds the sandbox's lock.
func (d *Driver) updateNetwork(ctx context.Context, f vmdir.Found, n agentlab.Network) error {
	return d.supervised(f).SetNetwork(ctx, n, func() error { return f.StoreNetwork(f.Dir, n) })
}

// ExportDisk implements backend.Console.
func (d *Driver) ExportDisk(context.Context, backend.Ref, string) error {
	return agentlab.Errorf(agentlab.CodeUnsupported, "disks of Lima instances are not exported").WithHint("start the sandbox and copy the files that you need with 'agentlab cp'")
}

// Accel implements backend.Host.
func (d *Driver) Accel(ctx context.Context) string {
	accel, err := d.host.Accel(ctx)
	if err != nil {
		return ""
	}
	return string(accel)
}

// Nested implements backend.Host.
func (d *Driver) Nested(ctx context.Context) error { return d.host.Nested(ctx) }

// Room implements backend.Host.
func (d *Driver) Room(_ context.Context, r agentlab.Resources) error {
	if err := qemuvm.Room(r, d.cfg.StateDir, d.cfg.PauseBelow); err != nil {
		return agentlab.Errorf(agentlab.CodeNoSpace, "%w", err)
	}
	return nil
}

// Taken implements backend.Host: only this installation gives numbers to VMs.
func (d *Driver) Taken(context.Context, int, int) ([]int, error) { return nil, nil }
