package pvenode

import (
	"os"
	"path"
	"slices"
	"strings"
)

func diskPerm(c *call) *Error { return c.need("/vms/"+c.p.str("vmid"), "VM.Config.Disk") }

func formatDriveOrUnused(_ *Node, s string) string {
	if !isDrive(s) && !numberedUnused(s) {
		return "value '" + s + "' does not have a value in the enumeration of drives\n"
	}
	return ""
}

func numberedUnused(s string) bool {
	o, ok := lookupOption(s)
	return ok && isUnused(o.name)
}

var moveTable = []endpoint{
	{method: "POST", path: "/nodes/{node}/qemu/{vmid}/move_disk", perm: diskPerm, run: apiMoveDisk, params: []param{
		{name: "disk", need: true, format: formatDriveOrUnused}, {name: "target-disk", format: formatDriveOrUnused},
		{name: "target-vmid", kind: kInt, format: formatVMID}, {name: "storage", format: formatStorageID},
		{name: "format", enum: []string{"raw", "qcow2", "vmdk"}}, {name: "delete", kind: kBool},
		{name: "digest", maxLen: 40}, {name: "target-digest", maxLen: 40}, {name: "bwlimit", kind: kInt, min: f64(0)}}},
}

func apiMoveDisk(c *call) (any, *Error) {
	vmid, disk := c.p.num("vmid"), c.p.str("disk")
	both := func(text string) *Error {
		return &Error{Status: 400, Message: "Parameter verification failed.", Params: map[string]string{"target-vmid": text, "storage": text}}
	}
	switch {
	case c.p.has("target-vmid") && c.p.has("storage"):
		return nil, both("either set 'storage' or 'target-vmid', but not both")
	case c.p.has("target-vmid"):
		return c.reassign(vmid, disk)
	case !c.p.has("storage"):
		return nil, both("both 'storage' and 'target-vmid' missing, either needs to be set")
	}
	if err := c.need("/storage/"+c.p.str("storage"), "Datastore.AllocateSpace"); err != nil {
		return nil, err
	}
	if _, _, err := c.movable(vmid, disk); err != nil {
		return nil, err
	}
	return c.fork("qmmove", itoa(vmid), func(w *call) *Error { return w.moveToStorage(vmid, disk) })
}

// movable are the checks of a move to another storage.
func (c *call) movable(vmid int, disk string) (*vm, drive, *Error) {
	v, err := c.load(vmid)
	if err != nil {
		return nil, drive{}, err
	}
	if err := c.checkLock(v); err != nil {
		return nil, drive{}, err
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if d := c.p.str("digest"); d != "" && d != v.digest() {
		return nil, drive{}, dief("detected modified configuration - file changed by other user? Try again.")
	}
	line, ok := v.conf[disk]
	d := parseDrive(line)
	switch {
	case !ok:
		return nil, d, dief("disk '%s' does not exist", disk)
	case d.cdrom() && !d.cloudinit():
		return nil, d, dief("you can't move a cdrom")
	}
	s, r, _, err := c.n.findVolume(c.node, d.file)
	if err != nil {
		return nil, d, err
	}
	if s.ID == c.p.str("storage") && (c.p.str("format") == "" || s.Type != Dir || r.format == c.p.str("format")) {
		return nil, d, dief("you can't move to the same storage with same format")
	}
	to, err := c.n.storeOn(c.p.str("storage"), c.node)
	switch {
	case err != nil:
		return nil, d, err
	case !to.holds("images"):
		return nil, d, badParam("storage", "storage '"+to.ID+"' does not support vm images")
	case c.p.yes("delete") && v.usedElsewhere(c.n, disk, d.file):
		return nil, d, dief("you can't move a disk with snapshots and delete the source")
	}
	return v, d, nil
}

func (c *call) moveToStorage(vmid int, disk string) *Error {
	unlock, err := c.lockVM(vmid)
	if err != nil {
		return err
	}
	defer unlock()
	v, d, err := c.movable(vmid, disk)
	if err != nil {
		return err
	}
	c.say("create full clone of drive %s (%s)", disk, d.file)
	volid, err := c.fullClone(vmid, d, c.p.str("storage"), c.p.str("format"), "")
	if err != nil {
		return dief("storage migration failed: %s", err.Message)
	}
	old := d.file
	d.file = volid
	c.n.mu.Lock()
	v.conf[disk] = d.String()
	if !c.p.yes("delete") {
		v.addUnused(c.n, old)
	}
	v.tidy()
	c.n.mu.Unlock()
	if c.p.yes("delete") {
		if err := c.free(old); err != nil {
			c.warn("%s", err.Message)
		}
	}
	return nil
}

// usedElsewhere reports whether a drive other than skip, or a drive of a
// snapshot, uses a volume. The caller holds mu.
func (v *vm) usedElsewhere(n *Node, skip, volid string) bool {
	names := func(s section, skip string) bool {
		for _, slot := range s.drives() {
			d := parseDrive(s[slot])
			if slot != skip && !d.cdrom() && n.sameVolume(d.file, volid) {
				return true
			}
		}
		return false
	}
	if names(v.conf, skip) {
		return true
	}
	for _, s := range v.snaps {
		if names(s, "") {
			return true
		}
	}
	return false
}

// reassign gives a disk to another VM, which renames its volume.
func (c *call) reassign(vmid int, disk string) (any, *Error) {
	target := c.p.num("target-vmid")
	slot := disk
	if c.p.has("target-disk") {
		slot = c.p.str("target-disk")
	}
	if err := c.need("/vms/"+itoa(target), "VM.Config.Disk"); err != nil {
		return nil, err
	}
	if vmid == target {
		return nil, badParam("target-vmid", "must be different than source VMID to reassign disk")
	}
	_, _, d, err := c.reassignable(vmid, disk, target, slot)
	if err != nil {
		return nil, err
	}
	store, _, _ := strings.Cut(d.file, ":")
	if err := c.need("/storage/"+store, "Datastore.AllocateSpace"); err != nil {
		return nil, err
	}
	return c.fork("qmmove", itoa(vmid)+"-"+disk+">"+itoa(target)+"-"+slot, func(w *call) *Error {
		return w.reassigned(vmid, disk, target, slot)
	})
}

func (c *call) reassignable(vmid int, disk string, target int, slot string) (from, to *vm, d drive, err *Error) {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	from, to = n.vms[vmid], n.vms[target]
	switch {
	case from == nil:
		return nil, nil, d, dief("could not find VM %d", vmid)
	case to == nil:
		return nil, nil, d, dief("could not find target VM %d", target)
	case from.node != to.node:
		return nil, nil, d, dief("Both VMs need to be on the same node (%s != %s)", from.node, to.node)
	}
	for _, v := range []*vm{from, to} {
		if err := v.checkLock(); err != nil {
			return nil, nil, d, err
		}
	}
	line, there := from.conf[disk]
	d = parseDrive(line)
	switch {
	case from.template() || to.template():
		return nil, nil, d, dief("Can't move disks from or to template VMs")
	case !there:
		return nil, nil, d, dief("Disk '%s' for VM '%d' does not exist", disk, vmid)
	case to.conf[slot] != "":
		return nil, nil, d, dief("Target disk key '%s' is already in use for VM '%d'", slot, target)
	case d.cdrom() && !d.cloudinit():
		return nil, nil, d, dief("CD drive contents can't be moved to another VM")
	}
	s, r, v, err := n.findVolume(c.node, d.file)
	switch {
	case err != nil:
		return nil, nil, d, err
	case from.usedElsewhere(n, disk, d.file):
		return nil, nil, d, dief("Can't move disk used by a snapshot to another VM")
	case !s.hasFeature(v, r, "rename", ""):
		return nil, nil, d, dief("Storage does not support moving of this disk to another VM")
	case from.run != nil && !isUnused(disk):
		return nil, nil, d, dief("Cannot move disk to another VM while the source VM is running - detach first").exit(25)
	}
	return from, to, d, nil
}

func (c *call) reassigned(vmid int, disk string, target int, slot string) *Error {
	unlock, err := c.lockVM(vmid)
	if err != nil {
		return err
	}
	defer unlock()
	unlockTarget, err := c.lockVM(target)
	if err != nil {
		return err
	}
	defer unlockTarget()
	from, to, d, err := c.reassignable(vmid, disk, target, slot)
	if err != nil {
		return err
	}
	if c.n.v9() {
		c.say("reassign disk '%s' from VM '%d' as '%s' to VM '%d'", disk, vmid, slot, target)
	} else {
		c.say("moving disk '%s' from VM '%d' to '%d'", disk, vmid, target)
	}
	if d.file, err = c.renameVolume(d.file, target); err != nil {
		return err
	}
	if err := c.n.point(c, "move.renamed"); err != nil {
		return err
	}
	c.n.mu.Lock()
	if from.unboot(disk) {
		c.n.mu.Unlock()
		c.say("removing disk '%s' from boot order config", disk)
		c.n.mu.Lock()
	}
	delete(from.conf, disk)
	c.n.mu.Unlock()
	c.say("removing disk '%s' from VM '%d' config", disk, vmid)
	if isUnused(slot) {
		c.n.mu.Lock()
		defer c.n.mu.Unlock()
		to.conf[slot] = d.file
		return nil
	}
	return c.attach(to, slot, d)
}

// renameVolume gives a volume a free name of another VM.
func (c *call) renameVolume(volid string, vmid int) (string, *Error) {
	var id string
	err := c.withVolume(volid, func(s *storage, r ref, v *volume) *Error {
		key := s.freeName(c.node, vmid, v.format, "vm")
		s.rename(c.n, c.node, r, v, key)
		v.vmid = vmid
		id = s.volid(v)
		return nil
	})
	return id, err
}

// rename changes the name of a volume; its clones keep it as their origin. mu
// is held.
func (s *storage) rename(n *Node, node string, r ref, v *volume, key string) {
	vols := s.at(node)
	delete(vols, r.key)
	vols[key] = v
	for _, o := range vols {
		if o.parent == r.key {
			o.parent = key
		}
	}
	v.key = key
	if n.cfg.Files == nil || s.Type != Dir {
		return
	}
	to := n.HostPath(s.filePath(ref{key: key, content: "images"}))
	if os.MkdirAll(path.Dir(to), 0o755) == nil {
		_ = os.Rename(n.HostPath(s.filePath(r)), to)
	}
}

// unboot takes a drive out of the boot order; mu is held.
func (v *vm) unboot(slot string) bool {
	order, ok := strings.CutPrefix(v.conf["boot"], "order=")
	if !ok {
		return false
	}
	devs := strings.Split(order, ";")
	left := slices.DeleteFunc(slices.Clone(devs), func(d string) bool { return d == slot })
	if len(left) == len(devs) {
		return false
	}
	v.conf["boot"] = printBootOrder(left)
	return true
}

// tidy drops unused lines whose volume a drive names, as every writing of a
// config does; mu is held.
func (v *vm) tidy() {
	used := map[string]bool{}
	for _, s := range []section{v.conf, v.pending} {
		for _, slot := range s.drives() {
			used[parseDrive(s[slot]).file] = true
		}
	}
	for k, val := range v.conf {
		if isUnused(k) && used[val] {
			delete(v.conf, k)
		}
	}
}

// attach sets a drive of a VM whose lock is held.
func (c *call) attach(v *vm, slot string, d drive) *Error {
	line := d.String()
	c.say("update VM %d: -%s %s", v.id, slot, line)
	w := *c
	w.p = values{"vmid": {itoa(v.id)}, slot: {line}}
	return w.apply(v, &change{set: section{slot: line}})
}
