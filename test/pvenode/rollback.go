package pvenode

import "slices"

// rollbackPossible returns an error if the storage cannot roll back: on ZFS,
// to any snapshot except the newest one, regardless of who created it.
func (c *call) rollbackPossible(volid, name string) *Error {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	s, _, v, err := n.findVolume(c.node, volid)
	switch {
	case err != nil:
		return err
	case s.Type != ZFSPool:
		return nil
	case v == nil || !slices.Contains(v.snaps, name):
		return dief("can't rollback, snapshot '%s' does not exist on '%s'", name, volid)
	case v.snaps[len(v.snaps)-1] != name:
		return dief("can't rollback, '%s' is not most recent snapshot on '%s'", name, volid)
	}
	return nil
}

// volumeRollback gives a volume the size that it had at a snapshot. What is in it
// is in the hands of Contents.
func (c *call) volumeRollback(volid, name string) *Error {
	return c.withVolume(volid, func(s *storage, r ref, v *volume) *Error {
		if !slices.Contains(v.snaps, name) {
			return dief("can't rollback, snapshot '%s' does not exist on '%s'", name, volid)
		}
		if size, known := v.snapSizes[name]; known {
			v.size = size
		}
		return c.fileSnapshot("-a", s, r, name)
	})
}

// fileSnapshot makes, applies or deletes a snapshot of a real file.
func (c *call) fileSnapshot(option string, s *storage, r ref, name string) *Error {
	if c.n.cfg.Files == nil || s.Type != Dir {
		return nil
	}
	if err := c.n.cfg.Files.Snapshot(c.ctx, option, c.n.HostPath(s.filePath(r)), name); err != nil {
		return dief("%s", err.Error())
	}
	return nil
}

func apiRollback(c *call) (any, *Error) {
	vmid, name := c.p.num("vmid"), c.p.str("snapname")
	return c.fork("qmrollback", itoa(vmid), func(w *call) *Error {
		if err := w.rollback(vmid, name); err != nil {
			return err
		}
		if !w.p.yes("start") {
			return nil
		}
		unlock, err := w.lockVM(vmid)
		if err != nil {
			return err
		}
		defer unlock()
		v, err := w.load(vmid)
		if err != nil {
			return err
		}
		return w.start(v)
	})
}

func (c *call) rollback(vmid int, name string) *Error {
	v, s, err := c.rollbackPrepare(vmid, name)
	if err != nil {
		return err
	}
	slots := s.drives()
	driveOrder(slots)
	for _, slot := range slots {
		if d := parseDrive(s[slot]); !d.cdrom() {
			if err := c.n.point(c, "rollback.volume"); err != nil {
				return err // lock: rollback stays
			}
			if err := c.volumeRollback(d.file, name); err != nil {
				return err // lock: rollback stays
			}
		}
	}
	if k := c.n.cfg.Contents; k != nil {
		if err := k.RolledBack(vmid, name); err != nil {
			return dief("%s", err.Error())
		}
	}
	if err := c.n.point(c, "rollback.config"); err != nil {
		return err // lock: rollback stays
	}
	unlock, err := c.lockVM(vmid)
	if err != nil {
		return err
	}
	defer unlock()
	c.n.mu.Lock()
	v.restore(c.n, s, name)
	memory := s["vmstate"] != ""
	c.n.mu.Unlock()
	if !memory {
		return nil
	}
	if err := c.n.point(c, "rollback.start"); err != nil {
		return err
	}
	return c.startFrom(v, name)
}

func (c *call) rollbackPrepare(vmid int, name string) (*vm, section, *Error) {
	unlock, err := c.lockVM(vmid)
	if err != nil {
		return nil, nil, err
	}
	defer unlock()
	v, err := c.load(vmid)
	if err != nil {
		return nil, nil, err
	}
	c.n.mu.Lock()
	s, template := v.snaps[name], v.template()
	c.n.mu.Unlock()
	switch {
	case template:
		return nil, nil, dief("you can't rollback if vm is a template")
	case s == nil:
		return nil, nil, dief("snapshot '%s' does not exist", name)
	}
	slots := s.drives()
	driveOrder(slots)
	for _, slot := range slots {
		if d := parseDrive(s[slot]); !d.cdrom() {
			if err := c.rollbackPossible(d.file, name); err != nil {
				return nil, nil, err
			}
		}
	}
	if s["snapstate"] != "" {
		return nil, nil, dief("unable to rollback to incomplete snapshot (snapstate = %s)", s["snapstate"])
	}
	if err := c.checkLock(v); err != nil {
		return nil, nil, err
	}
	c.kill(v)
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	v.conf["lock"] = "rollback"
	return v, s, nil
}

// restore makes a config what it was at a snapshot; its description stays,
// disks that came since become unused. mu is held.
func (v *vm) restore(n *Node, s section, name string) {
	old := v.conf
	then := map[string]bool{}
	for _, slot := range s.drives() {
		then[parseDrive(s[slot]).file] = true
	}
	slots := old.drives()
	driveOrder(slots)
	for _, slot := range slots {
		if d := parseDrive(old[slot]); !d.cdrom() && !then[d.file] {
			v.addUnused(n, d.file)
		}
	}
	v.conf = section{}
	for k, val := range old {
		if isUnused(k) || k == "description" {
			v.conf[k] = val
		}
	}
	for k, val := range s {
		if keptBySnapshot(k) {
			v.conf[k] = val
		}
	}
	v.conf["parent"] = name
	delete(v.conf, "runningmachine")
	delete(v.conf, "runningcpu")
	if v.conf["vmgenid"] != "" {
		v.conf["vmgenid"] = newUUID()
	}
	v.pending, v.drop = section{}, map[string]bool{}
	v.tidy()
}
