package qemu

import (
	"context"
	"io"
	"net"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// DialControl implements backend.Driver.
func (d *Driver) DialControl(ctx context.Context, ref backend.Ref) (net.Conn, error) {
	return d.dial(ctx, ref, supervisor.Dir.DialControl)
}

// DialGuest implements backend.Driver.
func (d *Driver) DialGuest(ctx context.Context, ref backend.Ref, port uint16) (net.Conn, error) {
	if port == 0 {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "port 0 cannot be dialled").WithField("port")
	}
	return d.dial(ctx, ref, func(s supervisor.Dir, ctx context.Context) (net.Conn, error) { return s.DialGuest(ctx, port) })
}

func (d *Driver) dial(ctx context.Context, ref backend.Ref, open func(supervisor.Dir, context.Context) (net.Conn, error)) (net.Conn, error) {
	f, err := d.find(ref.UID)
	if err == nil && f.dir == "" {
		err = absent(ref.UID)
	}
	if err != nil {
		return nil, err
	}
	c, err := open(d.supervised(f), ctx)
	if err == nil {
		return c, nil
	}
	in, ierr := d.Inspect(ctx, ref)
	switch {
	case ierr != nil:
		return nil, ierr
	case in.Power != backend.PowerRunning:
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "sandbox %d is %s", f.vmid, in.Power).WithHint("start it with 'agentlab sandbox start %d'", f.vmid)
	}
	return nil, err
}

// ListenGuest implements backend.Driver.
func (d *Driver) ListenGuest(_ context.Context, ref backend.Ref) (net.Listener, error) {
	f, err := d.load(ref)
	if err != nil {
		return nil, err
	}
	return d.supervised(f).Listen()
}

// ConsoleLog implements backend.Console.
func (d *Driver) ConsoleLog(ctx context.Context, ref backend.Ref, follow bool) (io.ReadCloser, error) {
	f, err := d.load(ref)
	if err != nil {
		return nil, err
	}
	return d.supervised(f).Console(ctx, follow), nil
}

// EgressLog implements backend.Net.
func (d *Driver) EgressLog(ctx context.Context, ref backend.Ref, after int64, limit int) ([]agentlab.EgressRecord, error) {
	f, err := d.load(ref)
	if err != nil {
		return nil, err
	}
	return d.supervised(f).Egress(ctx, after, limit)
}

// RecordEgress implements backend.Net.
func (d *Driver) RecordEgress(ctx context.Context, ref backend.Ref, r agentlab.EgressRecord) error {
	f, err := d.load(ref)
	if err != nil {
		return err
	}
	return d.supervised(f).RecordEgress(ctx, r)
}

// Memory implements backend.Host.
func (d *Driver) Memory(_ context.Context, ref backend.Ref) (backend.Memory, error) {
	f, err := d.load(ref)
	if err != nil {
		return backend.Memory{}, err
	}
	return d.supervised(f).Memory()
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
		return d.supervised(f).Save(ctx, supervisor.SaveTo{Dir: f.dir, Durable: true})
	})
}

// Resume implements backend.Power.
func (d *Driver) Resume(ctx context.Context, ref backend.Ref) error {
	return d.switchCPUs(ctx, ref, func(f found, onDisk bool) error {
		if onDisk {
			return d.start(ctx, f)
		}
		err := d.supervised(f).Resume(ctx)
		if agentlab.CodeOf(err) == agentlab.CodeConflict && memoryLost(f.dir) {
			err = lostError(f.vmid)
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
	if err := validNetwork(n); err != nil {
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
	return d.supervised(f).SetNetwork(ctx, n, func() error { return f.storeNetwork(f.dir, n) })
}

// storeNetwork writes h with another network.
func (h *handle) storeNetwork(dir string, n agentlab.Network) error {
	next := *h
	next.Spec.Network = n
	if err := durable.ReplaceJSON(filepath.Join(dir, fileConfig), next, durable.Content); err != nil {
		return fault(err, "cannot write %s of sandbox %d", fileConfig, h.Spec.VMID)
	}
	*h = next
	return nil
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
