package fake

import (
	"context"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/reconcile"
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

// deadlines are the deadlines of all running VMs, with one timer: there are thousands.
type deadlines struct {
	mu    sync.Mutex
	queue reconcile.Queue[*instance]
	timer *time.Timer // nil until there was a deadline
}

// watchDeadline powers the VM off when its deadline passes; in.mu is held.
func (in *instance) watchDeadline() {
	in.unwatchDeadline()
	if in.rec.Lease.IsZero() {
		return
	}
	d := &in.h.deadlines
	d.mu.Lock()
	defer d.mu.Unlock()
	in.deadline.Value = in
	d.queue.Set(&in.deadline, time.Now().Add(in.rec.Ends.Sub(in.h.cfg.Clock())))
	d.wait()
}

func (in *instance) unwatchDeadline() {
	d := &in.h.deadlines
	d.mu.Lock()
	defer d.mu.Unlock()
	d.queue.Remove(&in.deadline)
}

// wait waits for the first deadline. d.mu is locked.
func (d *deadlines) wait() {
	first := d.queue.First()
	switch {
	case first == nil:
	case d.timer == nil:
		d.timer = time.AfterFunc(time.Until(first.At()), d.passed)
	default:
		d.timer.Reset(time.Until(first.At()))
	}
}

// passed powers the VMs off whose deadline has passed.
func (d *deadlines) passed() {
	d.mu.Lock()
	var over []*instance
	for e, now := d.queue.First(), time.Now(); e != nil && !e.At().After(now); e = d.queue.First() {
		d.queue.Remove(e)
		over = append(over, e.Value)
	}
	d.wait()
	d.mu.Unlock()
	for _, in := range over {
		in.expire()
	}
}

// stop ends the timer.
func (d *deadlines) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
	}
}

// expire powers the VM off, unless its deadline was moved in the meantime.
func (in *instance) expire() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.h.deadlines.mu.Lock()
	moved := in.deadline.Queued()
	in.h.deadlines.mu.Unlock()
	if in.guest == nil || moved {
		return
	}
	in.rec.Expired = true
	if err := in.off(backend.PowerStopped, ""); err != nil {
		in.h.log.Error("fake deadline", "vmid", in.rec.Spec.VMID, "err", err)
	}
}
