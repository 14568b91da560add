package proxmox

import (
	"context"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// snapshotPlacement returns the placement of a sandbox whose disk is a copy of a
// snapshot's. The copy is on the node of the VM that has the snapshot: with that
// VM in place of the template, Create does the rest.
func (d *Driver) snapshotPlacement(ctx context.Context, spec backend.Spec) (placement, savedSnapshot, error) {
	fail := func(err error) (placement, savedSnapshot, error) { return placement{}, savedSnapshot{}, err }
	if err := validUID(spec.From.UID); err != nil {
		return fail(err)
	}
	h, _, err := d.createdVM(ctx, spec.From.Of)
	if err != nil {
		return fail(err)
	}
	found, _, err := d.wholeSnapshot(ctx, h, spec.From.UID)
	if err != nil {
		return fail(err)
	}
	e, there := h.entry(spec.From.UID)
	if !there {
		return fail(agentlab.Errorf(agentlab.CodeNotFound, "the handle file of sandbox %d does not have snapshot %s", h.Spec.VMID, spec.From.UID))
	}
	if err := spec.CheckFrom(e.Spec); err != nil {
		return fail(err)
	}
	n, err := d.node(h.Node)
	if err != nil {
		return fail(err)
	}
	checks := d.checkNode(ctx, n, nodeFindingsAge)
	if i := slices.IndexFunc(checks, isError); i >= 0 {
		return fail(agentlab.Errorf(agentlab.CodeUnavailable, "node %s, which has the snapshot, cannot run the sandbox: %s", n.Name, checks[i].Detail).
			WithHint("%s", checks[i].Remedy))
	}
	t := template{vmid: h.id().VMID, node: h.Node}
	if t.cfg, err = d.pve.SnapshotConfig(ctx, h.Node, t.vmid, found.Name); err != nil {
		return fail(err)
	}
	var ok bool
	if t.disk, ok = bootDisk(t.cfg, t.vmid); !ok {
		return fail(agentlab.Errorf(agentlab.CodeDenied, "the snapshot of VM %d does not have exactly one disk of its own", t.vmid).
			WithHint("the VM was changed manually"))
	}
	return placement{template: t, target: h.Node}, e, nil
}

// copiedDisk returns the slot of a new sandbox's disk, and its size before it
// grows.
func (d *Driver) copiedDisk(ctx context.Context, h *handle) (slot string, size int64, err error) {
	if h.Spec.From == nil {
		t, err := d.template(ctx, h.Source, h.Template)
		return t.disk, driveSize(t.cfg[t.disk]), err
	}
	s, err := d.lookupOwned(ctx, h.id(), h)
	if err != nil {
		return "", 0, err
	}
	slot, ok := bootDisk(s.cfg, h.id().VMID)
	if !ok {
		return "", 0, agentlab.Errorf(agentlab.CodeInternal, "the copy of a snapshot, VM %d, does not have exactly one disk", h.id().VMID)
	}
	return slot, driveSize(s.cfg[slot]), nil
}

// takeSeed records whose ControlConfig is on a disk that is a snapshot's. With
// Root, cloud-init replaces it by that of the sandbox.
func (d *Driver) takeSeed(h *handle, of savedSnapshot) {
	if d.pve.Root() != nil {
		return
	}
	h.Seeded, h.ControlUID = of.Seeded, ""
	if of.Seeded && of.ControlUID != h.Spec.UID {
		h.ControlUID = of.ControlUID
	}
}
