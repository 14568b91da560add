package pvenode

import "strings"

// hotplug takes over what a running VM can take over. Options of fast plug
// always are; the others only when this call changed them.
func (c *call) hotplug(v *vm, modified map[string]bool, faults map[string]string) {
	n := c.n
	n.mu.Lock()
	pending, drop := v.pending.clone(), map[string]bool{}
	for k, f := range v.drop {
		drop[k] = f
	}
	n.mu.Unlock()
	for _, o := range sortedKeys(drop) {
		if !modified[o] || !hotDelete(o) {
			continue
		}
		if isDrive(o) {
			if err := c.detach(v, o, drop[o]); err != nil {
				faults[o] = "hotplug problem - " + err.Message + "\n"
				continue
			}
			n.mu.Lock()
			if v.run != nil {
				delete(v.run.disks, o)
			}
			n.mu.Unlock()
		}
		n.mu.Lock()
		delete(v.conf, o)
		delete(v.drop, o)
		n.mu.Unlock()
	}
	for _, o := range sortedKeys(pending) {
		val := pending[o]
		if !c.hotSet(v, o, val, modified) {
			continue
		}
		if old, had := v.conf[o]; had && isDrive(o) {
			c.registerReplaced(v, old, val)
		}
		if isDrive(o) {
			c.plugDrive(v, o, parseDrive(val))
		}
		c.take(v, o, val)
	}
}

func hotDelete(o string) bool {
	if strings.HasPrefix(o, "ide") || strings.HasPrefix(o, "sata") || o == "efidisk0" || o == "tpmstate0" {
		return false
	}
	d, ok := lookupOption(o)
	return ok && (d.hot || isDrive(o))
}

// hotSet reports whether a running VM applies a pending value.
func (c *call) hotSet(v *vm, o, val string, modified map[string]bool) bool {
	d, ok := lookupOption(o)
	if !ok {
		return false
	}
	fast := fastPlug[o] || strings.HasPrefix(o, "ipconfig")
	if fast {
		return true
	}
	if !modified[o] {
		return false
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	switch {
	case o == "balloon":
		old, had := v.conf[o]
		return (!had || old != "0") == (val != "0")
	case o == "agent":
		return agentProps.sameBut(v.conf[o], val, "fstrim_cloned_disks", "freeze-fs-on-backup", "guest-fsfreeze")
	case strings.HasPrefix(o, "ide"), strings.HasPrefix(o, "sata"):
		old, had := v.conf[o]
		return had && parseDrive(old).cdrom() && parseDrive(val).cdrom()
	case o == "efidisk0" || o == "tpmstate0":
		return false
	}
	return d.hot
}

// sameBut reports whether two values differ at most in the given keys.
func (f *propFormat) sameBut(a, b string, keys ...string) bool {
	ma, _ := f.parse(a)
	mb, _ := f.parse(b)
	for _, d := range f.props {
		if ma[d.name] != mb[d.name] && !contains(keys, d.name) {
			return false
		}
	}
	return true
}

// fastPlug are options without any effect on a running VM.
var fastPlug = setOf("lock", "name", "onboot", "shares", "startup", "description", "protection", "vmstatestorage", "hookscript", "tags",
	"citype", "ciuser", "cipassword", "ciupgrade", "cicustom", "searchdomain", "nameserver", "sshkeys", "migrate_downtime", "migrate_speed")

// plugDrive adds a drive to a running VM, also one that another VM has open.
func (c *call) plugDrive(v *vm, slot string, d drive) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if v.run != nil && !d.cdrom() {
		v.run.disks[slot] = d.file
	}
}
