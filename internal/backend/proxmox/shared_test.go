package proxmox

import (
	"testing"

	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// Proxmox: a clone goes to another node only where every volume is on shared
// storage, that of the cloud-init drive too. A template of which that is not so
// is used on its own node.
func TestPlacementOfHalfSharedTemplate(t *testing.T) {
	f := newFarm(t)
	n := pvenode.New(t, pvenode.Config{
		Nodes: []string{"pve1", "pve2"}, MemoryOf: map[string]int64{"pve1": 8 << 30, "pve2": 64 << 30}, Boot: f.boot, Waits: pvenode.ShortWaits(),
		Storages: []pvenode.Storage{{ID: "shared-zfs", Type: pvenode.ZFSPool, Shared: true}, {ID: "local-zfs", Type: pvenode.ZFSPool}},
	})
	n.AddTemplate(t, pvenode.Template{VMID: 9000, Storage: "shared-zfs", Node: "pve1", Options: map[string]string{"ide2": "local-zfs:cloudinit"}})
	w := &world{t: t, node: n, farm: f, dir: t.TempDir()}
	w.tokenID, w.secret = n.RootToken()
	w.root = w.rest(w.tokenID, w.secret)
	w.alter = func(c *Config) {
		c.Nodes = []Node{{Name: "pve1", Templates: map[string]int{"base": 9000}, Host: bridge{f}}, {Name: "pve2", Templates: map[string]int{"base": 9000}, Host: bridge{f}}}
	}
	d := w.open()
	var err error
	w.image, err = d.Templates().Ensure(t.Context(), "base", nil)
	ok(t, "Ensure", err)
	spec := w.spec(1)
	ok(t, "Create", d.Create(t.Context(), spec))
	if _, err := pve.New(w.root).Config(t.Context(), "pve1", spec.VMID); err != nil {
		t.Error(err)
	}
	ok(t, "Start", d.Start(t.Context(), spec.Ref()))
	ok(t, "Destroy", d.Destroy(t.Context(), spec.Ref()))
}
