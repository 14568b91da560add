package pvetest

import (
	"strings"
)

// apiClone is POST …/clone.
func apiClone(c *call) (any, *Error) {
	vmid, newid := c.p.num("vmid"), c.p.num("newid")
	if err := c.cloneEarly(vmid, newid); err != nil {
		return nil, err
	}
	return c.fork("qmclone", itoa(vmid), func(w *call) *Error { return w.clone(vmid, newid) })
}

// cloneEarly is what is refused before the fork.
func (c *call) cloneEarly(vmid, newid int) *Error {
	if err := c.checkPool(c.p.str("pool")); err != nil {
		return err
	}
	c.n.mu.Lock()
	target := c.p.str("target")
	_, known := c.n.nodes[target]
	c.n.mu.Unlock()
	if target != "" && !known {
		return dief("no such cluster node '%s'", target)
	}
	if id := c.p.str("storage"); id != "" {
		if _, err := c.storeFor(id); err != nil {
			return err
		}
	}
	src, err := c.loadOther(vmid)
	if err != nil {
		return err
	}
	if err := c.checkLock(src); err != nil {
		return err
	}
	if _, err := c.clonePlan(src); err != nil {
		return err
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if c.n.vms[newid] != nil {
		return dief("unable to create VM %d: config file already exists", newid).exit(2)
	}
	return nil
}

// plan is what a clone makes of each drive.
type clonePlan struct {
	slots  []string
	drives map[string]drive
	full   map[string]bool
	linked bool // the whole clone
	from   section
}

// clonePlan checks which drives are cloned how.
func (c *call) clonePlan(src *vm) (*clonePlan, *Error) {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	snap := c.p.str("snapname")
	p := &clonePlan{drives: map[string]drive{}, full: map[string]bool{}, from: src.conf}
	if snap != "" {
		if src.snaps[snap] == nil {
			return nil, dief("snapshot '%s' does not exist", snap).exit(2)
		}
		p.from = src.snaps[snap]
	}
	full := !src.template()
	if c.p.has("full") {
		full = c.p.yes("full")
	}
	if !full {
		for _, name := range []string{"storage", "format"} {
			if c.p.has(name) {
				return nil, dief("parameter '%s' not allowed for linked clones", name).exit(2)
			}
		}
	}
	p.linked = !full
	p.slots = p.from.drives()
	driveOrder(p.slots)
	var keep []string
	for _, slot := range p.slots {
		d := parseDrive(p.from[slot])
		if d.cdrom() && !d.cloudinit() {
			p.drives[slot] = d
			continue
		}
		keep = append(keep, slot)
		p.drives[slot] = d
		asFull := full || d.cloudinit()
		if err := n.canClone(c.node, slot, d, asFull, snap); err != nil {
			return nil, err
		}
		p.full[slot] = asFull
	}
	p.slots = keep
	return p, nil
}

func (n *Node) canClone(node, slot string, d drive, full bool, snap string) *Error {
	s, r, v, err := n.findVolume(node, d.file)
	if err != nil {
		return err
	}
	feature, word := "copy", "Full"
	if !full {
		feature, word = "clone", "Linked"
	}
	if d.cloudinit() || s.hasFeature(v, r, feature, snap) {
		return nil
	}
	if full && snap != "" {
		return dief("Full clone feature is not supported for a snapshot of '%s' (%s)", d.file, slot)
	}
	return dief("%s clone feature is not supported for '%s' (%s)", word, d.file, slot)
}

// clone is the worker.
func (c *call) clone(vmid, newid int) *Error {
	src, err := c.loadOther(vmid)
	if err != nil {
		return err
	}
	unlockNew, err := c.lock(vmLockFile(newid), false, c.n.cfg.Waits.CloneLock)
	if err != nil {
		return err
	}
	defer unlockNew()
	unlock, err := c.lock(vmLockFile(vmid), !c.isRunning(src), c.n.cfg.Waits.CloneLock)
	if err != nil {
		return err
	}
	defer unlock()
	if err := c.checkLock(src); err != nil {
		return err
	}
	plan, err := c.clonePlan(src)
	if err != nil {
		return err
	}
	dst, err := c.cloneConfig(src, plan, newid)
	if err != nil {
		return err
	}
	if c.n.v9() {
		c.say("creating a clone of VM %d with ID %d", vmid, newid)
	}
	made, err := c.cloneVolumes(dst, plan)
	if err == nil {
		err = c.n.point(c, "clone.volumes")
	}
	if err != nil {
		c.undoClone(dst, made)
		return dief("clone failed: %s", err.Message)
	}
	return c.finishClone(dst)
}

// cloneConfig writes the target's config with lock: clone; its description is
// there from the start.
func (c *call) cloneConfig(src *vm, plan *clonePlan, newid int) (*vm, *Error) {
	n := c.n
	n.mu.Lock()
	if n.vms[newid] != nil {
		n.mu.Unlock()
		return nil, dief("unable to create VM %d: config file already exists", newid).exit(2)
	}
	dst := newVM(newid, c.node)
	for k, val := range plan.from {
		switch {
		case isUnused(k), isDrive(k) && plan.full[k], k == "lock", k == "template", k == "parent", k == "snaptime", k == "vmstate", k == "runningmachine", k == "runningcpu":
		case contains(plan.slots, k):
		case strings.HasPrefix(k, "net") && numberedRe.MatchString(k):
			d := parseNet(val)
			d["macaddr"] = n.newMAC()
			dst.conf[k] = d.String()
		case k == "smbios1":
			dst.conf[k] = newSMBIOS(val)
		case k == "vmgenid":
			dst.conf[k] = newUUID()
		default:
			dst.conf[k] = val
		}
	}
	if dst.conf["smbios1"] == "" {
		dst.conf["smbios1"] = "uuid=" + newUUID()
	}
	dst.conf["name"] = c.p.str("name")
	if dst.conf["name"] == "" {
		dst.conf["name"] = "Copy-of-VM-" + plan.from["name"]
		if plan.from["name"] == "" {
			dst.conf["name"] = "Copy-of-VM-" + itoa(src.id)
		}
	}
	if c.p.has("description") {
		dst.conf["description"] = c.p.str("description")
	}
	dst.conf["lock"] = "clone"
	n.vms[newid] = dst
	if f := n.fw[itoa(src.id)]; f != nil {
		n.fw[itoa(newid)] = f.clone()
	}
	n.mu.Unlock()
	return dst, n.point(c, "clone.config")
}

func newSMBIOS(old string) string {
	parts := []string{"uuid=" + newUUID()}
	for _, p := range strings.Split(old, ",") {
		if p != "" && !strings.HasPrefix(p, "uuid=") {
			parts = append(parts, p)
		}
	}
	return strings.Join(parts, ",")
}

func (c *call) cloneVolumes(dst *vm, plan *clonePlan) (made []string, err *Error) {
	for _, slot := range plan.slots {
		d := plan.drives[slot]
		if err := c.n.point(c, "clone.volume"); err != nil {
			return made, err
		}
		var volid string
		if plan.full[slot] {
			c.say("create full clone of drive %s (%s)", slot, d.file)
			volid, err = c.fullClone(dst.id, d, c.p.str("storage"), c.p.str("format"), c.p.str("snapname"))
		} else {
			c.say("create linked clone of drive %s (%s)", slot, d.file)
			volid, err = c.cloneVolume(d.file, c.p.str("snapname"), dst.id)
		}
		if volid != "" {
			made = append(made, volid)
		}
		if err != nil {
			return made, err
		}
		size, err := c.volumeSize(volid)
		if err != nil {
			return made, err
		}
		d.file = volid
		d.props["size"] = formatSize(size)
		delete(d.props, "format")
		c.n.mu.Lock()
		dst.conf[slot] = d.String()
		c.n.mu.Unlock()
	}
	return made, nil
}

// fullClone copies a volume, or makes a fresh cloud-init drive.
func (c *call) fullClone(vmid int, d drive, storeID, format, snap string) (string, *Error) {
	n := c.n
	n.mu.Lock()
	from, r, v, err := n.findVolume(c.node, d.file)
	n.mu.Unlock()
	if err != nil {
		return "", err
	}
	if storeID == "" {
		storeID = from.ID
	}
	n.mu.Lock()
	to := n.storages[storeID]
	n.mu.Unlock()
	if to == nil {
		return "", dief("storage '%s' does not exist", storeID)
	}
	if d.cloudinit() {
		volid, err := c.allocCloudinit(to, vmid)
		c.allocated(volid)
		return volid, err
	}
	if v == nil {
		return "", dief("volume '%s' does not exist", d.file)
	}
	_ = snap
	if format == "" {
		format = v.format
	}
	if to.Type != Dir {
		format = "raw"
	}
	volid, err := c.alloc(storeID, vmid, format, "", v.size/1024)
	if err != nil {
		return "", err
	}
	c.allocated(volid)
	if n.cfg.Files != nil && from.Type == Dir && to.Type == Dir {
		n.mu.Lock()
		_, tr, _, _ := n.findVolume(c.node, volid)
		n.mu.Unlock()
		if err := n.cfg.Files.FullClone(c.ctx, n.HostPath(from.filePath(r)), n.HostPath(to.filePath(tr)), format); err != nil {
			return volid, dief("copy failed: %v", err)
		}
	}
	for _, line := range progress(v.size) {
		c.say("%s", line)
	}
	return volid, nil
}

// allocated tells of a new volume of a copy, as version 9 does.
func (c *call) allocated(volid string) {
	if c.n.v9() && volid != "" {
		c.say("allocated target volume '%s'", volid)
	}
}

// allocCloudinit makes the 4 MiB volume of a cloud-init drive.
func (c *call) allocCloudinit(s *storage, vmid int) (string, *Error) {
	name, format := "vm-"+itoa(vmid)+"-cloudinit", "raw"
	if s.Type == Dir {
		name, format = name+".qcow2", "qcow2"
	}
	return c.alloc(s.ID, vmid, format, name, 4096)
}

// undoClone frees what a failed clone made and removes its config.
func (c *call) undoClone(dst *vm, made []string) {
	for _, volid := range made {
		if err := c.free(volid); err != nil {
			c.warn("%s", err.Message)
		}
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	delete(c.n.vms, dst.id)
	delete(c.n.fw, itoa(dst.id))
}

func (c *call) finishClone(dst *vm) *Error {
	n := c.n
	n.mu.Lock()
	delete(dst.conf, "lock")
	if t := c.p.str("target"); t != "" && t != c.node {
		dst.node = t
	}
	if p := c.p.str("pool"); p != "" && n.pools[p] != nil {
		n.pools[p].vms[dst.id] = true
	}
	n.mu.Unlock()
	return n.point(c, "clone.finish")
}
