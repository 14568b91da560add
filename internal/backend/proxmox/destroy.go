package proxmox

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// Destroy implements backend.Driver. It goes through all handles of the
// sandbox.
func (d *Driver) Destroy(ctx context.Context, ref backend.Ref) error {
	unlock, err := d.lock(ctx, ref.UID)
	if err != nil {
		return err
	}
	defer unlock()
	all, err := d.handlesOf(ref.UID)
	for _, h := range all {
		if err := d.destroy(ctx, h.id(), h); err != nil {
			return err
		}
	}
	if err != nil || len(all) > 0 {
		return err
	}
	id, h, err := d.resolve(ctx, ref)
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		return d.removeSnippets(ctx, id, nil)
	case err != nil:
		return err
	}
	return d.destroy(ctx, id, h)
}

// destroy removes VM, volumes, snippet, network and, last, the handle. It
// changes only objects with AgentLab's mark, and nothing if another VM has the
// number.
func (d *Driver) destroy(ctx context.Context, id vmID, h *handle) error {
	if h != nil && h.Phase != phaseDestroying {
		h.Made, h.Phase = h.existed(), phaseDestroying
		if err := d.save(h); err != nil {
			return err
		}
		d.at("end noted")
	}
	if h != nil {
		if err := d.settle(ctx, h); err != nil {
			return err
		}
	}
	foreign, err := d.ensureDeleted(ctx, id, h)
	if err != nil {
		return err
	}
	d.at("VM gone")
	d.cache.forget(id.UID)
	if h == nil {
		return d.removeSnippets(ctx, id, nil)
	}
	if foreign {
		d.log.Warn("the VMID now belongs to an untagged VM; not deleting it", "vmid", id.VMID, "uid", id.UID)
	} else if err := d.removeVolumes(ctx, h); err != nil {
		return err
	}
	d.at("volumes gone")
	if err := d.removeSnippets(ctx, id, h); err != nil {
		return err
	}
	d.at("snippet gone")
	if err := d.dropNetwork(ctx, h); err != nil {
		return err
	}
	d.at("network gone")
	return d.forget(h)
}

// dropNetwork removes a sandbox from the network of every node: a user may
// have migrated it, and its rules were left behind. An unreachable node other
// than the sandbox's own does not block the destruction: the next connection
// to it restores the guests on its bridge and so removes all others.
func (d *Driver) dropNetwork(ctx context.Context, h *handle) error {
	for _, n := range d.cfg.Nodes {
		if n.Host == nil {
			continue
		}
		err := n.Host.Drop(ctx, h.id())
		if err != nil && (n.Name == h.Node || ctx.Err() != nil || agentlab.CodeOf(err) != agentlab.CodeUnavailable) {
			return err
		}
		if err != nil {
			d.log.Warn("cannot remove the network rules of a deleted sandbox on a node", "node", n.Name, "vmid", h.Spec.VMID, "err", err)
		}
	}
	return nil
}

// ensureDeleted ensures that the VM is deleted and that no running task can create it
// again. foreign reports that another VM has its number.
func (d *Driver) ensureDeleted(ctx context.Context, id vmID, h *handle) (foreign bool, err error) {
	var s lookupResult
	if h != nil && h.CloneSent {
		s, err = d.endClone(ctx, h)
	} else {
		s, err = d.lookup(ctx, id, h)
	}
	switch {
	case err != nil:
		return false, err
	case !s.exists:
		return false, nil
	case s.owned:
	case s.unreadable && h != nil && h.CloneSent:
		return true, d.unreadableClone(ctx, h)
	case s.unreadable && h != nil && h.existed():
		return true, d.unreadableVM(ctx, h, s.node)
	case s.placeholder && h != nil && h.CloneSent:
		mine, err := d.ownsPlaceholder(ctx, h)
		if err != nil || !mine {
			return !mine, err
		}
	case isDestroyMarker(s.cfg) && h != nil && h.DestroySent:
	case s.traces:
		return false, d.unmarkedError(id, s.node)
	case h == nil && (isDestroyMarker(s.cfg) || s.placeholder):
		return true, nil // its owner is not known
	default:
		return true, nil
	}
	return false, d.removeVM(ctx, id, h, s)
}

// endClone stops a clone that may still be running, and returns what exists
// then.
func (d *Driver) endClone(ctx context.Context, h *handle) (lookupResult, error) {
	if h.CloneTask != "" {
		if err := d.pve.StopTask(ctx, pve.UPID(h.CloneTask)); err != nil {
			d.log.Info("cannot stop a clone task; waiting until it ends", "vmid", h.Spec.VMID, "err", err)
		}
	}
	s, running, err := d.afterClone(ctx, h)
	if err == nil && running {
		return s, agentlab.Errorf(agentlab.CodeBusy, "the clone of sandbox %d is still in progress", h.Spec.VMID)
	}
	return s, err
}

// isDestroyMarker reports whether a configuration is the empty one that exists
// between the deletion of a VM's volumes and of its configuration.
func isDestroyMarker(cfg pve.Config) bool {
	for key := range cfg {
		if key != "lock" && key != "digest" {
			return false
		}
	}
	return cfg["lock"] == "destroyed"
}

const destroyTries = 4

// removeVM destroys a VM that was proved to be the sandbox's. An access error may
// also mean that the VM no longer exists, because the destruction that an earlier
// process started has ended.
func (d *Driver) removeVM(ctx context.Context, id vmID, h *handle, s lookupResult) error {
	err := d.removeFound(ctx, id, h, s)
	if agentlab.CodeOf(err) == agentlab.CodeDenied {
		if now, serr := d.lookup(ctx, id, h); serr == nil && !now.exists {
			return nil
		}
	}
	return err
}

func (d *Driver) removeFound(ctx context.Context, id vmID, h *handle, s lookupResult) error {
	if err := d.checkNumber(id.VMID); err != nil {
		return err
	}
	if lock := s.cfg["lock"]; lock != "" && lock != lockSuspended { // Proxmox destroys a VM with this lock
		if err := d.unlock(ctx, s.node, id.VMID, lock); err != nil {
			return err
		}
	}
	if h != nil {
		h.Volumes = slices.Compact(slices.Sorted(slices.Values(append(h.Volumes, volumesOf(s.cfg, id.VMID)...))))
		h.moveTo(s.node)
		h.DestroySent = true
		if err := d.save(h); err != nil {
			return err
		}
	}
	old := false // the configuration may have changed since
	if h == nil || (h.Power != "" && h.Power != powerOff) {
		if err := d.cutPower(ctx, s.node, id.VMID); err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
			return err
		}
		old = true
	}
	d.at("destroy about to be sent")
	protected := s.cfg["protection"] == "1" // inherited from a protected template
	for try := 1; ; try++ {
		if old {
			if gone, err := d.wasReplaced(ctx, id, h, s); gone || err != nil {
				return err
			}
		}
		old = true
		if protected {
			if err := d.pve.Set(ctx, s.node, id.VMID, pve.Changes{Set: map[string]string{"protection": "0"}}); err != nil {
				return err
			}
		}
		err := d.destroyVM(ctx, id, h, s.node)
		switch code := agentlab.CodeOf(err); {
		case err == nil:
			d.at("destroyed")
			return nil
		case ctx.Err() != nil || try == destroyTries:
			return err
		case code == agentlab.CodeNotFound: // on this node: it may have been migrated
		case pve.VMRuns.Is(err): // started by a user
			if err := d.cutPower(ctx, s.node, id.VMID); err != nil {
				return err
			}
		case pve.VMProtected.Is(err) && !protected:
			protected = true
		case code == agentlab.CodeBusy:
		default:
			return err
		}
	}
}

// wasReplaced checks again, after a pause, whether the VM that was proved to be
// the sandbox's still exists: it may be gone, or another VM may have its
// number.
func (d *Driver) wasReplaced(ctx context.Context, id vmID, h *handle, was lookupResult) (gone bool, err error) {
	now, err := d.lookup(ctx, id, h)
	switch {
	case err != nil:
		return false, err
	case !now.exists:
		return true, nil
	case now.unreadable:
		return false, d.unreadableError(id, now.node)
	case now.traces:
		return false, d.unmarkedError(id, now.node)
	case now.owned && now.node != was.node:
		return false, agentlab.Errorf(agentlab.CodeBusy, "VM %d was moved from node %s to %s in the meantime", id.VMID, was.node, now.node)
	case now.owned == was.owned && now.placeholder == was.placeholder, isDestroyMarker(now.cfg) && h != nil:
		return false, nil
	}
	return true, nil
}

func (d *Driver) destroyVM(ctx context.Context, id vmID, h *handle, node string) error {
	task, err := d.pve.Destroy(ctx, node, id.VMID, false)
	if err != nil {
		return err
	}
	d.at("destroy sent")
	if h != nil {
		h.DestroyTask = string(task)
		if err := d.save(h); err != nil {
			return err
		}
	}
	return d.wait(ctx, task)
}

// ownsPlaceholder reports whether the empty configuration of an unfinished
// clone, which has no mark, belongs to a sandbox whose clone was sent: a later
// clone of its template, not of another sandbox, died. It must be called when
// no clone is running.
func (d *Driver) ownsPlaceholder(ctx context.Context, h *handle) (bool, error) {
	tasks, err := d.pve.Tasks(ctx, h.Source, pve.TaskFilter{VMID: h.Template, Type: "qmclone", Limit: 500})
	if err != nil {
		return false, err
	}
	all, err := d.handles()
	if err != nil {
		return false, err
	}
	for _, t := range tasks {
		upid := string(t.UPID)
		switch {
		case h.CloneTask != "" && upid != h.CloneTask, int64(t.StartTime) < h.CloneAt.Unix()-clockSlack:
		case t.OK() || t.Status == "OK" || strings.HasPrefix(t.Status, "WARNINGS") || strings.Contains(t.Status, "already exists"):
		case slices.ContainsFunc(all, func(o *handle) bool { return o.Spec.UID != h.Spec.UID && o.CloneTask == upid }):
		default:
			return true, nil
		}
	}
	return false, nil
}

// unreadableClone handles an object with a sandbox's number that the token
// cannot read, after its clone was sent and no clone is running. If AgentLab's
// clone died, it may be its remains, because a clone is added to the pool only
// at its end.
func (d *Driver) unreadableClone(ctx context.Context, h *handle) error {
	if ended, err := d.taskSucceeded(ctx, h.CloneTask); err != nil || ended {
		return cmp.Or(err, d.unreadableError(h.id(), h.Node))
	}
	died, err := d.ownsPlaceholder(ctx, h)
	if err != nil || !died {
		return err
	}
	return agentlab.Errorf(agentlab.CodeDenied, "the clone of sandbox %d was killed, and the token has no access to the incomplete VM", h.Spec.VMID).
		WithHint("on node %[1]s run qm config %[2]d; if the VM is locked (clone): qm unlock %[2]d && qm destroy %[2]d", h.Node, h.id().VMID)
}

// unreadableVM handles an object with the number of a created sandbox that the
// token cannot read. It may be the sandbox, which a user removed from the pool.
// Only after its destruction has ended is it certainly another VM.
func (d *Driver) unreadableVM(ctx context.Context, h *handle, node string) error {
	if ended, err := d.taskSucceeded(ctx, h.DestroyTask); err != nil || ended {
		return err
	}
	return d.unreadableError(h.id(), node)
}

// taskSucceeded reports whether a task has ended successfully. The result of a
// task that the node has deleted is not known.
func (d *Driver) taskSucceeded(ctx context.Context, upid string) (bool, error) {
	if upid == "" {
		return false, nil
	}
	t, err := d.pve.TaskStatus(ctx, pve.UPID(upid))
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return false, nil
	}
	return err == nil && !t.Running() && t.OK(), err
}

// unlock removes a lock that a dead process has left. While a task works on
// the VM, the lock is in use. A backup of several VMs is not a task of any of
// them, so it cannot be known whether one is running.
func (d *Driver) unlock(ctx context.Context, node string, vmid int, lock string) error {
	if lock == "backup" {
		return agentlab.Errorf(agentlab.CodeBusy, "VM %d is locked (backup)", vmid).
			WithHint("try again when the backup has ended; if no backup is running, run on node %s: qm unlock %d", node, vmid)
	}
	tasks, err := d.pve.Tasks(ctx, node, pve.TaskFilter{VMID: vmid, Running: true, Limit: 50})
	if err != nil {
		return err
	}
	if len(tasks) > 0 {
		return agentlab.Errorf(agentlab.CodeBusy, "VM %d is locked (%s) by task %s", vmid, clip(lock), tasks[0].Type)
	}
	root := d.pve.Root()
	if root == nil {
		return agentlab.Errorf(agentlab.CodeDenied, "VM %d is locked (%s) by a task that was killed, and the API cannot unlock it", vmid, clip(lock)).
			WithHint("run on node %s: qm unlock %d; then try again", node, vmid)
	}
	d.log.Warn("removing the lock of a task that was killed", "vmid", vmid, "lock", lock)
	return root.Unlock(ctx, vmid)
}

// removeVolumes ensures that all volumes of a sandbox are deleted: Proxmox
// reports success for the destruction of a VM even if it could not free a
// volume. The task log has such volumes. The storages are listed too, although
// a token may not see volumes of a deleted VM. Nothing is deleted while any VM
// has the number.
func (d *Driver) removeVolumes(ctx context.Context, h *handle) error {
	left, err := d.notRemoved(ctx, h)
	if err != nil {
		return err
	}
	storages := slices.Clone(h.Storages)
	for _, v := range h.Volumes {
		storage, _, _ := strings.Cut(v, ":")
		storages = append(storages, storage)
	}
	slices.Sort(storages)
	for _, storage := range slices.Compact(storages) {
		list, err := d.pve.Content(ctx, h.Node, storage, "images", h.id().VMID)
		if err != nil {
			return err
		}
		for _, v := range list {
			if slices.Contains(h.Storages, storage) || hasVolume(h.Volumes, v.VolID) || h.hasMemory(v.VolID) { // otherwise it existed before the sandbox
				left = append(left, v.VolID)
			}
		}
	}
	slices.Sort(left)
	for _, volid := range slices.Compact(left) {
		if volumeOwner(volid) != h.id().VMID {
			continue
		}
		if err := d.removeVolume(ctx, h, volid); err != nil {
			return err
		}
	}
	return nil
}

func hasVolume(list []string, volid string) bool {
	return slices.ContainsFunc(list, func(own string) bool { return lastComponent(own) == lastComponent(volid) })
}

// notRemoved returns the volumes that the destruction of the VM has left.
func (d *Driver) notRemoved(ctx context.Context, h *handle) ([]string, error) {
	task := pve.UPID(h.DestroyTask)
	if task == "" {
		if !h.DestroySent {
			return nil, nil
		}
		tasks, err := d.pve.Tasks(ctx, h.Node, pve.TaskFilter{VMID: h.id().VMID, Type: "qmdestroy", Limit: 1})
		if err != nil || len(tasks) == 0 {
			return nil, err
		}
		task = tasks[0].UPID
	}
	left, err := d.pve.NotRemoved(ctx, task)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return nil, nil // the node has deleted the task
	}
	var own []string
	for _, volid := range left {
		if hasVolume(h.Volumes, volid) || h.hasMemory(volid) {
			own = append(own, volid)
		}
	}
	return own, err
}

func (d *Driver) removeVolume(ctx context.Context, h *handle, volid string) error {
	free, err := d.pve.Free(ctx, h.id().VMID)
	if err != nil {
		return err
	}
	if !free {
		return nil // another VM has the number and the volume now
	}
	d.log.Warn("deleting a leftover volume of a destroyed sandbox", "vmid", h.Spec.VMID, "volume", volid)
	err = d.task(ctx, func() (pve.UPID, error) { return d.pve.DeleteContent(ctx, h.Node, volid) })
	if agentlab.CodeOf(err) == agentlab.CodeDenied {
		storage, _, _ := strings.Cut(volid, ":")
		return agentlab.Errorf(agentlab.CodeDenied, "no permission to delete leftover volume %s of sandbox %d: %w", clip(volid), h.Spec.VMID, err).
			WithHint("run on node %s: pvesm free %s; or grant the token Datastore.Allocate on /storage/%s", h.Node, volid, storage)
	}
	return err
}

// removeSnippets removes the seed of a sandbox, even if its name was lost with
// the handle.
func (d *Driver) removeSnippets(ctx context.Context, id vmID, h *handle) error {
	root := d.pve.Root()
	if root == nil {
		return nil
	}
	if h != nil && !h.Adopted {
		if h.Snippet == "" {
			return nil
		}
		return root.RemoveSnippet(ctx, h.Snippet)
	}
	names, err := root.Snippets(ctx)
	if err != nil {
		return err
	}
	all, err := d.handles()
	if err != nil {
		return err
	}
	for _, name := range names {
		used := slices.ContainsFunc(all, func(o *handle) bool { return o.Snippet == name && o.Spec.UID != id.UID })
		m := snippetForm.FindStringSubmatch(name)
		if used || m == nil || m[1] != d.installation || !strings.HasPrefix(id.UID, m[3]) {
			continue
		}
		if err := root.RemoveSnippet(ctx, name); err != nil {
			return err
		}
	}
	return nil
}
