package proxmox

import (
	"slices"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// Tests of Create for a sandbox that has a VM already, and maybe a user's work
// on its disk.

// A call for the VM of a sandbox fails with the same code as one for a number
// that is taken. The VM is neither destroyed nor replaced by another.
func TestOtherThingExists(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		for i, lost := range []bool{false, true} {
			spec := w.spec(1 + i)
			if lost {
				ok(t, "Create", w.driver.Create(t.Context(), spec))
				w.loseHandle(t, spec)
			}
			disarm := w.node.Fail("PUT /nodes/{node}/qemu/{vmid}/config", pvenode.Fault{VMID: spec.VMID, Error: "zfs error: cannot create 'tank/vm-1-disk-1': dataset already exists", Times: -1})
			wantCode(t, "Create", w.driver.Create(t.Context(), spec), agentlab.CodeExists)
			disarm()
			smbios := w.node.Config(spec.VMID)["smbios1"]
			ok(t, "Create again", w.open().Create(t.Context(), spec))
			if now := w.node.Config(spec.VMID)["smbios1"]; smbios == "" || now != smbios {
				t.Errorf("handle lost %v: the VM was destroyed", lost)
			}
			ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
		}
		if left := w.left(t); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
}

// The VM of a sandbox without a handle is replaced by a foreign one while Create
// works on it. Its user is told, and gets no empty VM in its place.
func TestAdoptedTakenOver(t *testing.T) {
	wide(t, func(t *testing.T, w *world) {
		spec := w.create(t, 1)
		w.loseHandle(t, spec)
		var untouched func(*testing.T)
		w.driver.crash = func(at string) {
			if at == "cloned" && untouched == nil {
				untouched = w.takeOver(t, spec.VMID)
			}
		}
		wantCode(t, "Create", w.driver.Create(t.Context(), spec), agentlab.CodeExists)
		wantCode(t, "Create", w.open().Create(t.Context(), spec), agentlab.CodeExists)
		if vms := w.node.VMs(); !slices.Equal(vms, []int{spec.VMID, templateVMID}) {
			t.Errorf("VMs %v", vms)
		}
		ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
		untouched(t)
	})
}

// A sandbox whose handle was lost is on another node than the one that was
// chosen, and a foreign volume there has its number: it is left alone.
func TestAdoptedOnAnotherNode(t *testing.T) {
	f := newFarm(t)
	n := pvenode.New(t, pvenode.Config{
		Nodes: []string{"pve1", "pve2"}, MemoryOf: map[string]int64{"pve1": 32 << 30, "pve2": 16 << 30}, Boot: f.boot, Waits: pvenode.ShortWaits(),
		Storages: []pvenode.Storage{{ID: "local-zfs", Type: pvenode.ZFSPool}},
	})
	w := &world{t: t, node: n, farm: f, dir: t.TempDir()}
	w.tokenID, w.secret = n.RootToken()
	n.AddTemplate(t, pvenode.Template{VMID: 9000, Node: "pve1"})
	n.AddTemplate(t, pvenode.Template{VMID: 9001, Node: "pve2"})
	w.alter = func(c *Config) {
		c.Nodes = []Node{{Name: "pve1", Templates: map[string]int{"base": 9000}, Host: bridge{f}}, {Name: "pve2", Templates: map[string]int{"base": 9001}, Host: bridge{f}}}
	}
	var err error
	w.image, err = w.open().Templates().Ensure(t.Context(), templateImage(9000), nil)
	ok(t, "Ensure", err)
	spec := w.create(t, 1)
	w.on(t, spec, "pve1")
	large := w.spec(2)
	large.Resources.MemoryMB = 24 << 10 // now pve2 has more room
	ok(t, "Create", w.driver.Create(t.Context(), large))
	volume := n.AddVolume(t, "local-zfs", spec.VMID, "vm-1001-disk-9", 1<<20)
	w.loseHandle(t, spec)
	ok(t, "Create", w.driver.Create(t.Context(), spec))
	w.on(t, spec, "pve1")
	ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	if left := n.Volumes(spec.VMID); !slices.Equal(left, []string{volume}) {
		t.Errorf("volumes: %q", left)
	}
}
