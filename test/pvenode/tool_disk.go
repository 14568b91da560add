package pvenode

import (
	"encoding/binary"
	"maps"
	"os"
	"slices"
)

// qmUnlock removes the lock: property of a config, which no call of the API
// can.
func qmUnlock(t *tool, p values) int {
	const usage = "qm unlock <vmid>"
	return t.local(p, usage, func(c *call, vmid int) *Error {
		unlock, err := c.lockVM(vmid)
		if err != nil {
			return err
		}
		defer unlock()
		v, err := c.load(vmid)
		if err != nil {
			return err
		}
		c.n.mu.Lock()
		defer c.n.mu.Unlock()
		delete(v.conf, "lock")
		delete(v.pending, "lock")
		return nil
	})
}

// local carries out what is no call of the API, as root on the node.
func (t *tool) local(p values, usage string, do func(c *call, vmid int) *Error) int {
	if p.has("vmid") {
		if bad := formatVMID(nil, p.str("vmid")); bad != "" {
			return t.fail(badParam("vmid", "invalid format - "+bad), usage)
		}
	}
	c := &call{n: t.n, ctx: t.ctx, p: p, user: "root@pam", node: t.node, cli: true, proc: newHolder(), resp: &Response{},
		out: pipe{t.std.Out, t.std.Gone}, err: pipe{t.std.Err, t.std.Gone}}
	defer t.n.locks.drop(c.proc)
	if err := do(c, p.num("vmid")); err != nil {
		return t.fail(err, usage)
	}
	return 0
}

// qmImportDisk copies a disk image of the node into a volume, which becomes
// unusedN, or the drive that is named.
func qmImportDisk(t *tool, p values) int {
	return t.local(p, "qm disk import <vmid> <source> <storage> [OPTIONS]", func(c *call, vmid int) *Error {
		v, err := c.load(vmid)
		if err != nil {
			return err
		}
		if err := c.checkLock(v); err != nil {
			return err
		}
		source := p.str("source")
		size, bad := imageSize(c.n.HostPath(source))
		if bad != nil {
			return dief("%s: non-existent or non-regular file", source)
		}
		store, err := c.storeFor(p.str("storage"))
		switch {
		case err != nil:
			return err
		case !store.holds("images"):
			return dief("storage %s does not support vm images", store.ID)
		}
		c.say("importing disk '%s' to VM %d ...", source, vmid)
		volid, err := c.alloc(store.ID, vmid, p.str("format"), "", (size+1023)/1024)
		if err != nil {
			return err
		}
		c.say("%s", progressLine(size, 0))
		c.say("%s", progressLine(size, 100))
		unlock, err := c.lockVM(vmid)
		if err != nil {
			return err
		}
		defer unlock()
		slot := p.str("target-disk")
		c.n.mu.Lock()
		if slot == "" || isUnused(slot) {
			before := v.conf.clone()
			v.addUnused(c.n, volid)
			for k := range v.conf {
				if before[k] != v.conf[k] {
					slot = k
				}
			}
		} else {
			v.conf[slot] = volid + ",size=" + formatSize(size)
		}
		value := v.conf[slot]
		c.n.mu.Unlock()
		c.say("%s: successfully imported disk '%s'", slot, value)
		return nil
	})
}

// imageSize is the size of the disk that an image file of this machine holds.
func imageSize(file string) (int64, error) {
	info, err := os.Stat(file)
	if err != nil {
		return 0, err
	}
	f, err := os.Open(file)
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	head := make([]byte, 32)
	if k, _ := f.ReadAt(head, 0); k == len(head) && string(head[:4]) == "QFI\xfb" {
		return int64(binary.BigEndian.Uint64(head[24:])), nil
	}
	return info.Size(), nil
}

// qmRescan names every volume of a VM that its config does not name, and
// writes sizes that have changed.
func qmRescan(t *tool, p values) int {
	return t.local(p, "qm disk rescan [OPTIONS]", func(c *call, only int) *Error {
		if p.yes("dryrun") {
			c.say("NOTE: running in dry-run mode, won't write changes out!")
		}
		c.say("rescan volumes...")
		c.n.mu.Lock()
		ids := c.n.vmids()
		c.n.mu.Unlock()
		if only != 0 {
			if _, err := c.load(only); err != nil {
				return err
			}
			ids = []int{only}
		}
		for _, id := range ids {
			if err := c.rescan(id, p.yes("dryrun")); err != nil {
				return err
			}
		}
		return nil
	})
}

func (c *call) rescan(vmid int, dry bool) *Error {
	unlock, err := c.lockVM(vmid)
	if err != nil {
		return err
	}
	defer unlock()
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	v, err := c.n.vmOn(vmid, c.node)
	if err != nil {
		return err
	}
	named := func(volid string) bool {
		for _, s := range append(slices.Collect(maps.Values(v.snaps)), v.conf, v.pending) {
			for k, val := range s {
				if (isDrive(k) || isUnused(k) || k == "vmstate") && c.n.sameVolume(parseDrive(val).file, volid) {
					return true
				}
			}
		}
		return false
	}
	for _, id := range sortedKeys(c.n.storages) {
		s := c.n.storages[id]
		if !s.on(c.node) || !s.holds("images") {
			continue
		}
		for _, vol := range s.volumesOf(c.node, vmid) {
			volid := s.volid(vol)
			if named(volid) || dry {
				continue
			}
			v.addUnused(c.n, volid)
		}
	}
	return nil
}
