package proxmox

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/backend"
)

// callsOf returns how many calls of the API a deed makes, and which.
func (w *world) callsOf(deed func() error) (n int, which string, err error) {
	w.node.ResetCalls()
	err = deed()
	var all []string
	calls := w.node.Calls()
	for _, k := range slices.Sorted(maps.Keys(calls)) {
		n += calls[k]
		all = append(all, fmt.Sprintf("%d %s", calls[k], k))
	}
	return n, strings.Join(all, "\n      "), err
}

// callLimits are the most calls of operations over a shell, half of what they once were
// where that is possible. A destruction needs more: it reads the mark before it cuts the
// power and again before it destroys, and looks for disks that are left.
var callLimits = map[string]int{
	"workspace create": 8, "workspace attach": 4, "workspace snapshot": 4, "workspace delete": 5,
	"sandbox start": 4, "sandbox start again": 2, "sandbox stop": 2, "sandbox snapshot": 4, "sandbox destroy": 5,
}

func TestCallsOfOperations(t *testing.T) {
	for name, n := range operations(t, true) {
		if limit, ok := callLimits[name]; ok && n > limit {
			t.Errorf("%s: %d calls, at most %d are needed", name, n, limit)
		}
	}
}

// BenchmarkCalls counts the calls of the API that each operation makes. Over a shell, a
// call starts a program on the node, which takes about a second.
func BenchmarkCalls(b *testing.B) {
	for _, shell := range []bool{true, false} {
		b.Run(map[bool]string{true: "shell", false: "rest"}[shell], func(b *testing.B) {
			for b.Loop() {
				for name, n := range operations(b, shell) {
					b.ReportMetric(float64(n), strings.ReplaceAll(name, " ", "-"))
				}
			}
		})
	}
}

// operations returns the number of calls of each operation.
func operations(t testing.TB, shell bool) map[string]int {
	w := newWorld(t, worldConfig{shell: shell})
	ctx, d := t.Context(), w.driver
	spec, volume := w.spec(1), backend.VolumeSpec{UID: testUID(1), SizeGB: 1}
	ref := backend.VolumeRef{UID: volume.UID}
	made := map[string]int{}
	for _, deed := range []struct {
		name string
		do   func() error
	}{
		{"workspace create", func() (err error) { _, err = d.CreateVolume(ctx, volume); return err }},
		{"workspace inspect", func() error { _, err := d.InspectVolume(ctx, ref); return err }},
		{"sandbox create", func() error { return d.Create(ctx, spec) }},
		{"workspace attach", func() error { return d.AttachVolume(ctx, spec.Ref(), ref) }},
		{"sandbox start", func() error { return d.Start(ctx, spec.Ref()) }},
		{"sandbox inspect", func() error { _, err := d.Inspect(ctx, spec.Ref()); return err }},
		{"sandbox stop", func() error { return d.Stop(ctx, spec.Ref(), 0) }},
		{"workspace detach", func() error { return d.DetachVolume(ctx, spec.Ref(), ref) }},
		{"workspace snapshot", func() error { _, err := d.SnapshotVolume(ctx, ref, snapUID(2)); return err }},
		{"sandbox start again", func() error { return d.Start(ctx, spec.Ref()) }},
		{"sandbox snapshot", func() error { _, err := d.SaveSnapshot(ctx, spec.Ref(), snapUID(1)); return err }},
		{"sandbox destroy", func() error { return d.Destroy(ctx, spec.Ref()) }},
		{"workspace delete", func() error { return d.DeleteVolume(ctx, ref) }},
	} {
		n, which, err := w.callsOf(deed.do)
		if err != nil {
			t.Fatalf("%s: %v", deed.name, err)
		}
		t.Logf("%s: %d calls\n      %s", deed.name, n, which)
		made[deed.name] = n
	}
	return made
}
