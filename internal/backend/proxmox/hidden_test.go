package proxmox

import (
	"strconv"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// Tests of VMs that a token with the smallest role may not look at: those
// outside of its pool, whosever they are.

// pooled is a world whose sandboxes are in a pool, over either transport.
func pooled(t *testing.T, shell bool) *world {
	w := newWorld(t, worldConfig{shell: shell})
	if shell {
		w.node.AddPool(pool)
		w.pool = pool
		w.open()
	}
	return w
}

// moveOut takes a VM out of the pool by hand, and moveIn puts it back.
func (w *world) moveOut(t *testing.T, vmid int) {
	t.Helper()
	ok(t, "out of the pool", w.admin(t, pve.Put, "/pools/"+pool, map[string][]string{"vms": {strconv.Itoa(vmid)}, "delete": {"1"}}))
}

func (w *world) moveIn(t *testing.T, vmid int) {
	t.Helper()
	ok(t, "into the pool", w.admin(t, pve.Put, "/pools/"+pool, map[string][]string{"vms": {strconv.Itoa(vmid)}}))
}

// audited lets the token look at a VM, and no more.
func (w *world) audited(t *testing.T, vmid int) {
	t.Helper()
	ok(t, "role", w.node.AddRole("Look", "VM.Audit"))
	for _, who := range []string{"agentlab@pve", w.tokenID} {
		w.node.Grant("/vms/"+strconv.Itoa(vmid), who, "Look")
	}
}

// notKnown fails the test unless a call says that what became of a sandbox is
// not known, and how to find out.
func notKnown(t *testing.T, what string, err error, id vmID) {
	t.Helper()
	wantCode(t, what, err, agentlab.CodeUnavailable)
	hint := agentlab.HintOf(err)
	for _, part := range []string{"pveum pool modify " + pool + " --vms " + strconv.Itoa(id.VMID), "PVEAuditor on /vms/" + strconv.Itoa(id.VMID), id.UID} {
		if !strings.Contains(hint, part) {
			t.Errorf("%s: %v: the hint %q does not name %q", what, err, hint, part)
		}
	}
}

// A sandbox that was removed from the pool is refused with the same message as
// a foreign VM. It is neither lost nor forgotten, and the others continue.
func TestRemovedFromPool(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := pooled(t, shell)
		ctx := t.Context()
		spec, other := w.create(t, 1), w.create(t, 2)
		ref := spec.Ref()
		ok(t, "Start", w.driver.Start(ctx, ref))
		w.moveOut(t, spec.VMID)
		if shell { // root sees everything
			ok(t, "Stop", w.driver.Stop(ctx, ref, 0))
			ok(t, "Destroy", w.driver.Destroy(ctx, ref))
			ok(t, "Destroy", w.driver.Destroy(ctx, other.Ref()))
			if left := w.left(t); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
			return
		}
		before := w.look(t, spec.VMID)
		for range 2 { // this process and the next
			d := w.open()
			_, err := d.Inspect(ctx, ref)
			notKnown(t, "Inspect", err, idOf(spec))
			notKnown(t, "Start", d.Start(ctx, ref), idOf(spec))
			notKnown(t, "Stop", d.Stop(ctx, ref, 0), idOf(spec))
			if in := w.listed(t, ref); in == nil || in.Power != backend.PowerPartial || !strings.Contains(in.Reason, "cannot determine") {
				t.Errorf("List: %+v", in)
			}
			if in := w.listed(t, other.Ref()); in == nil || in.Power != backend.PowerStopped {
				t.Errorf("List, of the other: %+v", in)
			}
			notKnown(t, "Create", d.Create(ctx, spec), idOf(spec))
		}
		for range 2 {
			d := w.open()
			notKnown(t, "Destroy", d.Destroy(ctx, ref), idOf(spec))
			notKnown(t, "Stop", d.Stop(ctx, ref, 0), idOf(spec))
		}
		if now := w.look(t, spec.VMID); now != before {
			t.Errorf("the VM was\n%s\nand is\n%s", before, now)
		}
		w.moveIn(t, spec.VMID)
		ok(t, "Destroy", w.driver.Destroy(ctx, ref))
		ok(t, "Destroy", w.driver.Destroy(ctx, other.Ref()))
		if left := w.left(t); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
}

// The same while it is made: its clone has ended, and so it was in the pool.
func TestRemovedFromPoolDuringCreate(t *testing.T) {
	w := pooled(t, false)
	ctx := t.Context()
	for i, point := range []string{"clone noted", "cloned", "configured"} {
		spec := w.spec(1 + i)
		w.driver.crash = func(at string) {
			if at == point {
				panic(died{at})
			}
		}
		if err := (mortal{w.driver}).Create(ctx, spec); err == nil {
			t.Fatalf("%s: it did not die", point)
		}
		h, err := w.driver.readHandle(spec.Ref())
		ok(t, "handle", err)
		_, err = pve.New(w.root).WithPoll(quick).Wait(ctx, pve.UPID(h.CloneTask))
		ok(t, "clone", err)
		w.moveOut(t, spec.VMID)
		d := w.open()
		notKnown(t, point+": Create", d.Create(ctx, spec), idOf(spec))
		notKnown(t, point+": Destroy", d.Destroy(ctx, spec.Ref()), idOf(spec))
		w.moveIn(t, spec.VMID)
		ok(t, point+": Destroy", d.Destroy(ctx, spec.Ref()))
	}
	if left := w.left(t); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// And while its destruction is tried again.
func TestRemovedFromPoolDuringDestroy(t *testing.T) {
	w := pooled(t, false)
	spec := w.create(t, 1)
	w.node.Fail("DELETE /nodes/{node}/qemu/{vmid}", pvenode.Fault{
		VMID: spec.VMID, Error: "can't lock file '/var/lock/qemu-server/lock-1001.conf' - got timeout",
		Reached: func() { w.moveOut(t, spec.VMID) },
	})
	notKnown(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()), idOf(spec))
	w.moveIn(t, spec.VMID)
	ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	if left := w.left(t); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// A VM that has the number after our own destruction is foreign, whether we
// may read it or not; and so is one that had it before our clone.
func TestUnreadableVMIsForeign(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := pooled(t, shell)
		ctx := t.Context()
		spec := w.create(t, 1)
		w.driver.crash = func(at string) {
			if at == "destroyed" {
				panic(died{at})
			}
		}
		if err := (mortal{w.driver}).Destroy(ctx, spec.Ref()); err == nil {
			t.Fatal("it did not die")
		}
		untouched := w.foreign(t, spec.VMID, "foreign", nil)
		ok(t, "Destroy", w.open().Destroy(ctx, spec.Ref()))
		untouched(t)

		spec, untouched = w.spec(2), nil
		w.driver.crash = func(at string) {
			if at == "nothing written" && untouched == nil {
				untouched = w.foreign(t, spec.VMID, "foreign", nil)
			}
		}
		w.elsewhere(t, spec)
		ok(t, "Destroy", w.driver.Destroy(ctx, spec.Ref()))
		untouched(t)
	})
}
