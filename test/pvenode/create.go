package pvenode

import (
	"strings"
)

var createTable = []endpoint{
	{method: "POST", path: "/nodes/{node}/qemu", options: true, run: apiCreate, params: []param{
		integer("vmid").must().as(formatVMID), str("pool").as(formatPool), boolean("start"), storageParam, boolean("force"),
		boolean("unique"), integer("bwlimit").atLeast(0),
	}},
}

// createParams are the parameters of create that are no options.
var createParams = setOf("node", "vmid", "pool", "start", "storage", "force", "unique", "bwlimit")

// apiCreate is POST /nodes/{node}/qemu. Restoring from an archive is not
// modelled: the parameter is unknown.
func apiCreate(c *call) (any, *Error) {
	vmid, poolID := c.p.num("vmid"), c.p.str("pool")
	if err := c.checkPool(poolID); err != nil {
		return nil, err
	}
	if !c.may("/vms/"+itoa(vmid), "VM.Allocate") && (poolID == "" || !c.may("/pool/"+poolID, "VM.Allocate")) {
		return nil, denied("")
	}
	ch := &change{set: section{}}
	for k := range c.p {
		if !createParams[k] {
			ch.set[k] = c.p.str(k)
		}
	}
	if k, ok := ch.set["sshkeys"]; ok && !validKeys(decodeURL(k)) {
		return nil, dief("SSH public key validation error")
	}
	if err := c.normalize(vmid, ch); err != nil {
		return nil, err
	}
	if err := c.createAllowed(vmid, poolID, ch); err != nil {
		return nil, err
	}
	v, err := c.createConfig(vmid)
	if err != nil {
		return nil, dief("unable to create VM %d - %s", vmid, err.Message)
	}
	return c.fork("qmcreate", itoa(vmid), func(w *call) *Error {
		if err := w.createVM(v, ch); err != nil {
			w.n.forget(vmid)
			return dief("unable to create VM %d - %s", vmid, err.Message)
		}
		if !w.p.yes("start") {
			return nil
		}
		w.say("Execute autostart")
		unlock, err := w.lockVM(vmid)
		if err != nil {
			return err
		}
		defer unlock()
		if err := w.start(v); err != nil {
			w.warn("%s", err.Message)
		}
		return nil
	})
}

func (c *call) createAllowed(vmid int, poolID string, ch *change) *Error {
	if c.root() {
		return nil
	}
	for _, k := range sortedKeys(ch.set) {
		if err := c.optionAllowed(vmid, poolID, k); err != nil {
			return err
		}
		switch {
		case isDrive(k):
			if err := c.driveAllowed(vmid, ch.set[k], poolID); err != nil {
				return err
			}
		case strings.HasPrefix(k, "net") && numberedRe.MatchString(k):
			if err := c.bridgeAllowed(parseNet(ch.set[k])); err != nil {
				return err
			}
		}
	}
	return nil
}

// createConfig writes a config with lock: create, unless there is one.
func (c *call) createConfig(vmid int) (*vm, *Error) {
	unlock, err := c.lock(vmLockFile(vmid), false, c.n.cfg.Waits.CreateLock)
	if err != nil {
		return nil, err
	}
	defer unlock()
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	if old := n.vms[vmid]; old != nil {
		return nil, dief("VM %d already exists on node '%s'", vmid, old.node)
	}
	if node := n.cts[vmid]; node != "" {
		return nil, dief("CT %d already exists on node '%s'", vmid, node)
	}
	v := newVM(vmid, c.node)
	v.conf["lock"] = "create"
	n.vms[vmid] = v
	return v, nil
}

// createVM makes the drives and writes the config.
func (c *call) createVM(v *vm, ch *change) *Error {
	unlock, err := c.lock(vmLockFile(v.id), false, c.n.cfg.Waits.CloneLock)
	if err != nil {
		return err
	}
	defer unlock()
	conf := ch.set.clone()
	slots := conf.drives()
	driveOrder(slots)
	var made []string
	for _, slot := range slots {
		asked := parseDrive(conf[slot])
		line, err := c.makeDrive(v.id, nil, slot, asked)
		if err != nil {
			for _, volid := range made {
				if err := c.free(volid); err != nil {
					c.warn("%s", err.Message)
				}
			}
			return err
		}
		if file := parseDrive(line).file; file != asked.file {
			made = append(made, file)
		}
		conf[slot] = line
	}
	if conf["boot"] == "" {
		conf["boot"] = printBootOrder(defaultBoot(conf))
	}
	if conf["smbios1"] == "" {
		conf["smbios1"] = "uuid=" + newUUID()
	}
	if conf["vmgenid"] == "" || conf["vmgenid"] == "1" {
		conf["vmgenid"] = newUUID()
	}
	if p := conf["cipassword"]; p != "" {
		conf["cipassword"] = hashPassword(p)
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	conf["meta"] = "creation-qemu=7.2.22,ctime=" + itoa(int(c.task.start.Unix()))
	v.conf = conf
	c.n.joinPool(c.p.str("pool"), v.id)
	return nil
}

// defaultBoot are the devices that a new VM boots from: its first disk, its
// first CD, its first network device.
func defaultBoot(conf section) []string {
	slots := conf.drives()
	driveOrder(slots)
	var disk, cd string
	for _, slot := range slots {
		d := parseDrive(conf[slot])
		switch {
		case d.cloudinit() || slot == "efidisk0" || slot == "tpmstate0":
		case d.cdrom() && cd == "":
			cd = slot
		case !d.cdrom() && disk == "":
			disk = slot
		}
	}
	var out []string
	for _, s := range []string{disk, cd} {
		if s != "" {
			out = append(out, s)
		}
	}
	for i := range 32 {
		if conf["net"+itoa(i)] != "" {
			return append(out, "net"+itoa(i))
		}
	}
	return out
}

// joinPool puts a VM into a pool; mu is held.
func (n *Node) joinPool(id string, vmid int) {
	if p := n.pools[id]; p != nil {
		p.vms[vmid] = true
	}
}
