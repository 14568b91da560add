package pvenode

import (
	"maps"
	"slices"
	"strings"
	"time"
)

var (
	pSnapname = param{name: "snapname", need: true, format: formatConfigID, maxLen: 40}
	snapPath  = "/nodes/{node}/qemu/{vmid}/snapshot"
)

func snapPerm(c *call) *Error { return c.need("/vms/"+c.p.str("vmid"), "VM.Snapshot") }

func rollbackPerm(c *call) *Error {
	path := "/vms/" + c.p.str("vmid")
	if c.may(path, "VM.Snapshot") || c.may(path, "VM.Snapshot.Rollback") {
		return nil
	}
	return denied(path + ", VM.Snapshot|VM.Snapshot.Rollback")
}

func snapReadPerm(c *call) *Error {
	path := "/vms/" + c.p.str("vmid")
	for _, p := range []string{"VM.Snapshot", "VM.Snapshot.Rollback", "VM.Audit"} {
		if c.may(path, p) {
			return nil
		}
	}
	return denied(path + ", VM.Snapshot|VM.Snapshot.Rollback|VM.Audit")
}

var snapshotTable = []endpoint{
	{method: "GET", path: snapPath, perm: fwAudit, run: apiSnapshots},
	{method: "POST", path: snapPath, perm: snapPerm, run: apiSnapshot, params: []param{pSnapname, {name: "vmstate", kind: kBool}, {name: "description"}}},
	{method: "DELETE", path: snapPath + "/{snapname}", perm: snapPerm, run: apiDelsnapshot, params: []param{{name: "force", kind: kBool}}},
	{method: "POST", path: snapPath + "/{snapname}/rollback", perm: rollbackPerm, run: apiRollback, params: []param{{name: "start", kind: kBool}}},
	{method: "GET", path: snapPath + "/{snapname}/config", perm: snapReadPerm, run: apiSnapshotConfig},
	{method: "PUT", path: snapPath + "/{snapname}/config", perm: snapPerm, run: apiSnapshotDescribe, params: []param{{name: "description"}}},
}

func apiSnapshots(c *call) (any, *Error) {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	v, err := n.vmOn(c.p.num("vmid"), c.node)
	if err != nil {
		return nil, err
	}
	out := []map[string]any{}
	for name, section := range v.snaps { // in no order
		s := section.reread()
		e := map[string]any{"name": name, "snaptime": atoi(s["snaptime"]), "vmstate": bit(s["vmstate"] != ""), "description": s["description"]}
		for _, k := range []string{"parent", "snapstate"} {
			if s[k] != "" {
				e[k] = s[k]
			}
		}
		out = append(out, e)
	}
	now := map[string]any{"name": "current", "digest": v.digest(), "description": "You are here!", "running": bit(v.run != nil)}
	if p := v.conf["parent"]; p != "" {
		now["parent"] = p
	}
	return append(out, now), nil
}

func apiSnapshotConfig(c *call) (any, *Error) {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	v, err := n.vmOn(c.p.num("vmid"), c.node)
	if err != nil {
		return nil, err
	}
	s := v.snaps[c.p.str("snapname")]
	if s == nil {
		return nil, dief("snapshot '%s' does not exist", c.p.str("snapname"))
	}
	out := map[string]any{}
	for k, val := range s.reread() {
		out[k] = jsonValue(k, val)
	}
	return out, nil
}

func apiSnapshotDescribe(c *call) (any, *Error) {
	vmid := c.p.num("vmid")
	v, unlock, err := c.lockUnlocked(vmid)
	if err != nil {
		return nil, err
	}
	defer unlock()
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	s := v.snaps[c.p.str("snapname")]
	if s == nil {
		return nil, dief("snapshot '%s' does not exist", c.p.str("snapname"))
	}
	if c.p.has("description") {
		s["description"] = c.p.str("description")
	}
	return nil, nil
}

// keptBySnapshot reports whether a line of a config is stored in a snapshot
// and restored from it.
func keptBySnapshot(k string) bool {
	return !isUnused(k) && !contains([]string{"snapstate", "snaptime", "vmstate", "lock", "digest", "description"}, k)
}

func apiSnapshot(c *call) (any, *Error) {
	vmid, name := c.p.num("vmid"), c.p.str("snapname")
	if name == "current" || name == "pending" {
		return nil, dief("unable to use snapshot name '%s' (reserved name)", name)
	}
	return c.fork("qmsnapshot", itoa(vmid), func(w *call) *Error { return w.snapshot(vmid, name) })
}

func (c *call) snapshot(vmid int, name string) *Error {
	v, err := c.snapshotPrepare(vmid, name)
	if err != nil {
		return err
	}
	c.n.mu.Lock()
	s := v.snaps[name]
	slots := s.drives()
	state := s["vmstate"]
	frozen := v.run != nil && state == "" && agentEnabled(v.conf)
	run := v.run
	c.n.mu.Unlock()
	driveOrder(slots)
	if frozen {
		_, _ = run.guest.Agent(c.ctx, "guest-fsfreeze-freeze", nil)
	}
	if state != "" {
		err = c.saveState(run, state)
	}
	var made []string
	if err == nil {
		made, err = c.snapshotVolumes(s, slots, name)
	}
	if frozen {
		_, _ = run.guest.Agent(c.ctx, "guest-fsfreeze-thaw", nil)
	}
	if err == nil {
		err = c.n.saved(v.id, name, state != "")
	}
	if err == nil {
		err = c.n.point(c, "snapshot.commit")
	}
	if err != nil {
		c.warn("snapshot create failed: starting cleanup")
		if state != "" {
			_ = c.free(state)
		}
		for _, volid := range made {
			_ = c.volumeUnsnapshot(volid, name)
		}
	}
	unlock, lockErr := c.lockVM(vmid)
	if lockErr != nil {
		return lockErr
	}
	defer unlock()
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	delete(v.conf, "lock")
	if err != nil {
		delete(v.snaps, name)
		return err
	}
	delete(s, "snapstate")
	v.conf["parent"] = name
	return nil
}

// snapshotVolumes saves the volumes of drives and returns those that it has saved.
func (c *call) snapshotVolumes(s section, slots []string, name string) (made []string, err *Error) {
	for _, slot := range slots {
		d := parseDrive(s[slot])
		if d.cdrom() {
			continue
		}
		c.say("snapshotting 'drive-%s' (%s)", slot, d.file)
		if err := c.n.point(c, "snapshot.volume"); err != nil {
			return made, err
		}
		if err := c.volumeSnapshot(d.file, name); err != nil {
			return made, err
		}
		made = append(made, d.file)
	}
	return made, nil
}

// snapshotPrepare writes the section of the snapshot and lock: snapshot.
func (c *call) snapshotPrepare(vmid int, name string) (*vm, *Error) {
	unlock, err := c.lockVM(vmid)
	if err != nil {
		return nil, err
	}
	defer unlock()
	v, err := c.load(vmid)
	if err != nil {
		return nil, err
	}
	n := c.n
	n.mu.Lock()
	err = n.snapshotPossible(v, name)
	running := v.run != nil
	n.mu.Unlock()
	if err != nil {
		return nil, err
	}
	s := section{"snapstate": "prepare", "snaptime": itoa(int(time.Now().Unix()))}
	if running && c.p.yes("vmstate") {
		if s["vmstate"], err = c.allocState(v, name); err != nil {
			return nil, err
		}
		s["runningmachine"], s["runningcpu"] = "pc-i440fx-9.2+pve1", "kvm64,enforce,+kvm_pv_eoi,+kvm_pv_unhalt"
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for k, val := range v.conf {
		if keptBySnapshot(k) {
			s[k] = val
		}
	}
	if d := c.p.str("description"); d != "" {
		s["description"] = d
	}
	v.snaps[name] = s
	v.conf["lock"] = "snapshot"
	return v, nil
}

// snapshotPossible returns why a VM cannot get a snapshot of this name. The
// caller holds mu.
func (n *Node) snapshotPossible(v *vm, name string) *Error {
	if v.template() {
		return dief("you can't take a snapshot if it's a template")
	}
	if err := v.checkLock(); err != nil {
		return err
	}
	if v.snaps[name] != nil {
		return dief("snapshot name '%s' already used", name)
	}
	if n.cfg.Files != nil && n.cfg.Contents == nil && v.run != nil {
		return dief("the fake node has no snapshots of real files that a machine uses")
	}
	if !n.snapshottable(v.conf, v.node) {
		return dief("snapshot feature is not available")
	}
	return nil
}

// allocState makes the volume for the memory of a running VM. That is before
// the configuration is written: what dies in between leaves a volume that no
// configuration has.
func (c *call) allocState(v *vm, name string) (string, *Error) {
	store := c.stateStorage(v)
	c.n.mu.Lock()
	mem, s := max(atoi(v.conf["memory"]), 16), c.n.storages[store]
	c.n.mu.Unlock()
	volume := "vm-" + itoa(v.id) + "-state-" + name
	if s != nil && s.Type == Dir {
		volume += ".raw"
	}
	volid, err := c.alloc(store, v.id, "raw", volume, int64(2*mem+500)*1024)
	if err != nil {
		return "", err
	}
	return volid, c.n.point(c, "snapshot.alloc")
}

// saveState saves the memory of a running VM, which continues to run. A paused
// one stays paused.
func (c *call) saveState(run *running, volid string) *Error {
	store, _, _ := strings.Cut(volid, ":")
	c.say("saving VM state and RAM using storage '%s'", store)
	if err := c.n.point(c, "snapshot.state"); err != nil {
		return err
	}
	if run == nil {
		return dief("VM %d not running", c.p.num("vmid"))
	}
	c.say("completed saving the VM state in 0s, saved 0 B")
	return nil
}

// snapshottable reports whether every disk of a config supports snapshots. The
// caller holds mu.
func (n *Node) snapshottable(conf section, node string) bool {
	for _, slot := range conf.drives() {
		d := parseDrive(conf[slot])
		if d.cdrom() {
			continue
		}
		s, r, vol, err := n.findVolume(node, d.file)
		if err != nil || !s.hasFeature(vol, r, "snapshot", "") {
			return false
		}
	}
	return true
}

// withVolume calls do with a volume, under the lock of its storage.
func (c *call) withVolume(volid string, do func(s *storage, r ref, v *volume) *Error) *Error {
	c.n.mu.Lock()
	s, r, v, err := c.n.findVolume(c.node, volid)
	c.n.mu.Unlock()
	if err != nil {
		return err
	}
	if v == nil {
		return s.missing(r, volid)
	}
	unlock, err := c.storageLock(s)
	if err != nil {
		return err
	}
	defer unlock()
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	return do(s, r, v)
}

func (c *call) volumeSnapshot(volid, name string) *Error {
	return c.withVolume(volid, func(s *storage, r ref, v *volume) *Error {
		switch {
		case slices.Contains(v.snaps, name) && s.Type == ZFSPool:
			return dief("zfs error: cannot create snapshot '%s/%s@%s': dataset already exists", s.Pool, r.key, name)
		case slices.Contains(v.snaps, name):
			return dief("snapshot '%s' of '%s' exists", name, volid)
		case s.full:
			return s.noSpace(r.key)
		}
		if err := c.fileSnapshot("-c", s, r, name); err != nil {
			return err
		}
		v.snaps = append(v.snaps, name)
		v.snapSizes[name] = v.size
		return nil
	})
}

func (c *call) volumeUnsnapshot(volid, name string) *Error {
	return c.withVolume(volid, func(s *storage, r ref, v *volume) *Error {
		if !slices.Contains(v.snaps, name) {
			return s.noSnapshot(r, name)
		}
		for _, k := range s.at(c.node) {
			if k.parent == r.key && k.parentSnap == name && s.Type == ZFSPool {
				return dief("zfs error: cannot destroy '%s/%s@%s': snapshot has dependent clones", s.Pool, r.key, name)
			}
		}
		if err := c.fileSnapshot("-d", s, r, name); err != nil {
			return err
		}
		v.snaps = slices.DeleteFunc(v.snaps, func(n string) bool { return n == name })
		delete(v.snapSizes, name)
		return nil
	})
}

// noSnapshot returns a storage's error for a missing snapshot. (The words of zfs,
// LVM and qemu-img are not recorded.)
func (s *storage) noSnapshot(r ref, name string) *Error {
	switch s.Type {
	case ZFSPool:
		return dief("zfs error: could not find any snapshots to destroy; check snapshot names.").exit(1)
	case LVMThin:
		return dief("lvremove snapshot '%s/snap_%s_%s' error:   Failed to find logical volume \"%s/snap_%s_%s\"", s.Pool, r.key, name, s.Pool, r.key, name)
	case Dir:
	}
	return dief("command '/usr/bin/qemu-img snapshot -d %s %s' failed: exit code 1", name, s.filePath(r))
}

func apiDelsnapshot(c *call) (any, *Error) {
	vmid, name := c.p.num("vmid"), c.p.str("snapname")
	return c.fork("qmdelsnapshot", itoa(vmid), func(w *call) *Error { return w.delsnapshot(vmid, name) })
}

func (c *call) delsnapshot(vmid int, name string) *Error {
	v, s, err := c.delsnapshotPrepare(vmid, name)
	if err != nil {
		return err
	}
	c.n.mu.Lock()
	slots, state := s.drives(), s["vmstate"]
	c.n.mu.Unlock()
	driveOrder(slots)
	if state != "" {
		if err := c.deleteState(s, state); err != nil {
			return err
		}
	}
	var unused []string
	for _, slot := range slots {
		d := parseDrive(s[slot])
		if d.cdrom() {
			continue
		}
		if err := c.n.point(c, "delsnapshot.volume"); err != nil {
			return err // lock: snapshot-delete stays
		}
		if err := c.volumeUnsnapshot(d.file, name); err != nil {
			if !c.p.yes("force") {
				return err
			}
			c.warn("%s", err.Message)
			continue
		}
		unused = append(unused, d.file)
		if !c.p.yes("force") {
			c.n.mu.Lock()
			delete(s, slot)
			c.n.mu.Unlock()
		}
	}
	unlock, err := c.lockVM(vmid)
	if err != nil {
		return err
	}
	defer unlock()
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	parent := s["parent"]
	for _, of := range append(slices.Collect(maps.Values(v.snaps)), v.conf) {
		if of["parent"] == name {
			of["parent"] = parent
			if parent == "" {
				delete(of, "parent")
			}
		}
	}
	delete(v.snaps, name)
	delete(v.conf, "lock")
	if k := c.n.cfg.Contents; k != nil {
		k.Deleted(v.id, name)
	}
	// Foreign volumes too become unused; what a drive uses is dropped again.
	for _, volid := range unused {
		v.addUnused(c.n, volid)
	}
	v.tidy()
	return nil
}

// deleteState frees the memory of a snapshot.
func (c *call) deleteState(s section, volid string) *Error {
	if err := c.free(volid); err != nil {
		if !c.p.yes("force") {
			return err // lock: snapshot-delete stays
		}
		c.warn("%s", err.Message)
	}
	if !c.p.yes("force") {
		c.n.mu.Lock()
		delete(s, "vmstate")
		c.n.mu.Unlock()
	}
	return nil
}

func (c *call) delsnapshotPrepare(vmid int, name string) (*vm, section, *Error) {
	unlock, err := c.lockVM(vmid)
	if err != nil {
		return nil, nil, err
	}
	defer unlock()
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	v, err := n.vmOn(vmid, c.node)
	switch {
	case err != nil:
		return nil, nil, err
	case v.snaps[name] == nil:
		return nil, nil, dief("snapshot '%s' does not exist", name)
	}
	if err := v.checkLock(); err != nil {
		return nil, nil, err
	}
	if v.template() {
		return nil, nil, dief("you can't delete a snapshot if vm is a template")
	}
	v.conf["lock"] = "snapshot-delete"
	v.snaps[name]["snapstate"] = "delete"
	return v, v.snaps[name], nil
}
