package fake

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// SetDeadline implements backend.Power.
func (d *Driver) SetDeadline(ctx context.Context, ref backend.Ref, to backend.Deadline) error {
	if err := d.point(ctx, OpSetDeadline, Before, ref); err != nil {
		return err
	}
	if to.Lease.IsZero() || to.Left <= 0 {
		return agentlab.Errorf(agentlab.CodeInvalid, "a deadline needs a lease and time that is left, not %s", to.Left).WithField("left")
	}
	in, err := d.h.find(ref)
	if err != nil {
		return err
	}
	if err := in.setDeadline(to); err != nil {
		return err
	}
	return d.point(ctx, OpSetDeadline, After, ref)
}

func (in *instance) setDeadline(to backend.Deadline) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.rec.Lease.Equal(to.Lease) {
		return nil
	}
	in.rec.Lease, in.rec.Ends = to.Lease, in.h.cfg.Clock().Add(to.Left)
	if in.guest != nil {
		in.watchDeadline()
	}
	return in.save()
}

// watchDeadline powers the VM off when its deadline passes; in.mu is held.
func (in *instance) watchDeadline() {
	in.unwatchDeadline()
	if in.rec.Lease.IsZero() {
		return
	}
	lease, left := in.rec.Lease, in.rec.Ends.Sub(in.h.cfg.Clock())
	in.deadline = time.AfterFunc(left, func() { in.expire(lease) })
}

func (in *instance) unwatchDeadline() {
	if in.deadline != nil {
		in.deadline.Stop()
		in.deadline = nil
	}
}

// expire powers the VM off, unless its deadline was moved in the meantime.
func (in *instance) expire(lease time.Time) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.guest == nil || !in.rec.Lease.Equal(lease) {
		return
	}
	in.rec.Expired = true
	if err := in.off(backend.PowerStopped, ""); err != nil {
		in.h.log.Error("fake deadline", "vmid", in.rec.Spec.VMID, "err", err)
	}
}
