package proxmox

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// Tests of numbers that change hands while the driver works: between its look
// at a VM and what it does to it, an administrator destroys the VM and makes
// another one with its number.

// takeOver destroys a VM by hand and makes a foreign one in its place.
func (w *world) takeOver(t *testing.T, vmid int) (untouched func(*testing.T)) {
	t.Helper()
	w.node.PowerOff(vmid)
	ok(t, "unprotect by hand", w.admin(t, pve.Put, w.vmPath(vmid)+"/config", map[string][]string{"protection": {"0"}}))
	ok(t, "destroy by hand", w.admin(t, pve.Delete, w.vmPath(vmid), nil))
	return w.foreign(t, vmid, "foreign", nil)
}

// wide are the worlds in which the driver may do what it wants: only its own
// care keeps it from touching what is foreign.
func wide(t *testing.T, test func(t *testing.T, w *world)) {
	both(t, func(t *testing.T, shell bool) { test(t, newWorld(t, worldConfig{shell: shell, admin: true})) })
}

// A process dies after its clone; when the next one continues, a foreign VM
// has the number. Without a check it would give that VM our mark, and destroy
// it later.
func TestVMIDReusedDuringCreate(t *testing.T) {
	wide(t, func(t *testing.T, w *world) {
		for i, point := range []string{"cloned", "about to be configured", "configured"} {
			spec := w.spec(1 + i)
			w.driver.crash = func(at string) {
				if at == point {
					panic(died{at})
				}
			}
			if err := (mortal{w.driver}).Create(t.Context(), spec); err == nil {
				t.Fatalf("%s: it did not die", point)
			}
			untouched := w.takeOver(t, spec.VMID)
			d := w.open()
			w.elsewhere(t, spec)
			untouched(t)
			ok(t, "Destroy", d.Destroy(t.Context(), spec.Ref()))
			untouched(t)
		}
	})
}

// The same within one call: the change is refused by the node, as it is not of
// the configuration that was looked at.
func TestVMIDReusedBeforeSet(t *testing.T) {
	wide(t, func(t *testing.T, w *world) {
		spec := w.spec(1)
		var untouched func(*testing.T)
		w.driver.crash = func(at string) {
			if at == "about to be configured" && untouched == nil {
				untouched = w.takeOver(t, spec.VMID)
			}
		}
		w.elsewhere(t, spec)
		untouched(t)
	})
}

// While the power of a VM is cut before its end, or its destruction is tried
// again, minutes may pass.
func TestVMIDReusedBeforeDestroy(t *testing.T) {
	wide(t, func(t *testing.T, w *world) {
		spec := w.create(t, 1)
		ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
		var untouched func(*testing.T)
		w.driver.crash = func(at string) {
			if at == "destroy about to be sent" {
				untouched = w.takeOver(t, spec.VMID)
			}
		}
		ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
		untouched(t)
		w.driver.crash = nil

		spec = w.create(t, 2)
		w.node.Fail("DELETE /nodes/{node}/qemu/{vmid}", pvenode.Fault{
			VMID: spec.VMID, Error: "can't lock file '/var/lock/qemu-server/lock-1002.conf' - got timeout",
			Reached: func() { untouched = w.takeOver(t, spec.VMID) },
		})
		ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
		untouched(t)
		if left := w.left(t, 1001, 1002); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
}

// While a guest has its time to shut down.
func TestVMIDReusedDuringShutdown(t *testing.T) {
	wide(t, func(t *testing.T, w *world) {
		spec := w.create(t, 1)
		ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
		w.farm.mu.Lock()
		w.farm.machines[spec.VMID].Deaf = true
		w.farm.mu.Unlock()
		var untouched func(*testing.T)
		w.driver.crash = func(at string) {
			if at == "shutdown failed" {
				untouched = w.takeOver(t, spec.VMID)
			}
		}
		wantCode(t, "Stop", w.driver.Stop(t.Context(), spec.Ref(), time.Second), agentlab.CodeNotFound)
		untouched(t)
	})
}

// Nothing is written into the guest of a foreign VM.
func TestVMIDReusedBeforeControlFile(t *testing.T) {
	w := newWorld(t, worldConfig{admin: true})
	spec := w.create(t, 1)
	ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
	untouched := w.takeOver(t, spec.VMID)
	w.open() // what was seen is long ago
	_, err := w.driver.DialControl(t.Context(), spec.Ref())
	wantCode(t, "DialControl", err, agentlab.CodeNotFound)
	if n := w.node.Calls()["POST /nodes/{node}/qemu/{vmid}/agent/file-write"]; n != 0 {
		t.Errorf("%d files were written into it", n)
	}
	untouched(t)
}

// An administrator clones a sandbox by hand: the copy has its description and
// its tags, but is foreign.
func TestClonedManually(t *testing.T) {
	wide(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		spec := w.create(t, 1)
		ok(t, "clone by hand", w.admin(t, pve.Post, w.vmPath(spec.VMID)+"/clone", map[string][]string{"newid": {"1005"}, "full": {"1"}, "name": {spec.Name}}))
		cfg := w.node.Config(1005)
		if !strings.Contains(cfg["description"], markUID+spec.UID) || taggedUID(cfg["tags"]) != spec.UID {
			t.Fatalf("the copy does not bear the mark, this test proves nothing: %v", cfg)
		}
		before := w.look(t, 1005)
		copied := backend.Ref{UID: spec.UID, Handle: "1005"} // an outdated number leads to the copy, its mark to the sandbox
		for _, lost := range []bool{false, true} {
			if lost {
				w.loseHandle(t, spec)
			}
			for _, d := range []*Driver{w.driver, w.open()} {
				all, err := d.List(ctx)
				ok(t, "List", err)
				if slices.ContainsFunc(all, func(in backend.Instance) bool { return in.Ref.Handle == "1005" }) {
					t.Errorf("listed as ours: %+v", all)
				}
				in, err := d.Inspect(ctx, copied)
				if ok(t, "Inspect", err); in.Ref != refOf(idOf(spec)) {
					t.Errorf("inspected: %+v", in)
				}
				ok(t, "Stop", d.Stop(ctx, copied, 0))
			}
		}
		for range 2 {
			ok(t, "Destroy", w.driver.Destroy(ctx, copied))
			_, err := w.driver.Inspect(ctx, copied)
			wantCode(t, "Inspect", err, agentlab.CodeNotFound)
		}
		if now := w.look(t, 1005); now != before {
			t.Errorf("the copy was\n%s\nand is\n%s", before, now)
		}
		if left := w.left(t, 1005); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
		// And a sandbox that gets a number which a copy has is not made there.
		s := spec
		s.VMID = 1005
		w.elsewhere(t, s)
		ok(t, "Destroy", w.driver.Destroy(ctx, s.Ref()))
		if now := w.look(t, 1005); now != before {
			t.Errorf("%s: the copy was\n%s\nand is\n%s", strconv.Itoa(s.VMID), before, now)
		}
	})
}

// A VM that an administrator suspended to a disk keeps a lock, with which
// Proxmox destroys it all the same: no root is needed to unlock it.
func TestDestroySuspendedToDisk(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		spec := w.create(t, 1)
		ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
		ok(t, "suspend by hand", w.admin(t, pve.Post, w.vmPath(spec.VMID)+"/status/suspend", map[string][]string{"todisk": {"1"}}))
		if lock := w.node.Config(spec.VMID)["lock"]; lock != lockSuspended {
			t.Fatalf("lock %q: this test proves nothing", lock)
		}
		ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
		if left := w.left(t); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
}

// A nightly backup of all VMs locks one after the other, and its task has no
// VM number: its lock is not removed.
func TestDestroyDuringBackup(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		spec := w.create(t, 1)
		w.node.Edit(spec.VMID, map[string]string{"lock": "backup"})
		wantCode(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()), agentlab.CodeBusy)
		if lock := w.node.Config(spec.VMID)["lock"]; lock != "backup" {
			t.Errorf("the lock is %q", lock)
		}
		w.node.Edit(spec.VMID, map[string]string{"lock": ""})
		ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	})
}

// Moved by hand to a node whose network is not within reach, a sandbox runs
// without its policy: it counts as failed and can be stopped there, and
// nothing of it stays on the node where it was.
func TestMovedManually(t *testing.T) {
	for _, to := range []string{"pve2", "pve3"} { // of the configuration without a network; not of it
		f := newFarm(t)
		st := pvenode.Storage{ID: "shared-zfs", Type: pvenode.ZFSPool, Shared: true}
		n := pvenode.New(t, pvenode.Config{Nodes: []string{"pve1", "pve2", "pve3"}, Storages: []pvenode.Storage{st}, Boot: f.boot, Waits: pvenode.ShortWaits()})
		n.AddTemplate(t, pvenode.Template{VMID: templateVMID, Storage: st.ID, Node: "pve1"})
		w := &world{t: t, node: n, farm: f, dir: t.TempDir(), alter: func(c *Config) {
			c.Nodes = []Node{{Name: "pve1", Templates: map[string]int{"base": templateVMID}, Host: bridge{f}}, {Name: "pve2"}}
		}}
		w.tokenID, w.secret = n.RootToken()
		d := w.open()
		var err error
		w.image, err = d.Templates().Ensure(t.Context(), "base", nil)
		ok(t, "Ensure", err)
		spec := w.create(t, 1)
		ok(t, "Start", d.Start(t.Context(), spec.Ref()))
		n.Move(spec.VMID, to)
		w.forgetImpressions(spec.Ref())
		for _, in := range []backend.Instance{w.inspect(t, spec.Ref()), *w.listed(t, spec.Ref())} {
			if in.Power != backend.PowerCrashed || !strings.Contains(in.Reason, to) {
				t.Errorf("%s: %+v", to, in)
			}
		}
		ok(t, "Stop", d.Stop(t.Context(), spec.Ref(), 0))
		if n.Running(spec.VMID) {
			t.Errorf("%s: it runs", to)
		}
		if err := d.Start(t.Context(), spec.Ref()); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
			t.Errorf("%s: Start: %v", to, err)
		}
		ok(t, "Destroy", d.Destroy(t.Context(), spec.Ref()))
		if vms := n.VMs(); len(vms) != 1 || len(f.put) != 0 {
			t.Errorf("%s: left: VMs %v, guests %v", to, vms, f.put)
		}
	}
}
