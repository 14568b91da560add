package pvenode

import "time"

// ZFSSnapshot makes a snapshot of a volume beside Proxmox, as an
// administrator does with zfs.
func (n *Node) ZFSSnapshot(volid, name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, _, v, err := n.findVolume(n.name, volid)
	if err != nil || v == nil {
		panic("fake Proxmox node: no volume " + volid)
	}
	v.snaps = append(v.snaps, name)
}

// ZFSSnapshots lists the snapshots of a volume, oldest first, as zfs does.
func (n *Node) ZFSSnapshots(volid string) []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	s, r, v, err := n.findVolume(n.name, volid)
	if err != nil || v == nil {
		return nil
	}
	var out []string
	for _, name := range v.snaps {
		out = append(out, s.Pool+"/"+r.key+"@"+name)
	}
	return out
}

// ZFSClone makes a clone of a snapshot beside Proxmox.
func (n *Node) ZFSClone(volid, snap, to string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	s, r, v, err := n.findVolume(n.name, volid)
	if err != nil || v == nil {
		panic("fake Proxmox node: no volume " + volid)
	}
	_, nr, err := n.parseVolid(to)
	if err != nil {
		panic("fake Proxmox node: " + err.Message)
	}
	s.at(n.name)[nr.key] = &volume{key: nr.key, vmid: nr.vmid, format: v.format, size: v.size, parent: r.key, parentSnap: snap, ctime: time.Now(), snapSizes: map[string]int64{}}
}

// Damage makes a volume of a dir storage unreadable for qemu-img, as a qcow2
// file is whose header has only its magic.
func (n *Node) Damage(volid string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, _, v, err := n.findVolume(n.name, volid)
	if err != nil || v == nil {
		panic("fake Proxmox node: no volume " + volid)
	}
	v.damaged = true
}

// SetContent says what a storage is for, as pvesm set --content does.
func (n *Node) SetContent(storage string, content ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.storages[storage].Content = content
}

// HoldLock takes a lock file of the first node as another process would, and
// returns what lets it go. It panics when the lock is not free.
func (n *Node) HoldLock(file string) (release func()) {
	h := newHolder()
	at := n.name + ":" + file
	n.locks.mu.Lock()
	defer n.locks.mu.Unlock()
	if !n.locks.file(at).try(h, false) {
		panic("fake Proxmox node: " + file + " is held already")
	}
	h.held[at]++
	return func() { n.locks.drop(h) }
}

// Awaited returns how many processes have waited for a lock file of the first
// node so far.
func (n *Node) Awaited(file string) int {
	n.locks.mu.Lock()
	defer n.locks.mu.Unlock()
	return n.locks.file(n.name + ":" + file).awaited
}

// Locked reports whether a process holds a lock file of the first node.
func (n *Node) Locked(file string) bool {
	n.locks.mu.Lock()
	defer n.locks.mu.Unlock()
	l := n.locks.file(n.name + ":" + file)
	return l.exclusive != nil || len(l.shared) > 0
}
