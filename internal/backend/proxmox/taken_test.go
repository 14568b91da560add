package proxmox

import (
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// Trap 16: a number may be a container's, or that of a VM of another node. A
// clone looks at neither before it begins: the cluster file system refuses its
// first file, in other words than those of a number that is taken on the same
// node. Whoever does not know them tries the same number for ever.
func TestTrap16NumberElsewhere(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell, nodes: []string{"pve", "pve2"}})
		w.node.AddContainer(t, 1001, "pve")
		w.node.AddContainer(t, 1002, "pve2")
		w.node.AddTemplate(t, pvenode.Template{VMID: 1003, Node: "pve2", Storage: "local-zfs"})
		for n := 1; n <= 3; n++ {
			s := w.spec(n)
			wantCode(t, "Create", w.driver.Create(t.Context(), s), agentlab.CodeExists)
			wantCode(t, "Start", w.driver.Start(t.Context(), s.Ref()), agentlab.CodeNotFound)
			ok(t, "Destroy", w.driver.Destroy(t.Context(), s.Ref()))
		}
		if _, err := pve.New(w.root).Config(t.Context(), "pve2", 1003); err != nil {
			t.Error(err)
		}
		ok(t, "Create of the next number", w.driver.Create(t.Context(), w.spec(4)))
	})
}

// Somebody destroys a sandbox by hand and makes a container with its number:
// the sandbox is gone, and its end must not fail for ever. A token must be
// allowed to see it.
func TestContainerInPlaceOfASandbox(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		spec := w.create(t, 1)
		root := pve.New(w.root).WithPoll(quick)
		u, err := root.Destroy(t.Context(), w.node.Name(), spec.VMID, false)
		ok(t, "destroy by hand", err)
		_, err = root.Wait(t.Context(), u)
		ok(t, "destroy by hand", err)
		w.node.AddContainer(t, spec.VMID, w.node.Name())
		d := w.open()
		if !shell {
			notKnown(t, "Start", d.Start(t.Context(), spec.Ref()), idOf(spec))
			notKnown(t, "Destroy", d.Destroy(t.Context(), spec.Ref()), idOf(spec))
			w.audited(t, spec.VMID)
		} else {
			wantCode(t, "Start", d.Start(t.Context(), spec.Ref()), agentlab.CodeNotFound)
		}
		ok(t, "Destroy", d.Destroy(t.Context(), spec.Ref()))
		if free, err := root.Free(t.Context(), spec.VMID); err != nil || free {
			t.Errorf("the container is gone: %v, %v", free, err)
		}
	})
}
