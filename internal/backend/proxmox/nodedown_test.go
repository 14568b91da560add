package proxmox

import (
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// twoNodes is a world with the nodes pve1, which answers, and pve2, where
// sandboxes go first.
func twoNodes(t *testing.T, shell bool) *world {
	t.Helper()
	return twoNodesWith(t, shell, true)
}

// twoNodesWith is twoNodes whose storage for snippets is shared or not.
func twoNodesWith(t *testing.T, shell, shared bool) *world {
	t.Helper()
	f := newFarm(t)
	st := pvenode.Storage{ID: "shared-zfs", Type: pvenode.ZFSPool, Shared: true}
	host, local := seedStorage(t)
	local.Shared = shared
	n := pvenode.New(t, pvenode.Config{
		Dir: host, Nodes: []string{"pve1", "pve2"}, MemoryOf: map[string]int64{"pve1": 16 << 30, "pve2": 32 << 30},
		Storages: []pvenode.Storage{st, local}, Boot: f.boot, Waits: pvenode.ShortWaits(),
	})
	n.AddTemplate(t, pvenode.Template{VMID: 9000, Storage: st.ID, Node: "pve1"})
	w := &world{t: t, node: n, farm: f, dir: t.TempDir(), shell: shell}
	w.tokenID, w.secret = n.RootToken()
	w.root = w.rest(w.tokenID, w.secret)
	w.alter = func(c *Config) {
		c.Nodes = []Node{{Name: "pve1", Templates: map[string]int{"base": 9000}, Host: bridge{f}, Local: true}, {Name: "pve2", Host: bridge{f}}}
	}
	var err error
	w.image, err = w.open().Templates().Ensure(t.Context(), templateImage(9000), nil)
	ok(t, "Ensure", err)
	return w
}

// on fails the test unless the VM of a sandbox is on a node.
func (w *world) on(t *testing.T, spec backend.Spec, node string) {
	t.Helper()
	if h, err := w.driver.readHandle(spec.Ref()); err != nil || h.Node != node {
		t.Fatalf("it is on %s, %v: this test proves nothing", h.Node, err)
	}
}

// A node that is down keeps no other from getting new sandboxes and from being
// looked after, and what is on it is neither gone nor anybody else's.
func TestNodeDown(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := twoNodes(t, shell)
		n, d := w.node, w.driver
		there := w.create(t, 1)
		w.on(t, there, "pve2")
		ok(t, "Start", d.Start(t.Context(), there.Ref()))
		n.SetOnline("pve2", false)
		d = w.open()
		taken, err := d.Taken(t.Context(), 1000, 1999)
		if err != nil || !slices.Contains(taken, there.VMID) {
			t.Fatalf("Taken: %v, %v", taken, err)
		}
		here := w.create(t, 2)
		ok(t, "Start", d.Start(t.Context(), here.Ref()))
		all, err := d.List(t.Context())
		ok(t, "List", err)
		power := map[string]backend.PowerState{}
		for _, in := range all {
			power[in.Ref.UID] = in.Power
		}
		if len(all) != 2 || power[here.UID] != backend.PowerRunning || power[there.UID] != backend.PowerPartial {
			t.Errorf("listed: %+v", all)
		}
		if _, err := d.Inspect(t.Context(), there.Ref()); err == nil || agentlab.CodeOf(err) == agentlab.CodeNotFound {
			t.Errorf("Inspect of what cannot be seen: %v", err)
		}
		if err := d.Destroy(t.Context(), there.Ref()); err == nil {
			t.Error("Destroy of what cannot be reached: no error")
		}
		w.loseHandle(t, there)
		marked := backend.Ref{UID: there.UID}
		_, err = d.Inspect(t.Context(), marked)
		wantCode(t, "Inspect by the mark", err, agentlab.CodeUnavailable)
		wantCode(t, "Destroy by the mark", d.Destroy(t.Context(), marked), agentlab.CodeUnavailable)
		if taken, err := w.open().Taken(t.Context(), 1000, 1999); err != nil || !slices.Contains(taken, there.VMID) {
			t.Errorf("Taken without a handle: %v, %v", taken, err)
		}
		n.SetOnline("pve2", true)
		for _, ref := range []backend.Ref{here.Ref(), marked} {
			ok(t, "Destroy", d.Destroy(t.Context(), ref))
		}
		if vms := n.VMs(); len(vms) != 1 {
			t.Errorf("left: %v", vms)
		}
	})
}

// While a node is down, what does not exist can be destroyed: a sandbox that
// was never made, and one that was destroyed before.
func TestNodeDownDestroyAbsent(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := twoNodes(t, shell)
		ctx := t.Context()
		w.create(t, 1)
		w.node.SetOnline("pve2", false)
		d := w.open()
		never, gone := w.spec(2), w.create(t, 3)
		wantCode(t, "UpdateNetwork", d.UpdateNetwork(ctx, never.Ref(), never.Network), agentlab.CodeNotFound)
		for _, ref := range []backend.Ref{never.Ref(), refOf(idOf(never)), gone.Ref(), gone.Ref(), refOf(idOf(gone)), {UID: testUID(4), Handle: "1001"}} {
			ok(t, "Destroy", d.Destroy(ctx, ref))
			_, err := d.Inspect(ctx, ref)
			wantCode(t, "Inspect", err, agentlab.CodeNotFound)
		}
	})
}

// A sandbox whose VM is on a node that is down gets no second VM when its
// handle is lost, and the error names the VM and the node.
func TestNodeDownNoSecondVM(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := twoNodes(t, shell)
		ctx, spec := t.Context(), w.spec(1)
		untouched := w.foreign(t, spec.VMID, "foreign", nil)
		id := w.elsewhere(t, spec)
		w.on(t, spec, "pve2")
		w.loseHandle(t, spec)
		w.node.SetOnline("pve2", false)
		vms := w.node.VMs()
		unknown := func(what string, err error) {
			t.Helper()
			wantCode(t, what, err, agentlab.CodeUnavailable)
			if !strings.Contains(err.Error(), "VM "+refOf(id).Handle+" on node pve2") {
				t.Errorf("%s: %v", what, err)
			}
		}
		tagged := w.node.Config(id.VMID)["tags"]
		for _, edit := range []map[string]string{{}, {"tags": "", "lock": "clone"}} { // complete, and being cloned
			w.node.Edit(id.VMID, edit)
			d := w.open()
			unknown("Create", d.Create(ctx, spec))
			unknown("Destroy", d.Destroy(ctx, spec.Ref()))
		}
		w.node.Edit(id.VMID, map[string]string{"tags": tagged, "lock": ""})
		if now := w.node.VMs(); !slices.Equal(now, vms) {
			t.Fatalf("VMs %v, were %v", now, vms)
		}
		w.node.SetOnline("pve2", true)
		ok(t, "Create", w.open().Create(ctx, spec))
		if in := w.inspect(t, spec.Ref()); in.Ref != refOf(id) {
			t.Errorf("%+v", in)
		}
		untouched(t)
		w.loseHandle(t, spec)
		w.node.SetOnline("pve1", false) // where the sandbox is not
		ok(t, "Destroy", w.driver.Destroy(ctx, spec.Ref()))
	})
}

// A node that hangs and a foreign VM that cannot be read keep no sandbox from
// being made and destroyed.
func TestNodeHangs(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := twoNodes(t, shell)
		w.node.AddContainer(t, 1001, "pve1") // so that another number is looked for
		w.node.AddForeignVM(t, 1500, "foreign", false, nil)
		hangs := pvenode.Fault{Status: 596, Error: "Connection timed out", Times: -1}
		w.node.Fail("GET /nodes/{node}/qemu", hangs)
		hangs.VMID = 1500
		w.node.Fail("GET /nodes/{node}/qemu/{vmid}/config", hangs)
		for i := range 2 {
			spec := w.spec(1 + i)
			ok(t, "Create", w.driver.Create(t.Context(), spec))
			for range 2 {
				ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
			}
		}
	})
}
