package pvenode

import (
	"regexp"
	"time"
)

var busyRe = regexp.MustCompile(`dataset is busy`)

// apiStart is POST …/status/start.
func apiStart(c *call) (any, *Error) {
	if err := c.onlyRoot("skiplock", "stateuri", "targetstorage", "migratedfrom", "migration_type", "migration_network"); err != nil {
		return nil, err
	}
	vmid := c.p.num("vmid")
	return c.fork("qmstart", itoa(vmid), func(w *call) *Error {
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

// start starts a VM whose lock is held.
func (c *call) start(v *vm) *Error { return c.startFrom(v, "") }

// startFrom starts a VM whose lock is held, with the memory of a snapshot unless
// that is "".
func (c *call) startFrom(v *vm, snapshot string) *Error {
	n := c.n
	n.mu.Lock()
	suspended := v.conf["lock"] == "suspended"
	err := func() *Error {
		if v.template() {
			return dief("you can't start a vm if it's a template")
		}
		if !suspended && !c.p.yes("skiplock") {
			if err := v.checkLock(); err != nil {
				return err
			}
		}
		if v.run != nil {
			return dief("VM %d already running", v.id)
		}
		return nil
	}()
	n.mu.Unlock()
	if err != nil {
		return err
	}
	if !suspended && snapshot == "" {
		c.applyPending(v)
	}
	b, err := c.prepareBoot(v)
	if err != nil {
		return err
	}
	b.Snapshot = snapshot
	if suspended {
		c.say("Resuming suspended VM")
	}
	if err := n.point(c, "start.qemu"); err != nil {
		return err
	}
	if err := c.checkStart(v, b); err != nil {
		return err
	}
	guest, bootErr := n.boot(n.ctx, b)
	if bootErr != nil {
		c.say("%s", bootErr)
		return dief("start failed: QEMU exited with code 1")
	}
	n.mu.Lock()
	disks := map[string]string{}
	for slot, d := range b.Disks {
		disks[slot] = d.Volid
	}
	v.run = &running{guest: guest, pid: guest.Pid(), started: time.Now(), disks: disks}
	if v.run.pid == 0 {
		v.run.pid = n.pid()
	}
	state := ""
	if suspended {
		delete(v.conf, "lock")
		state = v.conf["vmstate"]
		delete(v.conf, "vmstate")
	}
	n.mu.Unlock()
	if state != "" {
		if err := c.free(state); err != nil {
			c.warn("%s", err.Message)
		}
	}
	n.watch(v, guest)
	return n.point(c, "start.running")
}

// watch makes a VM stopped when its QEMU ends by itself.
func (n *Node) watch(v *vm, g Guest) {
	n.workers.Go(func() {
		select {
		case <-g.Done():
		case <-n.ctx.Done(): // it began while the test ended
			g.Kill()
			<-g.Done()
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		if v.run != nil && v.run.guest == g {
			v.run = nil
		}
	})
}

// prepareBoot makes the seed and gathers the disks.
func (c *call) prepareBoot(v *vm) (Boot, *Error) {
	n := c.n
	n.mu.Lock()
	conf := v.conf.clone()
	n.mu.Unlock()
	b := Boot{VMID: v.id, Config: conf, Disks: map[string]Disk{}}
	for _, slot := range conf.drives() {
		d := parseDrive(conf[slot])
		if d.cloudinit() {
			if err := n.point(c, "start.cloudinit"); err != nil {
				return b, err
			}
			seed, err := c.seedFiles(v.id, conf)
			if err != nil {
				return b, err
			}
			c.say("generating cloud-init ISO")
			b.Seed = seed
		}
		if d.file == "none" || !volidRe.MatchString(d.file) {
			continue
		}
		size, err := c.volumeSize(d.file)
		if err != nil {
			return b, err
		}
		n.mu.Lock()
		s, r, vol, err := n.findVolume(c.node, d.file)
		n.mu.Unlock()
		if err != nil {
			return b, err
		}
		format := r.format
		if vol != nil {
			format = vol.format
		}
		b.Disks[slot] = Disk{Volid: d.file, Format: format, Path: s.filePath(r), File: n.HostPath(s.filePath(r)), Size: size, CDROM: d.cdrom()}
	}
	return b, nil
}

// checkStart is what makes QEMU fail: a missing bridge. A volume that another VM
// has open does not: Proxmox VE's QEMU locks no images.
func (c *call) checkStart(v *vm, b Boot) *Error {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	for i := range 32 {
		d := parseNet(b.Config["net"+itoa(i)])
		br := d["bridge"]
		if br == "" || n.nodes[c.node].bridges[br] {
			continue
		}
		if n.v9() {
			return dief("bridge '%s' does not exist", br)
		}
		tap := "tap" + itoa(v.id) + "i" + itoa(i)
		c.say("bridge '%s' does not exist", br)
		c.say("qemu-system-x86_64: -netdev type=tap,id=net%d,ifname=%s,script=/usr/libexec/qemu-server/pve-bridge,downscript=/usr/libexec/qemu-server/pve-bridgedown: network script /usr/libexec/qemu-server/pve-bridge failed with status 512", i, tap)
		return dief("start failed: QEMU exited with code 1")
	}
	return nil
}

// apiStop is POST …/status/stop.
func apiStop(c *call) (any, *Error) {
	if err := c.onlyRoot("skiplock", "keepActive", "migratedfrom"); err != nil {
		return nil, err
	}
	vmid := c.p.num("vmid")
	return c.fork("qmstop", itoa(vmid), func(w *call) *Error {
		if w.p.yes("overrule-shutdown") {
			w.overrule(vmid)
		}
		unlock, err := w.lockVM(vmid)
		if err != nil {
			return err
		}
		defer unlock()
		v, err := w.loadOther(vmid)
		if err != nil {
			return err
		}
		if !w.isRunning(v) {
			return nil
		}
		if !w.p.yes("skiplock") {
			if err := w.checkLock(v); err != nil {
				return err
			}
		}
		if err := w.n.point(w, "stop.qemu"); err != nil {
			return err
		}
		w.kill(v)
		return nil
	})
}

// kill ends QEMU and waits until it is gone.
func (c *call) kill(v *vm) {
	c.n.mu.Lock()
	r := v.run
	c.n.mu.Unlock()
	if r == nil {
		return
	}
	r.guest.Kill()
	<-r.guest.Done()
	c.n.mu.Lock()
	if v.run == r {
		v.run = nil
	}
	c.n.mu.Unlock()
}

// overrule aborts running shutdown tasks of a VM.
func (c *call) overrule(vmid int) {
	c.n.mu.Lock()
	var stop []*task
	for _, t := range c.n.tasks.all {
		if t.typ == "qmshutdown" && t.id == itoa(vmid) && t.status == "" {
			stop = append(stop, t)
		}
	}
	c.n.mu.Unlock()
	for _, t := range stop {
		c.say("Overruling shutdown task %s", t.upid)
		t.stop(errInterrupted)
		<-t.done
	}
}

// apiShutdown is POST …/status/shutdown.
func apiShutdown(c *call) (any, *Error) {
	if err := c.onlyRoot("skiplock", "keepActive"); err != nil {
		return nil, err
	}
	vmid := c.p.num("vmid")
	// Whether it is paused is checked first; an error of that is only logged.
	v, err := c.loadOther(vmid)
	switch {
	case err != nil:
		c.warn("%s\n", err.Message)
	case !c.isRunning(v):
		c.warn("VM %d not running\n", vmid)
	case c.paused(v):
		if !c.p.yes("forceStop") {
			return nil, dief("VM is paused - cannot shutdown")
		}
		c.warn("VM is paused - stop instead of shutdown")
	}
	return c.fork("qmshutdown", itoa(vmid), func(w *call) *Error { return w.shutdown(vmid) })
}

// paused reports whether a running VM is paused.
func (c *call) paused(v *vm) bool {
	c.n.mu.Lock()
	run := v.run
	c.n.mu.Unlock()
	return run != nil && run.guest.Status() == "paused"
}

func (c *call) shutdown(vmid int) *Error {
	unlock, err := c.lockVM(vmid)
	if err != nil {
		return err
	}
	defer unlock()
	v, err := c.loadOther(vmid)
	if err != nil {
		return err
	}
	if !c.isRunning(v) {
		return nil
	}
	if !c.p.yes("skiplock") {
		if err := c.checkLock(v); err != nil {
			return err
		}
	}
	c.n.mu.Lock()
	run := v.run
	withAgent := agentEnabled(v.conf)
	c.n.mu.Unlock()
	if run == nil {
		return nil
	}
	if withAgent && c.pingAgent(v, run) {
		_, _ = run.guest.Agent(c.ctx, "guest-shutdown", map[string]any{})
	} else {
		_ = run.guest.Powerdown()
	}
	if err := c.n.point(c, "shutdown.wait"); err != nil {
		return err
	}
	seconds := 60
	if c.p.has("timeout") {
		seconds = c.p.num("timeout")
	}
	t := time.NewTimer(time.Duration(seconds) * c.n.cfg.Waits.Second)
	defer t.Stop()
	select {
	case <-run.guest.Done():
		c.kill(v)
		return nil
	case <-c.ctx.Done():
		return c.interrupted()
	case <-t.C:
	}
	if !c.p.yes("forceStop") {
		return dief("VM quit/powerdown failed - got timeout")
	}
	c.say("VM still running - terminating now with SIGTERM")
	c.kill(v)
	return nil
}

func agentEnabled(conf section) bool {
	m, bad := agentProps.parse(conf["agent"])
	return bad == "" && m["enabled"] == "1"
}

// pingAgent reports whether the guest agent answers. If it does not, the call
// takes its timeout.
func (c *call) pingAgent(v *vm, run *running) bool {
	began := time.Now()
	if _, err := run.guest.Agent(c.ctx, "guest-ping", nil); err == nil {
		return true
	}
	c.pause(c.n.cfg.Waits.Agent - time.Since(began))
	word := "qmp"
	if c.n.v9() {
		word = "qga"
	}
	c.say("QEMU Guest Agent is not running - VM %d %s command 'guest-ping' failed - got timeout", v.id, word)
	return false
}

// runningCall begins a worker for a VM that must run.
func (c *call) runningCall(typ string, work func(w *call, v *vm, run *running) *Error) (any, *Error) {
	vmid := c.p.num("vmid")
	v, err := c.loadOther(vmid)
	if err != nil {
		return nil, err
	}
	if !c.isRunning(v) {
		return nil, dief("VM %d not running", vmid).exit(2)
	}
	return c.fork(typ, itoa(vmid), func(w *call) *Error {
		unlock, err := w.lockVM(vmid)
		if err != nil {
			return err
		}
		defer unlock()
		w.n.mu.Lock()
		run := v.run
		w.n.mu.Unlock()
		if run == nil {
			return dief("VM %d not running", vmid)
		}
		if !w.p.yes("skiplock") {
			if err := w.checkLock(v); err != nil {
				return err
			}
		}
		return work(w, v, run)
	})
}

// killGuests ends every guest: the end of the test.
func (n *Node) killGuests() {
	n.mu.Lock()
	var runs []*running
	for _, v := range n.vms {
		if v.run != nil {
			runs = append(runs, v.run)
		}
	}
	n.mu.Unlock()
	for _, r := range runs {
		r.guest.Kill()
		<-r.guest.Done()
	}
}
