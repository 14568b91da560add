package proxmox

import (
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// What List returns can be destroyed, also when only the mark on the VM is left
// of what was known of it. The VM of another installation, which has the same
// kind of mark, is neither listed nor destroyed.
func TestOrphans(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		ctx := t.Context()
		spec, theirs := w.create(t, 1), idOf(w.spec(2))
		untouched := w.foreign(t, theirs.VMID, "sb-2", map[string]string{
			"description": description(theirs, "ffffffffffffffff"), "tags": tags(theirs.UID),
		})
		w.loseHandle(t, spec)
		if in := w.listed(t, spec.Ref()); in == nil || in.Power == backend.PowerRunning || in.VMID != 0 || in.Number() != spec.VMID {
			t.Fatalf("%+v", in)
		}
		if in := w.listed(t, refOf(theirs)); in != nil {
			t.Errorf("another installation's is listed: %+v", in)
		}
		if in := w.inspect(t, spec.Ref()); in.Ref != refOf(idOf(spec)) || in.VMID != 0 {
			t.Errorf("found by its mark: %+v", in)
		}
		for _, ref := range []backend.Ref{spec.Ref(), refOf(idOf(spec)), {UID: theirs.UID}, refOf(theirs)} {
			ok(t, "Destroy", w.driver.Destroy(ctx, ref))
			_, err := w.driver.Inspect(ctx, ref)
			wantCode(t, "Inspect", err, agentlab.CodeNotFound)
		}
		untouched(t)
		if in := w.listed(t, spec.Ref()); in != nil {
			t.Errorf("after its destruction: %+v", in)
		}
	})
}
