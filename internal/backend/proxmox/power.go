package proxmox

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// findVM returns the VM of a sandbox that exists with the mark. The handle is
// nil if it was lost.
func (d *Driver) findVM(ctx context.Context, ref backend.Ref) (vmID, *handle, lookupResult, error) {
	id, h, err := d.resolve(ctx, ref)
	if err != nil {
		return id, nil, lookupResult{}, err
	}
	s, err := d.lookupOwned(ctx, id, h)
	return id, h, s, err
}

// handleOf returns the handle of a sandbox without reading its VM.
func (d *Driver) handleOf(ctx context.Context, ref backend.Ref) (*handle, error) {
	id, h, err := d.resolve(ctx, ref)
	if err == nil && h == nil {
		err = handleLost(id).WithHint("destroy the sandbox")
	}
	return h, err
}

// handleLost returns the error for a sandbox whose handle was lost.
func handleLost(id vmID) *agentlab.Error {
	return agentlab.Errorf(agentlab.CodeUnavailable, "the handle file of the sandbox with VM %d was lost", id.VMID)
}

// ownedVM is createdVM for callers that need a sandbox that is complete.
func (d *Driver) ownedVM(ctx context.Context, ref backend.Ref) (*handle, lookupResult, error) {
	h, s, err := d.createdVM(ctx, ref)
	if err == nil && h.incomplete() {
		return nil, s, agentlab.Errorf(agentlab.CodeUnavailable, "the restore of a snapshot of sandbox %d was interrupted", h.Spec.VMID).
			WithHint("restore a snapshot of the sandbox, or destroy the sandbox")
	}
	return h, s, err
}

// createdVM is findVM for callers that need a sandbox whose Create is complete.
func (d *Driver) createdVM(ctx context.Context, ref backend.Ref) (*handle, lookupResult, error) {
	id, h, s, err := d.findVM(ctx, ref)
	switch {
	case err != nil && (h == nil || h.Phase == phaseCreated || agentlab.CodeOf(err) != agentlab.CodeNotFound):
		return nil, s, err
	case h == nil:
		return nil, s, handleLost(id).WithHint("destroy the sandbox, or create it again with the same ID")
	case h.Phase != phaseCreated:
		return nil, s, agentlab.Errorf(agentlab.CodeUnavailable, "the creation or destruction of sandbox %d was interrupted", h.Spec.VMID)
	}
	return h, s, nil
}

// setPower stores the requested power state of a VM.
func (d *Driver) setPower(h *handle, p power) error {
	if h == nil || h.Power == p {
		return nil
	}
	h.Power, h.PowerFrom = p, d.cfg.Now().UTC()
	return d.save(h)
}

// Start implements backend.Driver. The order matters: before the VM runs, the
// rules are in force and were read back, and its configuration was audited.
func (d *Driver) Start(ctx context.Context, ref backend.Ref) error {
	unlock, err := d.lock(ctx, ref.UID)
	if err != nil {
		return err
	}
	defer unlock()
	h, s, err := d.ownedVM(ctx, ref)
	if err != nil {
		return err
	}
	if lock := s.cfg["lock"]; lock != "" && lock != lockSuspended {
		return agentlab.Errorf(agentlab.CodeBusy, "VM %d is locked (%s)", h.id().VMID, clip(lock)).
			WithHint("wait until the task on the VM ends; if there is none, run on its node: qm unlock %d", h.id().VMID)
	}
	if h.Spec.Resources.Nested == agentlab.NestedOn {
		if err := d.Nested(ctx); err != nil {
			return err
		}
	}
	s, ho, err := d.replug(ctx, h, s)
	if err != nil {
		return err
	}
	if err := d.auditAll(h, s, ho); err != nil {
		return err
	}
	if err := d.checkGroup(ctx, h.options.FirewallGroup); err != nil {
		return err
	}
	h.Volumes = volumesOf(s.cfg, h.id().VMID)
	net, err := d.network(ctx, h.Node)
	if err != nil {
		return err
	}
	if err := net.Ready(ctx); err != nil {
		return err
	}
	if err := d.put(ctx, net, h); err != nil {
		return err
	}
	d.at("network in force")
	return d.powerOn(ctx, h)
}

// auditAll audits the current and the pending configuration of a VM: the API
// shows a pending change as if it were made, but if it cannot be made, Proxmox
// starts the VM with the old value. volume is the holder of its volume, if it has one.
func (d *Driver) auditAll(h *handle, s lookupResult, volume holder) error {
	want := d.wanted(h)
	if volume.exists {
		want[volumeSlot] = volumeDrive(volume)
	}
	for _, cfg := range []pve.Config{s.cfg, s.current} {
		delete(cfg, "lock")
		if err := audit(cfg, want, h.id().VMID); err != nil {
			return err
		}
	}
	return nil
}

// lockSuspended is the property lock of a VM whose memory is on a disk.
const lockSuspended = "suspended"

func (d *Driver) powerOn(ctx context.Context, h *handle) error {
	id, before := h.id(), h.Power
	if before == powerSuspended {
		st, err := d.pve.Status(ctx, h.Node, id.VMID)
		if err != nil {
			return err
		}
		if st.Paused() {
			return agentlab.Errorf(agentlab.CodeConflict, "sandbox %d is suspended", h.Spec.VMID).WithHint("resume the sandbox first")
		}
	}
	if before != powerOn {
		if err := d.setPower(h, powerStarting); err != nil {
			return err
		}
	}
	d.at("start about to be sent")
	err := d.task(ctx, func() (pve.UPID, error) { return d.pve.Start(ctx, h.Node, id.VMID) })
	d.at("started")
	switch code := agentlab.CodeOf(err); {
	case code == agentlab.CodeConflict: // it is already running
	case code == agentlab.CodeUnknownOutcome:
		return err
	case err != nil:
		if before != powerOn && ctx.Err() == nil {
			if serr := d.setPower(h, powerOff); serr != nil {
				return serr
			}
		}
		return err
	}
	if err := d.noteStart(h, err == nil); err != nil {
		return err
	}
	d.at("start noted")
	return nil
}

// noteStart records that a VM runs; fresh means that it was started just now.
func (d *Driver) noteStart(h *handle, fresh bool) error {
	d.cache.markRunning(h.Spec.UID, d.cfg.Now(), fresh)
	boot := ""
	if d.bridgeEnforced(h.Node) {
		boot = d.cfg.BootID()
	}
	if h.Power == powerOn && h.Boot != boot { // setPower would find no change
		h.Power = powerStarting
	}
	h.Boot = boot
	return d.setPower(h, powerOn)
}

// task starts a task and waits for its end. The first status request follows a
// pause, because no other task ends at once.
func (d *Driver) task(ctx context.Context, begin func() (pve.UPID, error)) error {
	upid, err := begin()
	if err != nil {
		return err
	}
	return d.wait(ctx, upid)
}

func (d *Driver) wait(ctx context.Context, upid pve.UPID) error {
	if upid == "" || d.pve.Ended(upid) {
		return nil
	}
	select {
	case <-time.After(d.cfg.Poll.First):
	case <-ctx.Done():
	}
	_, err := d.pve.Wait(ctx, upid)
	return err
}

// Stop implements backend.Driver.
func (d *Driver) Stop(ctx context.Context, ref backend.Ref, grace time.Duration) error {
	unlock, err := d.lock(ctx, ref.UID)
	if err != nil {
		return err
	}
	defer unlock()
	id, h, s, err := d.findVM(ctx, ref)
	if err != nil && !s.owned { // a sandbox is stopped on any node
		if h != nil && h.Phase != phaseCreated && agentlab.CodeOf(err) == agentlab.CodeNotFound {
			return nil // partially created: nothing runs
		}
		return err
	}
	if s.cfg["lock"] == lockClone {
		return nil
	}
	suspended := h != nil && h.Power == powerSuspended
	if h != nil && h.Power != powerOff {
		if err := d.setPower(h, powerStopping); err != nil {
			return err
		}
	}
	d.at("stop about to be sent")
	off := false
	if grace > 0 && !suspended {
		if off, err = d.askGuest(ctx, s.node, id.VMID, grace); err != nil {
			return err
		}
		if !off { // during the grace period another VM may have got the number
			if s, err = d.lookupOwned(ctx, id, h); err != nil && !s.owned {
				return err
			}
		}
	}
	if !off {
		if err := d.cutPower(ctx, s.node, id.VMID); err != nil {
			return err
		}
	}
	d.at("stopped")
	d.cache.forget(id.UID)
	return d.setPower(h, powerOff)
}

// askGuest asks a guest to power itself off, and reports whether it did. A
// paused guest cannot be asked.
func (d *Driver) askGuest(ctx context.Context, node string, vmid int, grace time.Duration) (off bool, err error) {
	err = d.task(ctx, func() (pve.UPID, error) { return d.pve.Shutdown(ctx, node, vmid, grace) })
	if err == nil || ctx.Err() != nil {
		return true, err
	}
	d.log.Info("the guest did not shut down, stopping the VM", "vmid", vmid, "err", err)
	d.at("shutdown failed")
	return false, nil
}

// cutPower stops a VM that was proved to be the sandbox's.
func (d *Driver) cutPower(ctx context.Context, node string, vmid int) error {
	return d.task(ctx, func() (pve.UPID, error) { return d.pve.Stop(ctx, node, vmid) })
}

// Suspend implements backend.Power.
func (d *Driver) Suspend(ctx context.Context, ref backend.Ref) error {
	return d.pause(ctx, ref, powerSuspended, func(h *handle, st pve.Status) error {
		if st.Paused() {
			return nil
		}
		return d.task(ctx, func() (pve.UPID, error) { return d.pve.Suspend(ctx, h.Node, h.id().VMID) })
	})
}

// Resume implements backend.Power.
func (d *Driver) Resume(ctx context.Context, ref backend.Ref) error {
	return d.pause(ctx, ref, powerOn, func(h *handle, st pve.Status) error {
		if !st.Paused() {
			return nil
		}
		return d.task(ctx, func() (pve.UPID, error) { return d.pve.Resume(ctx, h.Node, h.id().VMID) })
	})
}

func (d *Driver) pause(ctx context.Context, ref backend.Ref, then power, act func(*handle, pve.Status) error) error {
	unlock, err := d.lock(ctx, ref.UID)
	if err != nil {
		return err
	}
	defer unlock()
	h, _, err := d.ownedVM(ctx, ref)
	if err != nil {
		return err
	}
	st, err := d.pve.Status(ctx, h.Node, h.id().VMID)
	if err != nil {
		return err
	}
	if !st.Running() {
		return agentlab.Errorf(agentlab.CodeConflict, "the VM of sandbox %d is not running", h.Spec.VMID)
	}
	d.at("pause or resume about to be sent")
	if err := act(h, st); err != nil {
		return err
	}
	d.cache.forget(ref.UID) // the cached state is out of date
	return d.setPower(h, then)
}
