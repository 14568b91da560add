package pvenode

import (
	"strings"
	"time"
)

// apiSuspend is POST …/status/suspend: a pause, or with todisk a state file.
func apiSuspend(c *call) (any, *Error) {
	if err := c.onlyRoot("skiplock"); err != nil {
		return nil, err
	}
	vmid := c.p.num("vmid")
	v, err := c.loadOther(vmid)
	if err != nil {
		return nil, err
	}
	if !c.isRunning(v) {
		return nil, dief("VM %d not running", vmid).exit(2)
	}
	if !c.p.yes("todisk") {
		return c.runningCall("qmpause", func(_ *call, _ *vm, run *running) *Error {
			if err := run.guest.Pause(); err != nil {
				return dief("%s", err.Error())
			}
			return nil
		})
	}
	if err := c.need("/vms/"+itoa(vmid), "VM.Config.Disk"); err != nil {
		return nil, err
	}
	store := c.stateStorage(v)
	if err := c.need("/storage/"+store, "Datastore.AllocateSpace"); err != nil {
		return nil, err
	}
	return c.fork("qmsuspend", itoa(vmid), func(w *call) *Error { return w.suspendToDisk(v, store) })
}

// stateStorage is where a VM's memory goes.
func (c *call) stateStorage(v *vm) string {
	if s := c.p.str("statestorage"); s != "" {
		return s
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if s := v.conf["vmstatestorage"]; s != "" {
		return s
	}
	for _, slot := range v.conf.drives() {
		d := parseDrive(v.conf[slot])
		if id, _, ok := strings.Cut(d.file, ":"); ok && !d.cdrom() && c.n.storages[id] != nil {
			return id
		}
	}
	return "local"
}

// suspendToDisk leaves lock: suspending when it fails; REST cannot unlock.
func (c *call) suspendToDisk(v *vm, store string) *Error {
	unlock, err := c.lockVM(v.id)
	if err != nil {
		return err
	}
	if err := c.checkLock(v); err != nil {
		unlock()
		return err
	}
	c.n.mu.Lock()
	v.conf["lock"] = "suspending"
	mem := max(atoi(v.conf["memory"]), 16)
	s := c.n.storages[store]
	c.n.mu.Unlock()
	name := "vm-" + itoa(v.id) + "-state-suspend-" + time.Now().Format("2006-01-02")
	if s != nil && s.Type == Dir {
		name += ".raw"
	}
	volid, err := c.alloc(store, v.id, "raw", name, int64(2*mem+500)*1024)
	if err != nil { // the config was not written
		c.n.mu.Lock()
		delete(v.conf, "lock")
		c.n.mu.Unlock()
		unlock()
		return err
	}
	c.n.mu.Lock()
	v.conf["vmstate"] = volid
	run := v.run
	c.n.mu.Unlock()
	unlock()
	err = c.n.point(c, "suspend.state")
	unlock, lerr := c.lockVM(v.id)
	if lerr != nil {
		return lerr
	}
	defer unlock()
	if err != nil || run == nil {
		_ = c.free(volid)
		c.n.mu.Lock()
		delete(v.conf, "vmstate")
		c.n.mu.Unlock()
		if err == nil {
			err = dief("VM %d not running", v.id)
		}
		return err
	}
	c.say("State saved, quitting")
	c.kill(v)
	c.n.mu.Lock()
	v.conf["lock"] = "suspended"
	c.n.mu.Unlock()
	return nil
}

// apiResume is POST …/status/resume.
func apiResume(c *call) (any, *Error) {
	if err := c.onlyRoot("skiplock", "nocheck"); err != nil {
		return nil, err
	}
	vmid := c.p.num("vmid")
	v, err := c.loadOther(vmid)
	if err != nil {
		return nil, err
	}
	c.n.mu.Lock()
	onDisk := v.conf["lock"] == "suspended"
	c.n.mu.Unlock()
	if onDisk {
		return c.fork("qmresume", itoa(vmid), func(w *call) *Error {
			unlock, err := w.lockVM(vmid)
			if err != nil {
				return err
			}
			defer unlock()
			return w.start(v)
		})
	}
	if !c.isRunning(v) {
		return nil, dief("VM %d not running", vmid).exit(2)
	}
	return c.fork("qmresume", itoa(vmid), func(w *call) *Error {
		unlock, err := w.lockVM(vmid)
		if err != nil {
			return err
		}
		defer unlock()
		w.n.mu.Lock()
		run := v.run
		w.n.mu.Unlock()
		switch {
		case run == nil:
			return dief("VM %d not running", vmid)
		case run.guest.Status() == "running":
			return nil
		}
		if !w.p.yes("skiplock") {
			if err := w.checkLock(v); err != nil {
				return err
			}
		}
		if err := run.guest.Resume(); err != nil {
			return dief("%s", err.Error())
		}
		return nil
	})
}

// apiReset is POST …/status/reset.
func apiReset(c *call) (any, *Error) {
	if err := c.onlyRoot("skiplock"); err != nil {
		return nil, err
	}
	return c.runningCall("qmreset", func(_ *call, _ *vm, run *running) *Error {
		if err := run.guest.Reset(); err != nil {
			return dief("%s", err.Error())
		}
		return nil
	})
}

// apiReboot is POST …/status/reboot: a shutdown and a cold start, which
// applies pending changes.
func apiReboot(c *call) (any, *Error) {
	vmid := c.p.num("vmid")
	v, err := c.loadOther(vmid)
	if err != nil {
		return nil, err
	}
	c.n.mu.Lock()
	run := v.run
	c.n.mu.Unlock()
	switch {
	case run == nil:
		return nil, dief("VM %d not running", vmid).exit(2)
	case run.guest.Status() == "paused":
		return nil, dief("VM is paused - cannot shutdown")
	}
	return c.fork("qmreboot", itoa(vmid), func(w *call) *Error {
		if err := w.shutdown(vmid); err != nil {
			return err
		}
		unlock, err := w.lockVM(vmid)
		if err != nil {
			return err
		}
		defer unlock()
		return w.start(v)
	})
}

var powerCalls = []endpoint{
	{method: "POST", path: "/nodes/{node}/qemu/{vmid}/status/suspend", perm: vmPriv("VM.PowerMgmt"), run: apiSuspend, params: []param{
		boolean("skiplock"), boolean("todisk"), {name: "statestorage", format: formatStorageID, requires: "todisk"},
	}},
	{method: "POST", path: "/nodes/{node}/qemu/{vmid}/status/resume", perm: vmPriv("VM.PowerMgmt"), run: apiResume, params: []param{boolean("skiplock"), boolean("nocheck")}},
	{method: "POST", path: "/nodes/{node}/qemu/{vmid}/status/reset", perm: vmPriv("VM.PowerMgmt"), run: apiReset, params: []param{boolean("skiplock")}},
	{method: "POST", path: "/nodes/{node}/qemu/{vmid}/status/reboot", perm: vmPriv("VM.PowerMgmt"), run: apiReboot, params: []param{integer("timeout").atLeast(0)}},
}
