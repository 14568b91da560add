package proxmox

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Only the handle of a VM with another number has the version that older
// drivers reject: they would take a foreign VM for the sandbox.
func TestHandleVersion(t *testing.T) {
	w := newWorld(t, worldConfig{shell: true})
	spec, other := w.create(t, 1), w.spec(2)
	w.node.AddContainer(t, other.VMID, w.node.Name())
	w.elsewhere(t, other)
	for want, s := range map[int]backend.Spec{1: spec, 2: other} {
		h, err := w.open().readHandle(s.Ref())
		if ok(t, "read", err); h.Version != want {
			t.Errorf("version %d, want %d", h.Version, want)
		}
		h.Version = handleVersion + 1
		b, err := json.Marshal(h)
		ok(t, "marshal", err)
		ok(t, "write", os.WriteFile(filepath.Join(w.driver.dir, h.file()), b, 0o600))
		wantCode(t, "Inspect", inspectErr(w.driver.Inspect(t.Context(), s.Ref())), agentlab.CodeUnsupported)
	}
}

// A directory with two handles of one sandbox, as after a restore by hand, is no
// dead end: methods take the one that is meant, and Destroy both.
func TestTwoHandles(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		ctx, spec := t.Context(), w.create(t, 5)
		second := spec
		second.VMID = 1001
		kept, err := w.driver.readHandle(spec.Ref())
		ok(t, "read", err)
		w.loseHandle(t, spec)
		w.node.Edit(spec.VMID, map[string]string{"tags": ""}) // hides it from Create
		second.Name = "sb-second"
		ok(t, "Create", w.driver.Create(ctx, second))
		w.node.Edit(spec.VMID, map[string]string{"tags": tags(spec.UID)})
		ok(t, "put back", w.driver.save(kept))
		d := w.open()
		for _, id := range []vmID{idOf(spec), idOf(second)} {
			if in := w.inspect(t, refOf(id)); in.Ref != refOf(id) || in.Power != backend.PowerStopped {
				t.Errorf("%v: %+v", id, in)
			}
		}
		ok(t, "Destroy", d.Destroy(ctx, spec.Ref()))
		if left := w.left(t); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
}

// One of two handles is that of a sandbox that is being destroyed: other methods
// take the other one.
func TestTwoHandlesOneDestroying(t *testing.T) {
	w := newWorld(t, worldConfig{shell: true})
	spec := w.create(t, 5)
	h, err := w.driver.readHandle(spec.Ref())
	ok(t, "read", err)
	h.Spec.VMID, h.VMID, h.Phase = 1001, 1001, phaseDestroying
	ok(t, "save", w.driver.save(h))
	if in := w.inspect(t, spec.Ref()); in.Ref != refOf(idOf(spec)) || in.Power != backend.PowerStopped {
		t.Errorf("%+v", in)
	}
	ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
	ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	if left := w.left(t); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
