package pvenode

import (
	"strings"
)

// apiClone is POST …/clone.
func apiClone(c *call) (any, *Error) {
	vmid, newid := c.p.num("vmid"), c.p.num("newid")
	if _, err := c.cloneCheck(vmid, newid); err != nil {
		return nil, err
	}
	return c.fork("qmclone", itoa(vmid), func(w *call) *Error { return w.clone(vmid, newid) })
}

// cloneCheck is what is checked before the fork, and again in the worker.
func (c *call) cloneCheck(vmid, newid int) (*clonePlan, *Error) {
	if err := c.checkPool(c.p.str("pool")); err != nil {
		return nil, err
	}
	if t := c.p.str("target"); t == c.node || t == "localhost" {
		delete(c.p, "target")
	}
	target := c.p.str("target")
	c.n.mu.Lock()
	_, known := c.n.nodes[target]
	c.n.mu.Unlock()
	if target != "" && !known {
		return nil, dief("no such cluster node '%s'", target)
	}
	if err := c.cloneStorage(target); err != nil {
		return nil, err
	}
	src, err := c.loadOther(vmid)
	if err != nil {
		return nil, err
	}
	if err := c.checkLock(src); err != nil {
		return nil, err
	}
	plan, err := c.clonePlan(src)
	if err != nil {
		return nil, err
	}
	shared, err := c.cloneAccess(plan)
	if err != nil {
		return nil, err
	}
	if target != "" && !shared {
		return nil, dief("can't clone VM to node '%s' (VM uses local storage)", target)
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if v := c.n.vms[newid]; v != nil && v.node == c.node { // of other nodes, and of containers, it knows only when it writes
		return nil, dief("unable to create VM %d: config file already exists", newid).exit(2)
	}
	return plan, c.clonePossible(plan)
}

// cloneStorage checks the storage that a full clone goes to.
func (c *call) cloneStorage(target string) *Error {
	id := c.p.str("storage")
	if id == "" {
		return nil
	}
	s, err := c.storeFor(id)
	if err != nil {
		return err
	}
	if !s.holds("images") {
		return badParam("storage", "storage '"+id+"' does not support vm images")
	}
	if target != "" && !s.Shared {
		return dief("can't clone to non-shared storage '%s'", id)
	}
	return nil
}

// cloneAccess checks the storages and bridges that the clone uses, and reports
// whether all its volumes are shared.
func (c *call) cloneAccess(plan *clonePlan) (shared bool, err *Error) {
	shared = true
	for _, slot := range plan.slots {
		d := plan.drives[slot]
		id, _, _ := strings.Cut(d.file, ":")
		s, err := c.storeFor(id)
		if err != nil {
			return false, err
		}
		shared = shared && s.Shared
		if to := c.p.str("storage"); to != "" {
			id = to
		}
		if d.cdrom() {
			continue
		}
		if err := c.need("/storage/"+id, "Datastore.AllocateSpace"); err != nil {
			return false, err
		}
	}
	if s := plan.from["vmstatestorage"]; s != "" {
		if err := c.need("/storage/"+s, "Datastore.AllocateSpace"); err != nil {
			return false, err
		}
	}
	if c.root() {
		return shared, nil
	}
	cpu, _, _ := strings.Cut(strings.TrimPrefix(plan.from["cpu"], "cputype="), ",")
	if model, custom := strings.CutPrefix(cpu, "custom-"); custom && c.n.v9() {
		if err := c.need("/mapping/cpu/"+model, "Mapping.Use"); err != nil {
			return false, err
		}
	}
	for _, k := range sortedKeys(plan.from) {
		if strings.HasPrefix(k, "net") && numberedRe.MatchString(k) {
			if err := c.bridgeAllowed(parseNet(plan.from[k])); err != nil {
				return false, err
			}
		}
	}
	return shared, nil
}

// clonePlan is what a clone makes of each drive.
type clonePlan struct {
	slots  []string
	drives map[string]drive
	full   map[string]bool
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
	p.slots = p.from.drives()
	var keep []string
	for _, slot := range p.slots {
		d := parseDrive(p.from[slot])
		if d.cdrom() && !d.cloudinit() {
			p.drives[slot] = d
			continue
		}
		keep = append(keep, slot)
		p.drives[slot] = d
		p.full[slot] = full || d.cloudinit()
	}
	p.slots = keep
	return p, nil
}

// clonePossible checks that every volume can be cloned so; mu is held.
func (c *call) clonePossible(p *clonePlan) *Error {
	for _, slot := range p.slots {
		if err := c.n.canClone(c.node, slot, p.drives[slot], p.full[slot], c.p.str("snapname")); err != nil {
			return err
		}
	}
	return nil
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
	of := ""
	if snap != "" {
		of = " a snapshot of"
	}
	return dief("%s clone feature is not supported for%s '%s' (%s)", word, of, d.file, slot)
}

// clone is the worker.
func (c *call) clone(vmid, newid int) *Error {
	src, err := c.loadOther(vmid)
	if err != nil {
		return err
	}
	unlock, err := c.lock(vmLockFile(vmid), !c.isRunning(src), c.n.cfg.Waits.CloneLock)
	if err != nil {
		return err
	}
	defer unlock()
	unlockNew, err := c.lock(vmLockFile(newid), false, c.n.cfg.Waits.CloneLock)
	if err != nil {
		return err
	}
	defer unlockNew()
	plan, err := c.cloneCheck(vmid, newid)
	if err != nil {
		return err
	}
	if c.n.v9() {
		c.say("creating a clone of VM %d with ID %d", vmid, newid)
	}
	dst, err := c.cloneStub(newid)
	if err != nil {
		return err
	}
	err = c.n.point(c, "clone.stub")
	var made []string
	if err == nil {
		made, err = c.cloneVolumes(dst, c.cloneConfig(src, plan), plan)
	}
	if err == nil {
		err = c.n.point(c, "clone.volumes")
	}
	if err != nil {
		c.undoClone(dst, made)
		return dief("clone failed: %s", err.Message)
	}
	return c.finishClone(dst)
}

// cloneStub writes the temporary configuration of the target until its first
// drive is created: a lock, and a description that is not the caller's. The
// cluster file system rejects a number of another node's VM or of any
// container.
func (c *call) cloneStub(newid int) (*vm, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if c.n.taken(newid) {
		return nil, dief("close (rename) atomic file '/etc/pve/nodes/%s/qemu-server/%d.conf' failed: File exists", c.node, newid)
	}
	dst := newVM(newid, c.node)
	dst.conf["lock"], dst.conf["description"] = "clone", " qmclone temporary file"
	c.n.vms[newid] = dst
	return dst, nil
}

// cloneConfig is the target's config, without its drives.
func (c *call) cloneConfig(src *vm, plan *clonePlan) section {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	conf := section{"lock": "clone"}
	for k, val := range plan.from {
		switch {
		case isUnused(k), contains(plan.slots, k), k == "lock", k == "template", k == "parent", k == "snaptime", k == "vmstate", k == "snapstate", k == "runningmachine", k == "runningcpu":
		case strings.HasPrefix(k, "net") && numberedRe.MatchString(k):
			d := parseNet(val)
			d["macaddr"] = n.newMAC()
			conf[k] = d.String()
		case k == "vmgenid":
			conf[k] = newUUID()
		default:
			conf[k] = val
		}
	}
	conf["smbios1"] = newSMBIOS(plan.from["smbios1"])
	conf["name"] = c.p.str("name")
	if conf["name"] == "" {
		conf["name"] = "Copy-of-VM-" + plan.from["name"]
		if plan.from["name"] == "" {
			conf["name"] = "Copy-of-VM-" + itoa(src.id)
		}
	}
	if d := c.p.str("description"); d != "" {
		conf["description"] = d
	}
	if f := n.fw[itoa(src.id)]; f != nil {
		n.fw[itoa(c.p.num("newid"))] = f.clone()
	}
	return conf
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

// cloneVolumes makes the volumes; the config is written after each of them.
func (c *call) cloneVolumes(dst *vm, conf section, plan *clonePlan) (made []string, err *Error) {
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
		conf[slot] = d.String()
		c.n.mu.Lock()
		dst.conf = conf.clone()
		c.n.mu.Unlock()
		if err := c.n.point(c, "clone.config"); err != nil {
			return made, err
		}
	}
	c.n.mu.Lock()
	dst.conf = conf
	c.n.mu.Unlock()
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
	if format == "" {
		format = v.format
	}
	if to.Type != Dir {
		format = "raw"
	}
	size := v.size // the present one, also of a copy of an older snapshot
	volid, err := c.alloc(storeID, vmid, format, "", size/1024)
	if err != nil {
		return "", err
	}
	c.allocated(volid)
	if n.cfg.Files != nil && from.Type == Dir && to.Type == Dir {
		n.mu.Lock()
		_, tr, _, _ := n.findVolume(c.node, volid)
		n.mu.Unlock()
		if err := n.cfg.Files.FullClone(c.ctx, n.HostPath(from.filePath(r)), snap, n.HostPath(to.filePath(tr)), format); err != nil {
			return volid, dief("copy failed: %v", err)
		}
	}
	for _, line := range progress(size) {
		c.say("%s", line)
	}
	return volid, nil
}

// allocated logs a new volume of a copy, like version 9.
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
	if k, snap := n.cfg.Contents, c.p.str("snapname"); k != nil && (snap != "" || c.p.yes("full")) {
		if err := k.Cloned(c.p.num("vmid"), snap, dst.id); err != nil {
			return dief("%s", err.Error())
		}
	}
	return n.point(c, "clone.finish")
}
