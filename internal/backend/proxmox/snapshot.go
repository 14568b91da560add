package proxmox

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// A snapshot of a sandbox is a snapshot of its VM with AgentLab's mark in the
// description. Proxmox deletes it with the VM. The handle has an entry from
// before the snapshot is saved until it is deleted, so a list asks only about
// VMs that have some.

// savedSnapshot is what a handle has about a snapshot.
type savedSnapshot struct {
	UID  string       `json:"uid"`
	Spec backend.Spec `json:"spec"` // of the sandbox when it was saved
	// Seeded and ControlUID are about the disk of the snapshot.
	Seeded     bool   `json:"seeded,omitempty"`
	ControlUID string `json:"control_uid,omitempty"`
}

// snapshotChange is a call that saves, deletes or restores a snapshot.
type snapshotChange struct {
	At   time.Time `json:"at"`
	Task string    `json:"task,omitempty"` // its UPID, once known
}

// snapshotName returns the name of a snapshot in Proxmox. It begins with a
// letter and has at most 40 characters.
func snapshotName(uid string) string { return tagUID + uid }

// snapshotMark returns the description of a snapshot.
func (d *Driver) snapshotMark(uid string, id vmID) string {
	return "Snapshot of AgentLab.\nagentlab-snapshot: " + uid + "\n" + markLines(id, d.installation)
}

// ourSnapshot reports whether a snapshot of a sandbox's VM is AgentLab's.
func (d *Driver) ourSnapshot(s pve.Snapshot, id vmID) (uid string, ours bool) {
	uid, ours = strings.CutPrefix(s.Name, tagUID)
	return uid, ours && validUID(uid) == nil && strings.TrimSpace(string(s.Description)) == strings.TrimSpace(d.snapshotMark(uid, id))
}

// findSnapshot returns a snapshot of a sandbox, nil if there is none. all are
// those of its VM.
func (d *Driver) findSnapshot(ctx context.Context, node string, id vmID, uid string) (found *pve.Snapshot, all []pve.Snapshot, err error) {
	all, err = d.pve.Snapshots(ctx, node, id.VMID)
	if err != nil {
		return nil, nil, err
	}
	i := slices.IndexFunc(all, func(s pve.Snapshot) bool { return s.Name == snapshotName(uid) })
	if i < 0 {
		return nil, all, nil
	}
	if _, ours := d.ourSnapshot(all[i], id); !ours {
		return nil, all, agentlab.Errorf(agentlab.CodeExists, "VM %d has a snapshot %s that is not AgentLab's", id.VMID, all[i].Name).
			WithHint("if the snapshot is not needed, run on node %s: qm delsnapshot %d %s", node, id.VMID, all[i].Name)
	}
	return &all[i], all, nil
}

// entry returns what the handle has about a snapshot.
func (h *handle) entry(uid string) (savedSnapshot, bool) {
	i := slices.IndexFunc(h.Snapshots, func(s savedSnapshot) bool { return s.UID == uid })
	if i < 0 {
		return savedSnapshot{}, false
	}
	return h.Snapshots[i], true
}

// dropEntry removes the entry of a snapshot that does not exist.
func (d *Driver) dropEntry(h *handle, uid string) error {
	if _, there := h.entry(uid); !there {
		return nil
	}
	h.Snapshots = slices.DeleteFunc(h.Snapshots, func(s savedSnapshot) bool { return s.UID == uid })
	return d.save(h)
}

// hasMemory reports whether a volume is the memory of one of the sandbox's
// snapshots.
func (h *handle) hasMemory(volid string) bool {
	name := strings.TrimSuffix(lastComponent(volid), ".raw")
	return slices.ContainsFunc(h.Snapshots, func(s savedSnapshot) bool { return name == memoryVolume(h.id().VMID, s.UID) })
}

// memoryVolume returns the name that Proxmox gives the memory of a snapshot.
func memoryVolume(vmid int, uid string) string {
	return "vm-" + strconv.Itoa(vmid) + "-state-" + snapshotName(uid)
}

// SaveSnapshot implements backend.Snapshots.
func (d *Driver) SaveSnapshot(ctx context.Context, ref backend.Ref, uid string) (backend.Snapshot, error) {
	if err := validUID(uid); err != nil {
		return backend.Snapshot{}, err
	}
	unlock, err := d.lock(ctx, ref.UID)
	if err != nil {
		return backend.Snapshot{}, err
	}
	defer unlock()
	h, s, err := d.ownedVM(ctx, ref)
	if err == nil {
		err = d.notAnothers(ref, uid)
	}
	if err == nil {
		err = d.noVolumeIn(h)
	}
	if err == nil && h.Change != nil {
		if err = d.settle(ctx, h); err == nil {
			s, err = d.lookupOwned(ctx, h.id(), h)
		}
	}
	if err != nil {
		return backend.Snapshot{}, err
	}
	found, _, err := d.findSnapshot(ctx, h.Node, h.id(), uid)
	if err != nil {
		return backend.Snapshot{}, err
	}
	if found != nil && found.State == "" {
		return d.snapshot(h, *found), nil
	}
	if err := d.breakLock(ctx, h, s); err != nil {
		return backend.Snapshot{}, err
	}
	if found != nil {
		if err := d.removeSnapshot(ctx, h.Node, h.id(), h, *found); err != nil {
			return backend.Snapshot{}, err
		}
	}
	// A disk that was attached manually would be saved and restored too.
	if err := d.auditAll(h, s, holder{}); err != nil {
		return backend.Snapshot{}, err
	}
	if err := d.saveNew(ctx, h, uid); err != nil {
		return backend.Snapshot{}, err
	}
	found, _, err = d.findSnapshot(ctx, h.Node, h.id(), uid)
	if err == nil && (found == nil || found.State != "") {
		err = agentlab.Errorf(agentlab.CodeUnavailable, "the snapshot of VM %d was deleted while it was saved", h.id().VMID)
	}
	if err != nil {
		return backend.Snapshot{}, err
	}
	return d.snapshot(h, *found), nil
}

// notAnothers returns an error if a snapshot is one of another sandbox.
func (d *Driver) notAnothers(ref backend.Ref, uid string) error {
	all, err := d.handles()
	if err != nil {
		return err
	}
	for _, h := range all {
		if _, there := h.entry(uid); there && h.Spec.UID != ref.UID {
			return agentlab.Errorf(agentlab.CodeExists, "snapshot %s is one of sandbox %d", uid, h.Spec.VMID)
		}
	}
	return nil
}

// saveNew saves a snapshot that does not exist. If Proxmox was killed at the
// right time before, a volume for its memory exists that no configuration has.
func (d *Driver) saveNew(ctx context.Context, h *handle, uid string) error {
	spec := h.Spec
	spec.Network = h.network()
	h.Snapshots = append(slices.DeleteFunc(h.Snapshots, func(s savedSnapshot) bool { return s.UID == uid }), savedSnapshot{
		UID: uid, Spec: spec, Seeded: h.Seeded || h.Snippet != "", ControlUID: cmp.Or(h.ControlUID, h.Spec.UID),
	})
	save := func() error {
		return d.change(ctx, h, func() (pve.UPID, error) {
			return d.pve.Save(ctx, h.Node, h.id().VMID, snapshotName(uid), d.snapshotMark(uid, h.id()), true)
		})
	}
	err := save()
	if agentlab.CodeOf(err) == agentlab.CodeExists {
		if rerr := d.removeMemory(ctx, h, uid); rerr != nil {
			return rerr
		}
		err = save()
	}
	if err == nil || ctx.Err() != nil || agentlab.CodeOf(err) == agentlab.CodeUnknownOutcome {
		return err
	}
	if found, _, ferr := d.findSnapshot(ctx, h.Node, h.id(), uid); ferr == nil && found == nil {
		if derr := d.dropEntry(h, uid); derr != nil {
			return derr
		}
	}
	return err
}

// removeMemory deletes the volume for the memory of a snapshot that does not
// exist.
func (d *Driver) removeMemory(ctx context.Context, h *handle, uid string) error {
	s, err := d.lookupOwned(ctx, h.id(), h)
	if err != nil {
		return err
	}
	for _, disk := range volumesOf(s.cfg, h.id().VMID) {
		storage, _, _ := strings.Cut(disk, ":")
		list, err := d.pve.Content(ctx, h.Node, storage, "images", h.id().VMID)
		if err != nil {
			return err
		}
		for _, v := range list {
			if strings.TrimSuffix(lastComponent(v.VolID), ".raw") != memoryVolume(h.id().VMID, uid) {
				continue
			}
			err := d.task(ctx, func() (pve.UPID, error) { return d.pve.DeleteContent(ctx, h.Node, v.VolID) })
			if agentlab.CodeOf(err) == agentlab.CodeDenied {
				return agentlab.Errorf(agentlab.CodeDenied, "the memory %s of an interrupted snapshot cannot be deleted: %w", clip(v.VolID), err).
					WithHint("run on node %s: pvesm free %s", h.Node, v.VolID)
			}
			return err
		}
	}
	return nil
}

// change records a call that changes the snapshots of a VM, sends it and waits
// for the end of its task.
func (d *Driver) change(ctx context.Context, h *handle, begin func() (pve.UPID, error)) error {
	return d.changeNoted(ctx, &h.Change, func() error { return d.save(h) }, begin)
}

// changeNoted is change for any record: note is its field, and save writes it.
func (d *Driver) changeNoted(ctx context.Context, note **snapshotChange, save func() error, begin func() (pve.UPID, error)) error {
	*note = &snapshotChange{At: d.cfg.Now().UTC()}
	if err := save(); err != nil {
		return err
	}
	d.at("snapshot change about to be sent")
	task, err := begin()
	if err == nil {
		d.at("snapshot change sent")
		(*note).Task = string(task)
		if err := save(); err != nil {
			return err
		}
		d.at("snapshot change noted")
		err = d.wait(ctx, task)
	}
	if ctx.Err() != nil || agentlab.CodeOf(err) == agentlab.CodeUnknownOutcome {
		return err // the next call determines its result
	}
	*note = nil
	if serr := save(); serr != nil {
		return serr
	}
	return err
}

// snapshotTasks are the types of tasks that change snapshots.
var snapshotTasks = []string{"qmsnapshot", "qmdelsnapshot", "qmrollback"}

// settle waits until no change of snapshots that this driver sent is running.
// For some time after it was sent, it may not have started yet.
func (d *Driver) settle(ctx context.Context, h *handle) error {
	return d.settleNoted(ctx, h.Node, h.id().VMID, &h.Change, snapshotTasks, func() error { return d.save(h) })
}

// settleNoted is settle for any record of a VM: note is its field, save writes it,
// and tasks are the types of tasks that it may be.
func (d *Driver) settleNoted(ctx context.Context, node string, vmid int, note **snapshotChange, tasks []string, save func() error) error {
	if *note == nil {
		return nil
	}
	busy := agentlab.Errorf(agentlab.CodeBusy, "a task that changes VM %d has not ended", vmid)
	pause, seen := d.cfg.Poll.First, false
	for {
		running, err := d.changing(ctx, node, vmid, tasks)
		switch {
		case err != nil && seen && ctx.Err() != nil:
			return busy // as if the context had ended between two calls
		case err != nil:
			return err
		}
		seen = seen || running
		arriving := (*note).Task == "" && d.cfg.Now().Sub((*note).At) < d.cfg.Settle
		if !running && !arriving {
			*note = nil
			return save()
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, d.cfg.Poll.Max)
		case <-ctx.Done():
			return busy
		}
	}
}

// changing reports whether a task of these types changes a VM.
func (d *Driver) changing(ctx context.Context, node string, vmid int, types []string) (bool, error) {
	tasks, err := d.pve.Tasks(ctx, node, pve.TaskFilter{VMID: vmid, Running: true, Limit: 50})
	return slices.ContainsFunc(tasks, func(t pve.Task) bool { return slices.Contains(types, t.Type) }), err
}

// snapshotLocks are the locks of a VM while a task changes its snapshots, and
// after the task was killed.
var snapshotLocks = []string{"snapshot", "snapshot-delete", "rollback"}

// breakLock removes the lock of a change of snapshots that was killed. s is the VM of
// the sandbox, read after the changes that this driver sent have ended.
func (d *Driver) breakLock(ctx context.Context, h *handle, s lookupResult) error {
	switch lock := s.cfg["lock"]; {
	case lock == "":
		return nil
	case slices.Contains(snapshotLocks, lock):
		return d.unlock(ctx, s.node, h.id().VMID, lock)
	default:
		return agentlab.Errorf(agentlab.CodeBusy, "VM %d is locked (%s)", h.id().VMID, clip(lock)).
			WithHint("wait until the task on the VM ends; if there is none, run on its node: qm unlock %d", h.id().VMID)
	}
}

// snapshot returns a snapshot of a sandbox.
func (d *Driver) snapshot(h *handle, s pve.Snapshot) backend.Snapshot {
	uid, _ := d.ourSnapshot(s, h.id())
	out := backend.Snapshot{
		Ref: backend.SnapshotRef{UID: uid, Of: refOf(h.id())}, Memory: bool(s.Memory), Saved: s.Saved(), Partial: s.State != "",
	}
	if e, there := h.entry(uid); there && !out.Partial {
		out.Spec = &e.Spec
	}
	return out
}

// Snapshots implements backend.Snapshots. It makes one call for each sandbox
// that has some, a few at once.
func (d *Driver) Snapshots(ctx context.Context) ([]backend.Snapshot, error) {
	all, err := d.handles()
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(h *handle) bool { return len(h.Snapshots) == 0 })
	found, errs := make([][]backend.Snapshot, len(all)), make([]error, len(all))
	atOnce := make(chan struct{}, 4)
	var wg sync.WaitGroup
	for i, h := range all {
		wg.Go(func() {
			atOnce <- struct{}{}
			found[i], errs[i] = d.snapshotsOf(ctx, h)
			<-atOnce
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	return slices.Concat(found...), nil
}

// snapshotsOf returns the snapshots of a sandbox. Their mark proves that the VM
// is the sandbox's.
func (d *Driver) snapshotsOf(ctx context.Context, h *handle) (out []backend.Snapshot, err error) {
	list, err := d.pve.Snapshots(ctx, h.Node, h.id().VMID)
	if code := agentlab.CodeOf(err); code == agentlab.CodeNotFound || code == agentlab.CodeDenied {
		s, lerr := d.lookup(ctx, h.id(), h) // it was moved, or does not exist
		switch {
		case lerr != nil:
			return nil, lerr
		case !s.owned && agentlab.CodeOf(d.foreignError(h.id(), h, s)) == agentlab.CodeNotFound:
			return nil, nil
		case !s.owned:
			return nil, d.foreignError(h.id(), h, s)
		}
		list, err = d.pve.Snapshots(ctx, s.node, h.id().VMID)
	}
	for _, s := range list {
		if _, ours := d.ourSnapshot(s, h.id()); ours {
			out = append(out, d.snapshot(h, s))
		}
	}
	return out, err
}

// DeleteSnapshot implements backend.Snapshots.
func (d *Driver) DeleteSnapshot(ctx context.Context, ref backend.SnapshotRef) error {
	if err := validUID(ref.UID); err != nil {
		return err
	}
	unlock, err := d.lock(ctx, ref.Of.UID)
	if err != nil {
		return err
	}
	defer unlock()
	id, h, s, err := d.findVM(ctx, ref.Of)
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		return nil // with its sandbox
	case err != nil && !s.owned:
		return err
	case h != nil && h.Restoring == ref.UID:
		return agentlab.Errorf(agentlab.CodeConflict, "the restore of the snapshot to sandbox %d was interrupted", h.Spec.VMID).
			WithHint("restore the snapshot again, or destroy the sandbox, which deletes the snapshot")
	}
	if h != nil {
		if err := d.settle(ctx, h); err != nil {
			return err
		}
	}
	found, _, err := d.findSnapshot(ctx, s.node, id, ref.UID)
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeExists: // another user's
	case err != nil:
		return err
	}
	if found != nil {
		if err := d.removeSnapshot(ctx, s.node, id, h, *found); err != nil {
			return err
		}
	}
	d.at("snapshot deleted")
	if h == nil {
		return nil
	}
	return d.dropEntry(h, ref.UID)
}

// removeSnapshot deletes a snapshot that is AgentLab's. After a killed task,
// parts of it may not exist.
func (d *Driver) removeSnapshot(ctx context.Context, node string, id vmID, h *handle, snap pve.Snapshot) error {
	del := func() (pve.UPID, error) { return d.pve.DeleteSnapshot(ctx, node, id.VMID, snap.Name, snap.State != "") }
	if h == nil {
		return d.task(ctx, del)
	}
	s, err := d.lookupOwned(ctx, id, h)
	if err == nil {
		err = d.breakLock(ctx, h, s)
	}
	if err != nil {
		return err
	}
	return d.change(ctx, h, del)
}
