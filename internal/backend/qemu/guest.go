package qemu

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// source is the driver for vmdir.Guests.
type source struct{ *Driver }

// Supervised implements vmdir.Source.
func (s source) Supervised(ref backend.Ref) (supervisor.Dir, error) {
	f, err := s.load(ref)
	return s.supervised(f), err
}

// Suspend implements backend.Power. The guest's memory stays in QEMU's
// process.
func (d *Driver) Suspend(ctx context.Context, ref backend.Ref) error {
	return d.switchCPUs(ctx, ref, func(f found, onDisk bool) error {
		if onDisk {
			return nil
		}
		return d.supervised(f).Suspend(ctx)
	})
}

// SuspendToDisk implements backend.Power.
func (d *Driver) SuspendToDisk(ctx context.Context, ref backend.Ref) error {
	return d.switchCPUs(ctx, ref, func(f found, onDisk bool) error {
		if onDisk {
			return nil
		}
		return d.supervised(f).Save(ctx, supervisor.SaveTo{Dir: f.Dir, Durable: true})
	})
}

// Resume implements backend.Power.
func (d *Driver) Resume(ctx context.Context, ref backend.Ref) error {
	return d.switchCPUs(ctx, ref, func(f found, onDisk bool) error {
		if onDisk {
			return d.start(ctx, f)
		}
		err := d.supervised(f).Resume(ctx)
		if agentlab.CodeOf(err) == agentlab.CodeConflict && memoryLost(f.Dir) {
			err = lostError(f.VMID)
		}
		return err
	})
}

// switchCPUs changes a sandbox that runs or is suspended.
func (d *Driver) switchCPUs(ctx context.Context, ref backend.Ref, change func(f found, onDisk bool) error) error {
	f, unlock, err := d.open(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	onDisk, err := d.suspendedToDisk(f)
	if err != nil {
		return err
	}
	return change(f, onDisk)
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
func (d *Driver) updateNetwork(ctx context.Context, f found, n agentlab.Network) error {
	return d.supervised(f).SetNetwork(ctx, n, func() error { return f.StoreNetwork(f.Dir, n) })
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
