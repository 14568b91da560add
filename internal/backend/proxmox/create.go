package proxmox

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/cloudinit"
	"github.com/agentlab-vm/agentlab/internal/link"
)

// Create implements backend.Driver. The VM gets the number of its sandbox, or
// another one if that number is in use.
func (d *Driver) Create(ctx context.Context, spec backend.Spec) error {
	if err := d.Validate(spec); err != nil {
		return err
	}
	if err := d.validNumber(spec); err != nil {
		return err
	}
	unlock, err := d.lock(ctx, spec.UID)
	if err != nil {
		return err
	}
	defer unlock()
	vmid := spec.VMID
	for tried := []int{vmid}; ; tried = append(tried, vmid) {
		err := d.createAs(ctx, spec, vmid)
		if _, lost := errors.AsType[*numberError](err); !lost || len(tried) > otherNumbers {
			return err
		}
		h, herr := d.readHandle(spec.Ref())
		switch {
		case herr != nil:
			return herr
		case h == nil:
		case h.Phase == phaseCreated || h.Adopted:
			return err
		default: // its number was taken after the handle was written
			if herr = d.destroy(ctx, h.id(), h); herr != nil {
				return herr
			}
		}
		d.at("number lost")
		if vmid, herr = d.otherNumber(ctx, tried); herr != nil {
			return herr
		}
		d.log.Warn("number is in use, using another one for the VM of the sandbox", "vmid", spec.VMID, "number", vmid, "err", err)
	}
}

// createAs creates a sandbox whose VM has the given number, if it has no VM
// yet. Each step is recorded in the handle before it starts, so the next
// Create or Destroy knows what may have happened:
//
//	handle, snippet → clone with the mark in its description → everything
//	that was inherited replaced, tags → disk grown → complete
func (d *Driver) createAs(ctx context.Context, spec backend.Spec, vmid int) error {
	h, err := d.readHandle(spec.Ref())
	if err != nil {
		return err
	}
	if h != nil && h.Phase == phaseDestroying {
		if err := d.destroy(ctx, h.id(), h); err != nil {
			return err
		}
		h = nil
	}
	if h == nil {
		if h, err = d.startCreate(ctx, spec, vmid); err != nil {
			return err
		}
	}
	if err := d.applyLaterPolicy(ctx, h, spec.Network); err != nil {
		return err
	}
	return d.complete(ctx, h)
}

// startCreate writes the handle of a sandbox that has none. A VM with its mark
// belongs to the sandbox, and its handle was lost.
func (d *Driver) startCreate(ctx context.Context, spec backend.Spec, vmid int) (*handle, error) {
	lost, err := d.findByMark(ctx, spec.UID, spec.Name, inventoryAge)
	if err != nil {
		return nil, err
	}
	var o options
	if err := spec.Options.Decode(&o); err != nil {
		return nil, err
	}
	if err := d.checkGroup(ctx, o.FirewallGroup); err != nil {
		return nil, err
	}
	var p placement
	var from savedSnapshot
	if spec.From != nil {
		p, from, err = d.snapshotPlacement(ctx, spec)
	} else {
		p, err = d.choosePlacement(ctx, spec)
	}
	if err != nil {
		return nil, err
	}
	if err := checkDiskSize(spec, p.template); err != nil {
		return nil, err
	}
	h := &handle{
		Spec: spec, options: o, VMID: cmp.Or(lost, vmid), Phase: phaseCloning, Created: d.cfg.Now().UTC(), Node: p.target, Template: p.vmid, Source: p.node,
		Full: d.cfg.FullClone || spec.From != nil, Power: powerOff, Adopted: lost != 0,
	}
	d.takeSeed(h, from)
	if err := d.numberFree(ctx, h, p.template); err != nil {
		return nil, err
	}
	d.at("nothing written")
	return h, d.claim(h)
}

// applyLaterPolicy applies the policy of a later Create.
func (d *Driver) applyLaterPolicy(ctx context.Context, h *handle, n agentlab.Network) error {
	if sameNetwork(h.network(), n) {
		return nil
	}
	return d.setNetwork(ctx, h, n)
}

// complete continues the creation of a sandbox from the phase in its handle.
func (d *Driver) complete(ctx context.Context, h *handle) error {
	if h.Phase == phaseCreated {
		if _, err := d.lookupOwned(ctx, h.id(), h); err != nil || h.Restoring == "" {
			return err
		}
		return d.restore(ctx, h, h.Restoring)
	}
	if h.Phase == phaseCloning {
		if err := d.clone(ctx, h); err != nil {
			return err
		}
		h.Phase, h.CloneSent = phaseSetting, false
		if err := d.save(h); err != nil {
			return err
		}
	}
	d.at("cloned")
	if err := d.configure(ctx, h); err != nil {
		return err
	}
	d.at("configured")
	if err := d.grow(ctx, h); err != nil {
		return err
	}
	d.at("disk grown")
	h.Phase = phaseCreated
	if err := d.save(h); err != nil {
		return err
	}
	d.at("complete")
	return nil
}

// Proxmox waits one second for the lock of the template of a clone, and ten
// seconds for that of the storage; after that the driver tries again.
const (
	cloneTries = 5
	clonePause = time.Second
)

// clone creates the VM, or determines the result of a clone that was started
// before.
func (d *Driver) clone(ctx context.Context, h *handle) error {
	if h.CloneSent {
		done, err := d.cloneResult(ctx, h)
		if done || err != nil {
			return err
		}
	}
	for try := 1; ; try++ {
		err := d.cloneOnce(ctx, h)
		if agentlab.CodeOf(err) != agentlab.CodeBusy || try == cloneTries {
			return err
		}
		select {
		case <-time.After(clonePause * time.Duration(try)):
		case <-ctx.Done():
			return err
		}
	}
}

func (d *Driver) cloneOnce(ctx context.Context, h *handle) error {
	first := !h.CloneSent
	h.CloneSent, h.CloneAt, h.CloneTask = true, d.cfg.Now().UTC(), ""
	if err := d.save(h); err != nil {
		return err
	}
	d.at("clone about to be sent")
	spec := h.Spec
	o := pve.CloneOptions{
		NewID: h.id().VMID, Name: spec.Name, Description: description(h.id(), d.installation), Pool: d.cfg.Pool, Full: h.Full,
	}
	if h.Full {
		o.Storage = d.cfg.Storage
	}
	if spec.From != nil {
		o.Snapshot = snapshotName(spec.From.UID)
	}
	if h.Source != h.Node {
		o.Target = h.Node
	}
	task, err := d.pve.Clone(ctx, h.Source, h.Template, o)
	if err == nil {
		d.at("clone sent")
		h.CloneTask = string(task)
		if err := d.save(h); err != nil {
			return err
		}
		d.at("clone noted")
		err = d.wait(ctx, task)
	}
	return d.cloneEnded(ctx, h, first, err)
}

// cloneEnded handles the result of a clone. A clone that certainly failed has
// left nothing behind, because Proxmox frees its volumes.
func (d *Driver) cloneEnded(ctx context.Context, h *handle, first bool, err error) error {
	switch agentlab.CodeOf(err) {
	case "":
		return nil
	case agentlab.CodeUnknownOutcome:
		return err // the next call determines its result
	case agentlab.CodeExists:
		return d.afterNumberTaken(ctx, h, first, err)
	case agentlab.CodeUnsupported:
		if !h.Full && pve.NoLinkedClone.Is(err) {
			d.log.Warn("the template's storage has no linked clones: its disk is copied", "template", h.Template, "vmid", h.Spec.VMID)
			h.Full = true
			return d.cloneOnce(ctx, h)
		}
	}
	if ctx.Err() != nil {
		return err
	}
	h.CloneSent, h.CloneTask = false, ""
	serr := error(nil)
	if code := agentlab.CodeOf(err); h.Spec.From != nil && (code == agentlab.CodeUnsupported || code == agentlab.CodeConflict) {
		serr = d.forget(h) // the storage cannot copy the snapshot, or not now
	} else {
		serr = d.save(h)
	}
	if serr != nil {
		return serr
	}
	return err
}

// afterNumberTaken handles a clone whose number is taken: by another user, or by an
// earlier attempt whose answer was lost.
func (d *Driver) afterNumberTaken(ctx context.Context, h *handle, first bool, cause error) error {
	s, err := d.lookup(ctx, h.id(), h)
	switch {
	case err != nil:
		return err
	case s.owned:
		h.Adopted = h.Adopted || first // else an earlier clone of this handle made it
		_, err := d.cloneResult(ctx, h)
		return err
	case s.placeholder && !first, s.unreadable && !first:
		return agentlab.Errorf(agentlab.CodeBusy, "a clone to VMID %d is in progress: %w", h.id().VMID, cause)
	}
	if err := d.forget(h); err != nil {
		return err
	}
	return numberTaken("VMID %d was taken by another user in the meantime: %w", h.id().VMID, cause)
}

// cloneResult determines the result of a clone whose end is not known. done
// means that it succeeded. Without done and without an error it left nothing
// behind and may be sent again.
func (d *Driver) cloneResult(ctx context.Context, h *handle) (done bool, err error) {
	if h.CloneTask != "" {
		err := d.wait(ctx, pve.UPID(h.CloneTask))
		switch code := agentlab.CodeOf(err); {
		case ctx.Err() != nil:
			return false, err
		case err != nil && code != agentlab.CodeUnknownOutcome && code != agentlab.CodeNotFound:
			d.log.Info("a clone task started earlier failed", "vmid", h.Spec.VMID, "err", err)
		}
	}
	s, running, err := d.afterClone(ctx, h)
	switch {
	case err != nil:
		return false, err
	case !s.exists && !running:
		return false, nil
	case s.owned && s.cfg["lock"] != lockClone:
		h.moveTo(s.node)
		return true, nil
	case running:
		return false, agentlab.Errorf(agentlab.CodeBusy, "the clone of sandbox %d is still in progress", h.Spec.VMID)
	case s.unreadable:
		if err := d.unreadableClone(ctx, h); err != nil {
			return false, err
		}
		fallthrough
	case s.exists && !s.owned && !s.placeholder:
		if err := d.forget(h); err != nil {
			return false, err
		}
		return false, numberInUse(h.id().VMID)
	}
	// Its worker died. Its remains are removed, and it is started again.
	if err := d.removeVM(ctx, h.id(), h, s); err != nil {
		return false, err
	}
	return false, nil
}

// afterClone waits until no clone of this sandbox is running, and returns what
// exists then; running reports that ctx ended first. The list of tasks does
// not have the number of a clone's target, so every later clone of its
// template counts. For some time after it was sent, a clone may not have
// started yet.
func (d *Driver) afterClone(ctx context.Context, h *handle) (s lookupResult, running bool, err error) {
	pause := d.cfg.Poll.First
	for {
		going, err := d.cloning(ctx, h) // before the VM is read: it may end between the two calls
		if err != nil {
			return s, false, err
		}
		if s, err = d.lookup(ctx, h.id(), h); err != nil {
			return s, false, err
		}
		if s.exists && !s.unreadable && (!s.owned && !s.placeholder || s.cfg["lock"] != lockClone) {
			return s, false, nil
		}
		arriving := !s.exists && h.CloneTask == "" && d.cfg.Now().Sub(h.CloneAt) < d.cfg.Settle
		if !going && !arriving {
			return s, false, nil
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, d.cfg.Poll.Max)
		case <-ctx.Done():
			return s, true, nil
		}
	}
}

// cloning reports whether a clone of a sandbox's template is running that was
// started after the sandbox's handle was written.
func (d *Driver) cloning(ctx context.Context, h *handle) (bool, error) {
	tasks, err := d.pve.Tasks(ctx, h.Source, pve.TaskFilter{VMID: h.Template, Running: true, Type: "qmclone", Limit: 500})
	if err != nil {
		return false, err
	}
	for _, t := range tasks {
		if h.CloneTask != "" && string(t.UPID) != h.CloneTask {
			continue
		}
		if int64(t.StartTime) >= h.Created.Unix()-clockSlack {
			return true, nil
		}
	}
	return false, nil
}

// clockSlack is how far a node's clock may be behind the daemon's, in seconds.
const clockSlack = 300

// configure replaces the inherited options of a clone in one call.
func (d *Driver) configure(ctx context.Context, h *handle) error {
	if d.pve.Root() != nil {
		if err := d.writeSnippet(ctx, h); err != nil {
			return err
		}
	}
	var inherited pve.Config // nil: all that it has, because the snapshot may no longer exist
	if h.Spec.From == nil {
		t, err := d.template(ctx, h.Source, h.Template)
		if err != nil {
			return err
		}
		inherited = t.cfg
	}
	err := d.replace(ctx, h, inherited)
	for try := 1; agentlab.CodeOf(err) == agentlab.CodeBusy && try < cloneTries && ctx.Err() == nil; try++ {
		err = d.replace(ctx, h, inherited)
	}
	if err != nil || !d.firewalled(h) {
		return err
	}
	if group := h.options.FirewallGroup; group != "" {
		return d.pve.SetFirewallGroup(ctx, h.Node, h.id().VMID, group)
	}
	return d.pve.DisableFirewall(ctx, h.Node, h.id().VMID)
}

// replace changes a configuration only if it has the sandbox's mark: much time
// may have passed since the clone, and another VM may have its number. The
// node rejects the change if the configuration has changed since it was read.
func (d *Driver) replace(ctx context.Context, h *handle, inherited pve.Config) error {
	id := h.id()
	s, err := d.lookupOwned(ctx, id, h)
	if s.exists && agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return numberInUse(id.VMID)
	}
	if err != nil {
		return err
	}
	h.SMBIOS = s.cfg["smbios1"]
	if inherited == nil {
		inherited = s.cfg
	}
	h.CPU = d.cpuFor(h, s.cfg["cpu"])
	ch := changes(inherited, d.wanted(h))
	ch.Digest = s.cfg.Digest()
	d.at("about to be configured")
	return d.pve.Set(ctx, h.Node, id.VMID, ch)
}

// grow resizes the disk to the requested size.
func (d *Driver) grow(ctx context.Context, h *handle) error {
	gib := h.Spec.Resources.RootSizeGB
	if gib == 0 {
		return nil
	}
	slot, size, err := d.copiedDisk(ctx, h)
	if err != nil {
		return err
	}
	if int64(gib)<<30 <= size {
		return nil
	}
	task, err := d.pve.Resize(ctx, h.Node, h.id().VMID, slot, strconv.Itoa(gib)+"G")
	if err != nil {
		return err
	}
	return d.wait(ctx, task)
}

// control returns the guest's ControlConfig, without which the controller
// cannot connect to it.
func (d *Driver) control(h *handle) ([]byte, error) {
	key, err := link.SandboxKey(d.master, h.Spec.UID)
	if err != nil {
		return nil, err
	}
	public, _ := key.Public().(ed25519.PublicKey) // it always is
	return json.Marshal(guestapi.ControlConfig{
		VMID: h.Spec.VMID, UID: h.Spec.UID, Controller: d.Info().ControllerURL, HostKey: public,
	})
}

// writeSnippet writes the seed of a guest to the snippets storage. It is kept
// as long as the VM: every cold start reads it, and different content would
// make cloud-init initialise the guest again.
func (d *Driver) writeSnippet(ctx context.Context, h *handle) error {
	if h.Snippet == "" {
		h.Snippet = d.snippetName(h.id())
		if err := d.save(h); err != nil {
			return err
		}
	}
	d.at("snippet noted")
	ctl, err := d.control(h)
	if err != nil {
		return err
	}
	text, err := cloudinit.UserData(cloudinit.Seed{
		Hostname: h.Spec.Name, User: guestUser, SSHKeys: d.cfg.SSHKeys,
		Files: []cloudinit.File{{Path: guestapi.ControlFile, Content: ctl}},
	})
	if err != nil {
		return err
	}
	volid, err := d.pve.Root().WriteSnippet(ctx, h.Snippet, text)
	if err != nil {
		return err
	}
	if h.SnippetVolume != volid {
		h.SnippetVolume = volid
		if err := d.save(h); err != nil {
			return err
		}
	}
	d.at("snippet written")
	return nil
}
