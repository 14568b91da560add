package proxmox

import (
	"strconv"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// The mark of a sandbox was removed by hand. Whether the VM is the sandbox is
// not known then, and every method says so: nothing is destroyed or forgotten,
// and the remedy restores the sandbox.
func TestMarkRemovedManually(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		for name, edit := range map[string]map[string][]string{
			"description": {"description": {"my notes"}},
			"both":        {"description": {"my notes"}, "tags": {"mine"}},
			"lines":       {"description": {markUID + testUID(1)}, "delete": {"tags"}},
		} {
			t.Run(name, func(t *testing.T) {
				w := newWorld(t, worldConfig{shell: shell})
				spec := w.create(t, 1)
				ref := spec.Ref()
				config := w.vmPath(spec.VMID) + "/config"
				ok(t, "edit", w.admin(t, pve.Put, config, edit))
				w.unknown(t, spec)
				ok(t, "start by hand", w.admin(t, pve.Post, w.vmPath(spec.VMID)+"/status/start", nil))
				w.unknown(t, spec)
				remedy := map[string][]string{"description": {markLines(idOf(spec), w.driver.installation)}, "tags": {tags(ref.UID)}}
				ok(t, "the remedy", w.admin(t, pve.Put, config, remedy))
				if in := w.inspect(t, ref); in.Power != backend.PowerRunning {
					t.Errorf("after the remedy: %+v", in)
				}

				ok(t, "edit", w.admin(t, pve.Put, config, edit))
				before := w.look(t, spec.VMID)
				notMarked(t, "Destroy", w.driver.Destroy(t.Context(), ref), idOf(spec))
				notMarked(t, "Destroy again", w.open().Destroy(t.Context(), ref), idOf(spec))
				if now := w.look(t, spec.VMID); now != before || len(w.node.Volumes(spec.VMID)) == 0 {
					t.Errorf("it was\n%s\nand is\n%s", before, now)
				}
				ok(t, "the remedy", w.admin(t, pve.Put, config, remedy))
				ok(t, "Destroy", w.driver.Destroy(t.Context(), ref))
				if left := w.left(t); len(left) > 0 {
					t.Errorf("left: %q", left)
				}
			})
		}
	})
}

// unknown checks that every method but Destroy says that it does not know.
func (w *world) unknown(t *testing.T, spec backend.Spec) {
	t.Helper()
	d, ref := w.open(), spec.Ref()
	notMarked(t, "Inspect", inspectErr(d.Inspect(t.Context(), ref)), idOf(spec))
	notMarked(t, "Start", d.Start(t.Context(), ref), idOf(spec))
	notMarked(t, "Stop", d.Stop(t.Context(), ref, 0), idOf(spec))
	_, err := d.List(t.Context())
	ok(t, "List", err)
}

// notMarked wants the error of a VM that has lost its mark, with its remedy.
func notMarked(t *testing.T, method string, err error, id vmID) {
	t.Helper()
	wantCode(t, method, err, agentlab.CodeUnknownOutcome)
	if hint := agentlab.HintOf(err); !strings.Contains(hint, "qm set "+strconv.Itoa(id.VMID)+" --tags '"+tags(id.UID)+"'") {
		t.Errorf("%s: hint %q", method, hint)
	}
}

// A foreign VM that got the number has no trace of the sandbox, and the
// sandbox is gone.
func TestForeignVMHasNoTraces(t *testing.T) {
	w := newWorld(t, worldConfig{admin: true})
	spec := w.create(t, 1)
	ok(t, "destroy by hand", w.admin(t, pve.Delete, w.vmPath(spec.VMID), nil))
	w.node.AddForeignVM(t, spec.VMID, spec.Name, false, nil)
	wantCode(t, "Start", w.driver.Start(t.Context(), spec.Ref()), agentlab.CodeNotFound)
	ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	if len(w.node.Volumes(spec.VMID)) == 0 {
		t.Error("the disk of another user's VM was deleted")
	}
}
