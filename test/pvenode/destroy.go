package pvenode

// apiDestroy is DELETE …/qemu/{vmid}.
func apiDestroy(c *call) (any, *Error) {
	vmid := c.p.num("vmid")
	if err := c.onlyRoot("skiplock"); err != nil {
		return nil, err
	}
	if err := c.destroyEarly(vmid); err != nil {
		return nil, err
	}
	return c.fork("qmdestroy", itoa(vmid), func(w *call) *Error {
		unlock, err := w.lockVM(vmid)
		if err != nil {
			return err
		}
		defer unlock()
		if err := w.destroyEarly(vmid); err != nil {
			return err
		}
		return w.destroy(vmid)
	})
}

// onlyRoot refuses parameters that root@pam alone may give.
func (c *call) onlyRoot(names ...string) *Error {
	for _, name := range names {
		if c.p.yes(name) && !c.root() {
			return badParam(name, "Only root may use this option.")
		}
	}
	return nil
}

func (c *call) destroyEarly(vmid int) *Error {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	v, err := c.n.vmOn(vmid, c.node)
	if err != nil {
		return err
	}
	if v.conf["protection"] == "1" {
		return dief("can't remove VM %d - protection mode enabled", vmid)
	}
	if v.run != nil {
		return dief("VM %d is running - destroy failed", vmid).exit(25)
	}
	return nil
}

// destroy frees what the VM owns and removes it. A volume that cannot be
// freed is a warning only. Until its volumes are freed the config is as it
// was; then a zombie with a lock alone keeps the number.
func (c *call) destroy(vmid int) *Error {
	n := c.n
	v, err := c.load(vmid)
	if err != nil {
		return err
	}
	n.mu.Lock()
	suspended := v.conf["lock"] == "suspended"
	n.mu.Unlock()
	if !c.p.yes("skiplock") && !suspended {
		if err := c.checkLock(v); err != nil {
			return err
		}
	}
	own, err := c.ownVolumes(v)
	if err != nil {
		return err
	}
	if err := n.point(c, "destroy.volumes"); err != nil {
		return err
	}
	for _, volid := range own {
		if err := n.point(c, "destroy.volume"); err != nil {
			return err
		}
		c.freeOrWarn(volid)
	}
	if c.p.yes("destroy-unreferenced-disks") {
		for _, volid := range c.unreferenced(vmid) {
			c.freeOrWarn(volid)
		}
	}
	if err := n.point(c, "destroy.config"); err != nil {
		return err
	}
	n.mu.Lock()
	v.conf, v.pending, v.drop, v.snaps = section{"lock": "destroyed"}, section{}, map[string]bool{}, map[string]section{}
	n.mu.Unlock()
	n.forget(vmid)
	if err := n.point(c, "destroy.zombie"); err != nil {
		return err
	}
	if c.p.yes("purge") {
		c.say("purging VM %d from related configurations..", vmid)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.vms, vmid)
	return nil
}

// freeOrWarn frees a volume; version 9 counts the warning.
func (c *call) freeOrWarn(volid string) {
	err := c.freeBusy(volid)
	if err == nil {
		return
	}
	if c.n.v9() {
		c.say("WARN: Could not remove disk '%s', check manually: %s", volid, err.Message)
		c.task.warnings++
		return
	}
	c.warn("Could not remove disk '%s', check manually: %s", volid, err.Message)
}

// freeBusy tries a busy volume of a pool six times.
func (c *call) freeBusy(volid string) *Error {
	var err *Error
	for range 6 {
		err = c.free(volid)
		if err == nil || !busyRe.MatchString(err.Message) {
			return err
		}
		c.pause(c.n.cfg.Waits.Second)
	}
	return err
}

// ownVolumes are the volumes of all drives, unused lines, pending changes and
// states of snapshots that bear the VM's number.
func (c *call) ownVolumes(v *vm) ([]string, *Error) {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []string
	seen := map[string]bool{}
	add := func(s section) {
		slots := s.drives()
		driveOrder(slots)
		for k := range s {
			if isUnused(k) || k == "vmstate" {
				slots = append(slots, k)
			}
		}
		for _, slot := range slots {
			d := parseDrive(s[slot])
			if (d.cdrom() && !d.cloudinit()) || seen[d.file] || n.owner(d.file) != v.id {
				continue
			}
			seen[d.file] = true
			out = append(out, d.file)
		}
	}
	add(v.conf)
	add(v.pending)
	for _, name := range sortedKeys(v.snaps) {
		add(section{"vmstate": v.snaps[name]["vmstate"]})
	}
	if v.template() {
		for _, volid := range out {
			s, r, _, err := n.findVolume(c.node, volid)
			if err == nil && n.baseInUse(c.node, s, r) {
				return nil, dief("base volume '%s' is still in use by linked cloned", volid)
			}
		}
	}
	return out, nil
}

// unreferenced lists every volume that is named after a VM, on all storages
// with images.
func (c *call) unreferenced(vmid int) []string {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []string
	for _, id := range sortedKeys(n.storages) {
		s := n.storages[id]
		if !s.holds("images") || !s.on(c.node) {
			continue
		}
		for _, v := range s.volumesOf(c.node, vmid) {
			out = append(out, s.volid(v))
		}
	}
	return out
}

// forget removes what hangs on a VM's number, before the number is free.
func (n *Node) forget(vmid int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.fw, itoa(vmid))
	for _, p := range n.pools {
		delete(p.vms, vmid)
	}
	var keep []aclEntry
	for _, e := range n.acc.acl {
		if e.path != "/vms/"+itoa(vmid) {
			keep = append(keep, e)
		}
	}
	n.acc.acl = keep
}
