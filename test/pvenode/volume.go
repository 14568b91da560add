package pvenode

import (
	"os"
	"path"
	"strings"
	"time"
)

// storageLock takes the lock of a storage.
func (c *call) storageLock(s *storage) (func(), *Error) {
	if s.Shared {
		unlock, err := c.lock("/etc/pve/priv/lock/storage-"+s.ID, false, c.n.cfg.Waits.StorageLock)
		if err != nil {
			return nil, dief("cfs-lock 'storage-%s' error: got lock request timeout", s.ID)
		}
		return unlock, nil
	}
	return c.lock("/var/lock/pve-manager/pve-storage-"+s.ID, false, c.n.cfg.Waits.StorageLock)
}

// storeFor is storeOn that takes Node.mu itself.
func (c *call) storeFor(id string) (*storage, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	return c.n.storeOn(id, c.node)
}

// alloc makes a volume and returns its id. name "" draws the next free one;
// size is in KiB.
func (c *call) alloc(storeID string, vmid int, format, name string, kib int64) (string, *Error) {
	s, err := c.storeFor(storeID)
	if err != nil {
		return "", err
	}
	if format == "" {
		format = "raw"
	}
	if err := s.checkAllocName(vmid, format, name); err != nil {
		return "", err
	}
	if s.Type != Dir && format != "raw" {
		where := map[StorageType]string{ZFSPool: "ZFSPoolPlugin.pm line 240", LVMThin: "LvmThinPlugin.pm line 92"}[s.Type]
		return "", dief("unsupported format '%s' at /usr/share/perl5/PVE/Storage/%s.", format, where).exit(25)
	}
	unlock, err := c.storageLock(s)
	if err != nil {
		return "", err
	}
	defer unlock()
	if err := c.n.point(c, "alloc"); err != nil {
		return "", err
	}
	return c.create(s, vmid, format, name, kib)
}

// checkAllocName is the rule for names that a caller chooses.
func (s *storage) checkAllocName(vmid int, format, name string) *Error {
	if name == "" {
		return nil
	}
	if s.Type != Dir {
		if !strings.HasPrefix(name, "vm-"+itoa(vmid)+"-") {
			return dief("illegal name '%s' - should be 'vm-%d-*'", name, vmid).exit(25)
		}
		return nil
	}
	f := fileExt.FindStringSubmatch(name)
	if f == nil || strings.Contains(name, "/") {
		return dief("unable to parse volume filename '%s'", name).exit(25)
	}
	if f[1] != format {
		return dief("illegal name '%s' - wrong extension for format ('%s != '%s')", name, f[1], format).exit(25)
	}
	return nil
}

func (c *call) create(s *storage, vmid int, format, name string, kib int64) (string, *Error) {
	n := c.n
	n.mu.Lock()
	if name == "" {
		name = s.freeName(c.node, vmid, format, "vm")
	} else if s.Type == Dir {
		name = itoa(vmid) + "/" + name
	}
	v := &volume{key: name, vmid: vmid, format: format, size: roundUp(s, kib) * 1024, ctime: time.Now(), snapSizes: map[string]int64{}}
	_, exists := s.at(c.node)[name]
	full := s.full
	n.mu.Unlock()
	r := ref{key: name, content: "images"}
	switch {
	case exists && s.Type == ZFSPool:
		return "", dief("zfs error: cannot create '%s/%s': dataset already exists", s.Pool, name).exit(1)
	case exists && s.Type == LVMThin:
		return "", dief("lvcreate '%s/%s' error:   Logical Volume \"%s\" already exists in volume group \"%s\"", s.Pool, name, name, s.Pool)
	case exists:
		return "", dief("disk image '%s' already exists", s.filePath(r)).exit(25)
	case full:
		return "", s.noSpace(name)
	}
	if s.Type == Dir {
		pre := map[string]string{
			"qcow2": "fmt=qcow2 cluster_size=65536 extended_l2=off preallocation=metadata compression_type=zlib size=%d lazy_refcounts=off refcount_bits=16",
			"raw":   "fmt=raw size=%d preallocation=off", "vmdk": "fmt=vmdk size=%d compat6=off hwversion=undefined subformat=monolithicSparse",
		}[format]
		c.say("Formatting '%s', "+pre, s.filePath(r), v.size)
	}
	if err := c.makeFile(s, v, func(file string) error { return n.cfg.Files.Create(c.ctx, file, format, v.size) }); err != nil {
		return "", err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	s.at(c.node)[name] = v
	return s.volid(v), nil
}

// noSpace is how a full storage refuses.
func (s *storage) noSpace(name string) *Error {
	switch s.Type {
	case ZFSPool:
		return dief("zfs error: cannot create '%s/%s': out of space", s.Pool, name)
	case LVMThin:
		return dief("lvcreate '%s/%s' error:   Cannot create new thin volume, free space in thin pool %s/data reached threshold.", s.Pool, name, s.Pool)
	case Dir:
	}
	return dief("unable to create image: qemu-img: %s: No space left on device", s.filePath(ref{key: name, content: "images"}))
}

func roundUp(s *storage, kib int64) int64 {
	if s.Type == ZFSPool || s.Type == LVMThin {
		return (kib + 1023) / 1024 * 1024
	}
	return kib
}

// makeFile makes the real file of a volume of a dir storage.
func (c *call) makeFile(s *storage, v *volume, with func(file string) error) *Error {
	if c.n.cfg.Files == nil || s.Type != Dir {
		return nil
	}
	file := c.n.HostPath(s.filePath(ref{key: v.key, content: "images"}))
	if err := os.MkdirAll(path.Dir(file), 0o755); err != nil {
		return dief("mkdir: %v", err)
	}
	if err := with(file); err != nil {
		return dief("unable to create image: %v", err)
	}
	return nil
}

// findVolume looks up a volume that must exist; mu is held.
func (n *Node) findVolume(node, volid string) (*storage, ref, *volume, *Error) {
	s, r, err := n.parseVolid(volid)
	if err != nil {
		return nil, r, nil, err
	}
	return s, r, s.at(node)[r.key], nil
}

// children are the volumes that are clones of one, of any of its snapshots.
func (s *storage) children(node, key string) []string {
	var out []string
	for _, v := range s.at(node) {
		if v.parent == key {
			out = append(out, v.key)
		}
	}
	return out
}

// free destroys a volume.
func (c *call) free(volid string) *Error {
	n := c.n
	n.mu.Lock()
	s, r, _, err := n.findVolume(c.node, volid)
	n.mu.Unlock()
	if err != nil {
		return err
	}
	unlock, err := c.storageLock(s)
	if err != nil {
		return err
	}
	defer unlock()
	if err := n.point(c, "free"); err != nil {
		return err
	}
	n.mu.Lock()
	v := s.at(c.node)[r.key]
	inUse := n.volumeInUse(c.node, volid)
	n.mu.Unlock()
	switch {
	case v == nil && s.Type == Dir:
		c.warn("disk image '%s' does not exist", s.filePath(r))
		return nil
	case v == nil:
		return nil
	case v.busy, inUse && s.Type == ZFSPool:
		return dief("zfs error: cannot destroy '%s/%s': dataset is busy", s.Pool, r.key)
	case inUse && s.Type == LVMThin:
		return dief("lvremove '%s/%s' error:   Logical volume %s/%s in use.", s.Pool, r.key, s.Pool, r.key)
	}
	if err := c.dependents(s, r); err != nil {
		return err
	}
	if n.cfg.Files != nil && s.Type == Dir {
		_ = os.Remove(n.HostPath(s.filePath(r)))
		_ = os.Remove(path.Dir(n.HostPath(s.filePath(r)))) // when it is empty
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(s.at(c.node), r.key)
	return nil
}

// dependents refuses to free what others are clones of.
func (c *call) dependents(s *storage, r ref) *Error {
	c.n.mu.Lock()
	kids := s.children(c.node, r.key)
	c.n.mu.Unlock()
	if len(kids) == 0 || s.Type == LVMThin {
		return nil
	}
	if s.Type == ZFSPool {
		c.say("cannot destroy '%s/%s': filesystem has dependent clones", s.Pool, r.key)
		c.say("use '-R' to destroy the following datasets:")
		return dief("zfs error: %s/%s", s.Pool, kids[0])
	}
	return nil
}

// baseInUse reports whether a base volume has clones that its plugin can see.
func (n *Node) baseInUse(node string, s *storage, r ref) bool {
	if !r.isBase || s.Type == LVMThin {
		return false
	}
	for _, v := range s.at(node) {
		if v.parent == r.key && v.parentSnap == baseSnap {
			return true
		}
	}
	return false
}

// volumeInUse reports whether a running VM has a volume open. The caller holds
// mu.
func (n *Node) volumeInUse(node, volid string) bool {
	_, want, err := n.parseVolid(volid)
	if err != nil {
		return false
	}
	for _, v := range n.vms {
		if v.node != node || v.run == nil {
			continue
		}
		for _, d := range v.run.disks {
			if _, r, err := n.parseVolid(d); err == nil && r.store == want.store && r.key == want.key {
				return true
			}
		}
	}
	return false
}

// cloneVolume makes a linked clone of a base volume, or of a snapshot where the
// storage can, and returns its id.
func (c *call) cloneVolume(volid, snap string, vmid int) (string, *Error) {
	n := c.n
	n.mu.Lock()
	s, r, v, err := n.findVolume(c.node, volid)
	n.mu.Unlock()
	if err != nil {
		return "", err
	}
	unlock, err := c.storageLock(s)
	if err != nil {
		return "", err
	}
	defer unlock()
	if err := n.point(c, "alloc"); err != nil {
		return "", err
	}
	n.mu.Lock()
	full := s.full
	format := "raw"
	if s.Type == Dir {
		format = "qcow2"
	}
	key := s.freeName(c.node, vmid, format, "vm")
	n.mu.Unlock()
	switch {
	case v == nil:
		return "", dief("volume '%s' does not exist", volid)
	case full:
		return "", s.noSpace(key)
	case !r.isBase && snap == "":
		return "", dief("clone_image only works on base images")
	}
	from := baseSnap
	if snap != "" {
		from = snap
	}
	clone := &volume{key: key, vmid: vmid, format: format, size: v.size, parent: r.key, parentSnap: from, ctime: time.Now(), snapSizes: map[string]int64{}}
	err = c.makeFile(s, clone, func(file string) error {
		return n.cfg.Files.LinkedClone(c.ctx, n.HostPath(s.filePath(r)), file)
	})
	if err != nil {
		return "", err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	s.at(c.node)[key] = clone
	return s.volid(clone), nil
}

// volumeSize returns the size of a volume in bytes; a missing one is waited
// for as the plugin waits for its device.
func (c *call) volumeSize(volid string) (int64, *Error) {
	n := c.n
	n.mu.Lock()
	s, r, v, err := n.findVolume(c.node, volid)
	n.mu.Unlock()
	switch {
	case err != nil:
		return 0, err
	case v != nil:
		return v.size, nil
	case s.Type == ZFSPool:
		wait, secs := n.cfg.Waits.Zvol, 10
		if c.task != nil {
			wait, secs = n.cfg.Waits.ZvolWorker, 300
		}
		if err := n.point(c, "zvol.wait"); err != nil {
			return 0, err
		}
		c.pause(wait)
		return 0, dief("timeout: no zvol device link for '%s' found after %d sec.", r.key, secs)
	case s.Type == LVMThin:
		return 0, dief("can't activate LV '/dev/%s/%s':   Failed to find logical volume \"%s/%s\"", s.Pool, r.key, s.Pool, r.key)
	}
	return 0, dief("volume '%s' does not exist", volid)
}

// missing returns a storage's error for a missing volume.
func (s *storage) missing(r ref, volid string) *Error {
	if s.Type == ZFSPool {
		return dief("zfs error: cannot open '%s/%s': dataset does not exist", s.Pool, r.key).exit(1)
	}
	return dief("volume '%s' does not exist", volid)
}
