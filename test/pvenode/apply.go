package pvenode

import (
	"strings"
)

// apply writes a change to the pending section and takes over what can be
// taken over now; the config's lock is held.
func (c *call) apply(v *vm, ch *change) *Error {
	if err := c.n.point(c, "config.apply"); err != nil {
		return err
	}
	modified := map[string]bool{}
	for _, o := range ch.drop {
		if err := c.orNothing(v, func() *Error { return c.pendDelete(v, o, ch, modified) }); err != nil {
			return err
		}
	}
	keys := sortedKeys(ch.set)
	for _, k := range keys {
		if err := c.orNothing(v, func() *Error { return c.pendSet(v, k, ch.set[k], ch, modified) }); err != nil {
			return err
		}
	}
	c.n.mu.Lock()
	v.cleanupPending()
	nothing := len(v.pending)+len(v.drop) == 0
	run := v.run != nil
	c.n.mu.Unlock()
	if nothing {
		return nil
	}
	faults := map[string]string{}
	if run {
		c.hotplug(v, modified, faults)
	} else {
		c.coldplug(v, faults)
	}
	if len(faults) > 0 {
		return &Error{Status: 400, Message: "Parameter verification failed.", Params: faults}
	}
	return nil
}

// orNothing leaves the pending changes as they were when do fails: the config
// is written after each option.
func (c *call) orNothing(v *vm, do func() *Error) *Error {
	c.n.mu.Lock()
	pending, drop := v.pending.clone(), map[string]bool{}
	for k, force := range v.drop {
		drop[k] = force
	}
	c.n.mu.Unlock()
	err := do()
	if err != nil {
		c.n.mu.Lock()
		v.pending, v.drop = pending, drop
		c.n.mu.Unlock()
	}
	return err
}

// bootOrder reads and writes the order of boot devices.
func bootOrder(s string) []string {
	list, ok := strings.CutPrefix(s, "order=")
	if !ok {
		return nil
	}
	return splitList(list)
}

func printBootOrder(devs []string) string {
	if len(devs) == 0 {
		return " " // an empty order, as it is read back: the VM boots from nothing
	}
	return "order=" + strings.Join(devs, ";")
}

// pendDelete marks an option for removal.
func (c *call) pendDelete(v *vm, o string, ch *change, modified map[string]bool) *Error {
	n := c.n
	n.mu.Lock()
	val, ok := v.conf[o]
	pend, isPending := v.pending[o]
	if !ok {
		val = pend
	}
	if !ok && !isPending {
		n.mu.Unlock()
		c.warn("cannot delete '%s' - not set in current configuration!", o)
		return nil
	}
	modified[o] = true
	delete(v.pending, o)
	v.dropFromBoot(o, modified)
	protected := v.conf["protection"] == "1"
	n.mu.Unlock()
	switch {
	case isUnused(o):
		if protected {
			return dief("can't remove unused disk '%s' - protection mode enabled", parseDrive(val).file)
		}
		if err := c.need("/vms/"+itoa(v.id), "VM.Config.Disk"); err != nil {
			return err
		}
		if _, err := c.deallocate(v, o, parseDrive(val), false); err != nil {
			return err
		}
		n.mu.Lock()
		delete(v.conf, o)
		n.mu.Unlock()
		return nil
	case o == "vmstate":
		if protected {
			return dief("can't remove vmstate '%s' - protection mode enabled", val)
		}
		if _, err := c.deallocate(v, o, parseDrive(val), true); err != nil {
			return err
		}
		n.mu.Lock()
		delete(v.conf, o)
		n.mu.Unlock()
		return nil
	case isDrive(o):
		if protected {
			return dief("can't remove drive '%s' - protection mode enabled", o)
		}
		if err := c.drivePriv(v.id, parseDrive(val)); err != nil {
			return err
		}
		if isPending {
			c.registerUnused(v, parseDrive(pend))
		}
	case o == "tags":
		n.mu.Lock()
		delete(v.conf, o)
		n.mu.Unlock()
		return nil
	case strings.HasPrefix(o, "net") && numberedRe.MatchString(o) && ok && !c.root():
		if err := c.bridgeAllowed(parseNet(val)); err != nil {
			return err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	v.drop[o] = ch.force
	return nil
}

// dropFromBoot takes a device out of the boot order; mu is held.
func (v *vm) dropFromBoot(o string, modified map[string]bool) {
	boot, ok := v.pending["boot"]
	if !ok {
		boot = v.conf["boot"]
	}
	order := bootOrder(boot)
	if !contains(order, o) {
		return
	}
	var keep []string
	for _, d := range order {
		if d != o {
			keep = append(keep, d)
		}
	}
	v.pending["boot"] = printBootOrder(keep)
	modified["boot"] = true
}

// drivePriv is the privilege to change a drive, by what it holds.
func (c *call) drivePriv(vmid int, d drive) *Error {
	if c.root() {
		return nil
	}
	path := "/vms/" + itoa(vmid)
	switch {
	case d.cloudinit():
		return c.need(path, "VM.Config.Cloudinit", "VM.Config.CDROM")
	case d.cdrom():
		return c.need(path, "VM.Config.CDROM")
	}
	return c.need(path, "VM.Config.Disk")
}

// pendSet writes a new value to the pending section; drives are made first.
func (c *call) pendSet(v *vm, k, val string, ch *change, modified map[string]bool) *Error {
	n := c.n
	modified[k] = true
	n.mu.Lock()
	old, had := v.conf[k]
	pend, isPending := v.pending[k]
	n.mu.Unlock()
	if isPending && pend == val {
		return nil
	}
	if isDrive(k) {
		if had {
			if err := c.drivePriv(v.id, parseDrive(old)); err != nil {
				return err
			}
		}
		d := parseDrive(val)
		if err := c.drivePriv(v.id, d); err != nil {
			return err
		}
		if isPending {
			c.registerUnused(v, parseDrive(pend))
		}
		made, err := c.makeDrive(v.id, v, k, d)
		if err != nil {
			return err
		}
		val = made
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case isDrive(k):
		order := bootOrder(v.effective()["boot"])
		if d := parseDrive(val); d.cdrom() && !d.cloudinit() && len(order) > 0 && !contains(order, k) {
			v.pending["boot"] = printBootOrder(append(order, k))
			modified["boot"] = true
		}
	case k == "cipassword":
		v.conf[k] = hashPassword(val)
		delete(v.drop, k)
		return nil
	case k == "boot":
		for _, dev := range bootOrder(val) {
			_, inConf := v.conf[dev]
			_, inPending := v.pending[dev]
			_, inSet := ch.set[dev]
			if (!inConf && !inPending && !inSet) || contains(ch.drop, dev) {
				return dief("invalid bootorder: device '%s' does not exist'", dev)
			}
		}
	}
	v.pending[k] = val
	delete(v.drop, k)
	v.tidy()
	return nil
}

// cleanupPending removes what would change nothing; mu is held.
func (v *vm) cleanupPending() {
	for k, val := range v.pending {
		if cur, ok := v.conf[k]; ok && cur == val {
			delete(v.pending, k)
		}
	}
	for k := range v.drop {
		if _, ok := v.conf[k]; !ok {
			delete(v.drop, k)
		}
	}
}

// registerUnused keeps a detached volume as unusedN when the VM owns it; a
// cloud-init drive is freed at once.
func (c *call) registerUnused(v *vm, d drive) {
	if d.cloudinit() {
		if err := c.free(d.file); err != nil {
			c.warn("%s", err.Message)
		}
		return
	}
	if d.cdrom() {
		return
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if c.n.owner(d.file) == v.id {
		v.addUnused(c.n, d.file)
	}
}

// deallocate frees the volume of an unused line, or of a drive that is
// removed with force; of another owner's it frees nothing.
func (c *call) deallocate(v *vm, slot string, d drive, force bool) (bool, *Error) {
	if (!force && !isUnused(slot)) || (d.cdrom() && !d.cloudinit()) {
		return false, nil
	}
	c.n.mu.Lock()
	owner := c.n.owner(d.file)
	store, _, _ := strings.Cut(d.file, ":")
	used := c.n.usedElsewhere(v, slot, d.file)
	c.n.mu.Unlock()
	if owner != v.id {
		return true, nil
	}
	if err := c.need("/storage/"+store, "Datastore.AllocateSpace"); err != nil {
		return false, err
	}
	if used {
		return false, dief("unable to delete '%s' - volume is still in use (snapshot?)", d.file)
	}
	return true, c.free(d.file)
}

// usedElsewhere reports whether another drive of the VM or one of its
// snapshots uses a volume. The caller holds mu.
func (n *Node) usedElsewhere(v *vm, slot, volid string) bool {
	for k, val := range v.conf {
		if k != slot && isDrive(k) && n.sameVolume(parseDrive(val).file, volid) {
			return true
		}
	}
	for _, s := range v.snaps {
		for k, val := range s {
			if isDrive(k) && n.sameVolume(parseDrive(val).file, volid) {
				return true
			}
		}
	}
	return false
}

// detach carries out the removal of a drive.
func (c *call) detach(v *vm, slot string, force bool) *Error {
	c.n.mu.Lock()
	d := parseDrive(v.conf[slot])
	c.n.mu.Unlock()
	if force {
		if err := c.need("/vms/"+itoa(v.id), "VM.Config.Disk"); err != nil {
			return err
		}
		_, err := c.deallocate(v, slot, d, true)
		return err
	}
	c.registerUnused(v, d)
	return nil
}

// applyPending is what every cold start does first. What cannot be applied is
// a warning, and stays pending.
func (c *call) applyPending(v *vm) {
	c.n.mu.Lock()
	none := len(v.pending)+len(v.drop) == 0
	c.n.mu.Unlock()
	if !none {
		c.coldplug(v, map[string]string{})
	}
}

// coldplug applies all pending changes of a VM that does not run. What fails
// stays pending.
func (c *call) coldplug(v *vm, faults map[string]string) {
	n := c.n
	fail := func(o string, err *Error) {
		text := "unable to apply pending change " + o + " : " + err.Message + "\n"
		faults[o] = text
		c.warn("%s", strings.TrimSuffix(text, "\n"))
	}
	n.mu.Lock()
	drop := map[string]bool{}
	for k, f := range v.drop {
		drop[k] = f
	}
	n.mu.Unlock()
	for _, o := range sortedKeys(drop) {
		if isDrive(o) {
			if err := c.detach(v, o, drop[o]); err != nil {
				fail(o, err)
				continue
			}
		}
		n.mu.Lock()
		delete(v.drop, o)
		delete(v.conf, o)
		n.mu.Unlock()
	}
	n.mu.Lock()
	v.cleanupPending()
	pending := v.pending.clone()
	n.mu.Unlock()
	for _, o := range sortedKeys(pending) {
		if old, had := v.conf[o]; had && isDrive(o) {
			c.registerReplaced(v, old, pending[o])
		}
		c.take(v, o, pending[o])
	}
}

// registerReplaced keeps the volume of a drive that another one replaces.
func (c *call) registerReplaced(v *vm, old, now string) {
	c.n.mu.Lock()
	same := c.n.sameVolume(parseDrive(old).file, parseDrive(now).file)
	c.n.mu.Unlock()
	if !same {
		c.registerUnused(v, parseDrive(old))
	}
}

// take makes a pending value the current one, and drops the unused line of a
// volume that is a drive now.
func (c *call) take(v *vm, o, val string) {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	v.conf[o] = val
	delete(v.pending, o)
	v.tidy()
}
