package proxmox

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// Inspect implements backend.Driver.
func (d *Driver) Inspect(ctx context.Context, ref backend.Ref) (backend.Instance, error) {
	id, h, err := d.resolve(ctx, ref)
	switch {
	case err != nil:
		return backend.Instance{}, err
	case h == nil:
		return d.inspectLost(ctx, id)
	case ctx.Err() != nil:
		return backend.Instance{}, agentlab.Errorf(agentlab.CodeUnavailable, "sandbox %d was not inspected: %w", h.Spec.VMID, context.Cause(ctx))
	case h.incomplete():
		return partial(h), nil
	case d.cache.recentlyRunning(h.Spec.UID, d.cfg.Now()):
		return d.instance(ctx, h, backend.PowerRunning, ""), nil
	}
	st, node, err := d.status(ctx, h)
	if err != nil {
		return backend.Instance{}, err
	}
	if node != h.Node && st.Running() && !d.bridgeEnforced(node) {
		d.cache.forget(h.Spec.UID)
		return d.instance(ctx, h, backend.PowerCrashed, "the VM was moved manually to node "+node+", which does not enforce its network policy"), nil
	}
	return d.powerState(ctx, h, st), nil
}

func partial(h *handle) backend.Instance {
	in := backend.Instance{Ref: refOf(h.id()), VMID: h.Spec.VMID, Name: h.Spec.Name, Power: backend.PowerPartial, Reason: "its creation was interrupted"}
	switch {
	case h.Phase == phaseDestroying:
		in.Reason = "its destruction was interrupted"
	case h.Restoring != "":
		in.Reason = "the restore of a snapshot was interrupted"
	}
	return in
}

// inspectLost searches for a sandbox without a handle. Its number is not known:
// the mark has that of the VM.
func (d *Driver) inspectLost(ctx context.Context, id vmID) (backend.Instance, error) {
	s, err := d.lookupOwned(ctx, id, nil)
	if err != nil {
		return backend.Instance{}, err
	}
	in := backend.Instance{Ref: refOf(id), HostVM: id.VMID, Name: s.cfg["name"], Power: backend.PowerPartial, Reason: "its handle file was lost"}
	if s.cfg["lock"] == lockClone {
		return in, nil
	}
	st, err := d.pve.Status(ctx, s.node, id.VMID)
	if err != nil {
		return backend.Instance{}, err
	}
	if st.Running() {
		in.Power = backend.PowerRunning
	}
	return in, nil
}

// status returns the state of a sandbox's VM on any node. The tag in the list
// and in the state is only a part of the mark: the configuration decides.
func (d *Driver) status(ctx context.Context, h *handle) (st pve.Status, node string, err error) {
	id := h.id()
	s, err := d.lookup(ctx, id, h)
	switch {
	case err != nil:
		return st, h.Node, err
	case !s.owned:
		return st, h.Node, d.foreignError(id, h, s)
	}
	st, err = d.pve.Status(ctx, s.node, id.VMID)
	return st, s.node, err
}

// powerState compares the actual state of a VM with the requested one.
func (d *Driver) powerState(ctx context.Context, h *handle, st pve.Status) backend.Instance {
	switch {
	case st.Paused():
		return d.instance(ctx, h, backend.PowerSuspended, "")
	case st.Running():
		d.cache.markRunning(h.Spec.UID, d.cfg.Now(), false)
		return d.instance(ctx, h, backend.PowerRunning, "")
	}
	d.cache.forget(h.Spec.UID)
	if h.Power != powerOn && h.Power != powerSuspended {
		return d.instance(ctx, h, backend.PowerStopped, "")
	}
	if boot := d.cfg.BootID(); h.Boot != "" && boot != "" && boot != h.Boot {
		// Even if Proxmox stopped it by a task, because a node does that during a shutdown.
		in := d.instance(ctx, h, backend.PowerCrashed, "node "+h.Node+" was restarted")
		in.HostRestarted = true
		return in
	}
	if who := d.stoppedBy(ctx, h); who != "" {
		return d.instance(ctx, h, backend.PowerStopped, "the VM was stopped by "+who)
	}
	why := "the VM stopped unexpectedly: the guest powered itself off, or QEMU ended"
	if h.Boot == "" {
		why += ", or the node was restarted"
	}
	return d.instance(ctx, h, backend.PowerCrashed, why)
}

// instance returns a sandbox as a backend.Instance.
func (d *Driver) instance(ctx context.Context, h *handle, p backend.PowerState, reason string) backend.Instance {
	spec := h.Spec
	spec.Network = h.network()
	in := backend.Instance{Ref: refOf(h.id()), VMID: h.Spec.VMID, Name: h.Spec.Name, Power: p, Reason: reason, Spec: &spec}
	if p == backend.PowerRunning || p == backend.PowerSuspended {
		in.IP = d.address(ctx, h)
	}
	return in
}

// powerTasks are the tasks with which users stop VMs.
var powerTasks = []string{"qmstop", "qmshutdown", "qmsuspend"}

// stoppedBy returns the user who stopped a VM through Proxmox after its last
// start, other than this driver, which would have recorded it; "" if none is
// known. It finds only tasks that the token can read.
func (d *Driver) stoppedBy(ctx context.Context, h *handle) string {
	tasks, err := d.pve.Tasks(ctx, h.Node, pve.TaskFilter{VMID: h.id().VMID, Limit: 10})
	if err != nil {
		return ""
	}
	for _, t := range tasks { // the newest first
		switch {
		case t.Type == "qmstart", t.Type == "qmrollback":
			return ""
		case slices.Contains(powerTasks, t.Type) && (t.OK() || t.Status == "OK"):
			return clip(t.User)
		}
	}
	return ""
}

// List implements backend.Driver.
func (d *Driver) List(ctx context.Context) ([]backend.Instance, error) {
	vms, err := d.listed(ctx)
	if err != nil {
		return nil, err
	}
	all, err := d.handles() // after the VMs were listed, so that a VM created in the meantime does not count as lost
	if err != nil {
		return nil, err
	}
	if len(vms) == len(d.cfg.Nodes) {
		d.sweep(ctx, vms)
	}
	out, err := d.withoutHandle(ctx, vms, all)
	if err != nil {
		return nil, err
	}
	for _, h := range all {
		in, ok, err := d.fromList(ctx, h, vms)
		if err != nil {
			return nil, err
		}
		if ok {
			out = append(out, in)
		}
	}
	return out, nil
}

// fromList returns the state of a sandbox from the list of its node. If the
// list does not match the expected state, the VM is read separately.
func (d *Driver) fromList(ctx context.Context, h *handle, vms map[string][]pve.VM) (backend.Instance, bool, error) {
	id := h.id()
	if h.incomplete() {
		return partial(h), true, nil
	}
	if _, asked := vms[h.Node]; !asked {
		if _, err := d.node(h.Node); err == nil {
			in := partial(h)
			in.Reason = "node " + h.Node + " is offline, so the state of the sandbox is unknown"
			return in, true, nil
		}
	}
	for _, vm := range vms[h.Node] {
		if int(vm.VMID) != id.VMID || taggedUID(string(vm.TagList)) != id.UID {
			continue
		}
		switch {
		case vm.Status == "running" && h.Power == powerSuspended: // or a user has resumed it: the list does not distinguish the two
		case vm.Status == "running":
			return d.instance(ctx, h, backend.PowerRunning, ""), true, nil
		case h.Power != powerOn && h.Power != powerSuspended:
			return d.instance(ctx, h, backend.PowerStopped, ""), true, nil
		}
	}
	d.cache.forget(id.UID)
	in, err := d.Inspect(ctx, h.Spec.Ref())
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		return in, false, nil
	case errors.Is(err, errUnreadable), errors.Is(err, errUnmarked): // the other sandboxes are still listed
		in = partial(h)
		in.Reason = err.Error()
		return in, true, nil
	}
	return in, err == nil, err
}

// withoutHandle returns the VMs of a list that have AgentLab's mark and no handle.
func (d *Driver) withoutHandle(ctx context.Context, vms map[string][]pve.VM, all []*handle) (out []backend.Instance, err error) {
	known := map[int]bool{}
	for _, h := range all {
		known[h.id().VMID] = true
	}
	for _, n := range d.cfg.Nodes {
		for _, vm := range vms[n.Name] {
			if known[int(vm.VMID)] || bool(vm.Template) || !d.inRange(int(vm.VMID)) {
				continue
			}
			in, ok, err := d.hasLostHandle(ctx, n.Name, vm)
			if err != nil {
				return nil, err
			}
			if ok {
				out = append(out, in)
			}
		}
	}
	return out, nil
}

// hasLostHandle reports whether a VM in the range without a handle has AgentLab's
// mark. The result is cached as long as the VM's entry in the list does not
// change.
func (d *Driver) hasLostHandle(ctx context.Context, node string, vm pve.VM) (backend.Instance, bool, error) {
	look := strings.Join([]string{node, strconv.Itoa(int(vm.VMID)), string(vm.Name), string(vm.TagList), vm.Lock}, "\n")
	uid, known := d.inventory.cachedMark(look)
	if !known {
		cfg, err := d.pve.Config(ctx, node, int(vm.VMID))
		switch agentlab.CodeOf(err) {
		case "":
			if m := readMarks(cfg); uidForm.MatchString(m.uid) && d.ours(cfg, vmID{VMID: int(vm.VMID), UID: m.uid}, string(vm.Name)) {
				uid = m.uid
			}
			d.inventory.cacheMark(look, uid)
		case agentlab.CodeNotFound, agentlab.CodeDenied:
			return backend.Instance{}, false, nil
		default:
			return backend.Instance{}, false, err
		}
	}
	if uid == "" {
		return backend.Instance{}, false, nil
	}
	if h, err := d.readHandle(backend.Ref{UID: uid}); h != nil || err != nil { // created just now
		if h != nil && !known && h.id().VMID != int(vm.VMID) {
			d.log.Warn("two VMs have the tag of one sandbox; the second one is ignored", "vmid", h.Spec.VMID, "number", h.id().VMID, "other", int(vm.VMID))
		}
		return backend.Instance{}, false, err
	}
	in := backend.Instance{Ref: refOf(vmID{VMID: int(vm.VMID), UID: uid}), HostVM: int(vm.VMID), Name: string(vm.Name), Power: backend.PowerPartial, Reason: "its handle file was lost"}
	if vm.Status == "running" {
		in.Power, in.Reason = backend.PowerRunning, ""
	}
	return in, true, nil
}

// sweepEvery is the interval of the removal of snippets without a sandbox.
const sweepEvery = 10 * time.Minute

// sweep removes snippets of this installation without a sandbox. A snippet's
// name is stored in the handle before the snippet is written, and the snippet
// is deleted before the handle, so the handles are read after the names.
func (d *Driver) sweep(ctx context.Context, vms map[string][]pve.VM) {
	root := d.pve.Root()
	if root == nil || !d.inventory.due(d.cfg.Now(), sweepEvery) {
		return
	}
	names, err := root.Snippets(ctx)
	if err != nil {
		d.log.Warn("cannot list snippets", "err", err)
		return
	}
	all, err := d.handles()
	if err != nil {
		return
	}
	used := map[string]bool{}
	for _, h := range all {
		used[h.Snippet] = true
	}
	numbers := map[int]bool{}
	for _, list := range vms {
		for _, vm := range list {
			numbers[int(vm.VMID)] = true // its VM may read it at its next start
		}
	}
	for _, name := range names {
		m := snippetForm.FindStringSubmatch(name)
		if m == nil || m[1] != d.installation || used[name] {
			continue
		}
		if vmid, err := strconv.Atoi(m[2]); err != nil || numbers[vmid] {
			continue
		}
		d.log.Warn("removing the snippet of a deleted sandbox", "snippet", name)
		if err := root.RemoveSnippet(ctx, name); err != nil {
			d.log.Warn("cannot remove a snippet", "snippet", name, "err", err)
		}
	}
}
