package proxmox

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// killCase is a point of the driver, or a call to the node, at which a process is
// killed while it saves, restores or deletes a snapshot, or creates a sandbox from
// one.
type killCase struct {
	deed  string
	point string
	call  int // the kth, if point is ""
	lost  bool
	again bool // the next process repeats the deed before it destroys the sandbox
}

func (k killCase) String() string {
	where := k.point
	if where == "" {
		where = fmt.Sprintf("call %d %s", k.call, map[bool]string{true: "lost", false: "carried out"}[k.lost])
	}
	return k.deed + "/" + where + "/" + map[bool]string{true: "again", false: "destroy"}[k.again]
}

// killCases returns all cases. calls is how many calls each deed makes.
func killCases(calls map[string]int) (out []killCase) {
	change := []string{"snapshot change about to be sent", "snapshot change sent", "snapshot change noted"}
	points := map[string][]string{
		"save": change, "delete": append(slices.Clone(change), "snapshot deleted"),
		"restore": append(slices.Clone(change), "network in force for the restore", "rolled back"),
		"create":  {"clone about to be sent", "clone sent", "clone noted", "cloned", "configured", "complete"},
	}
	for _, deed := range []string{"save", "restore", "delete", "create"} {
		for _, again := range []bool{false, true} {
			for _, p := range points[deed] {
				out = append(out, killCase{deed: deed, point: p, again: again})
			}
			for k := 1; k <= calls[deed]; k++ {
				for _, lost := range []bool{true, false} {
					out = append(out, killCase{deed: deed, call: k, lost: lost, again: again})
				}
			}
		}
	}
	return out
}

// A process is killed at any point while it changes snapshots, and between any two
// calls. The next one completes the work, and nothing is left in the end.
func TestKilledWithSnapshots(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell, storage: "lvmthin", alter: func(c *Config) { c.Settle = 3 * time.Second }})
		calls := map[string]int{}
		for _, deed := range []string{"save", "restore", "delete", "create"} {
			spec := w.readyFor(t, deed, 1)
			w.node.ResetCalls()
			if p := w.child(deed, spec, ""); !w.ended(t, p) {
				t.Fatalf("%s: %v: %s", deed, p.err, p.errs)
			}
			calls[deed] = w.node.TotalCalls()
			w.destroyAll(t, 1)
		}
		cases := killCases(calls)
		if shell {
			cases = sample.Of(t, 12, cases)
		} else {
			cases = sample.Of(t, 40, cases)
		}
		killed := 0
		for i, k := range cases {
			t.Run(k.String(), func(t *testing.T) {
				n := 2 + i%90
				spec := w.readyFor(t, k.deed, n)
				p := w.child(k.deed, spec, k.point)
				if k.point == "" {
					defer w.killAt(p, k.call, k.lost)()
				}
				if !w.ended(t, p) {
					killed++
				}
				d := w.open()
				w.inspect(t, w.spec(n).Ref())
				if k.again {
					ok(t, k.deed+" again", d.do(t.Context(), k.deed, spec))
					if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerRunning {
						t.Errorf("%+v", in)
					}
					all := w.snapshots(t)
					if want := map[bool]int{true: 0, false: 1}[k.deed == "delete"]; len(all) != want || want == 1 && all[0].Partial {
						t.Errorf("%+v", all)
					}
				}
				w.destroyAll(t, n)
			})
		}
		if t.Logf("%d of %d died", killed, len(cases)); killed < len(cases)*8/10 { // a deed may need fewer calls than the one that was counted
			t.Errorf("only %d of %d processes died on the way", killed, len(cases))
		}
	})
}

// ended waits for a process and reports whether it succeeded.
func (w *world) ended(t *testing.T, p *process) bool {
	t.Helper()
	p.wait(t)
	return p.err == nil
}

// readyFor makes the nth sandbox what a deed needs, and returns the Spec of the
// deed.
func (w *world) readyFor(t *testing.T, deed string, n int) backend.Spec {
	t.Helper()
	w.driver = w.open()
	spec := w.running(t, n)
	if deed == "save" {
		return spec
	}
	w.saveSnapshot(t, spec, 1)
	if deed != "create" {
		return spec
	}
	copied, from := w.spec(n+100), refTo(spec, 1)
	copied.From = &from
	return copied
}

// destroyAll destroys the nth sandbox and the one from its snapshot, and fails if
// anything is left.
func (w *world) destroyAll(t *testing.T, n int) {
	t.Helper()
	d := w.open()
	for _, spec := range []backend.Spec{w.spec(n + 100), w.spec(n)} {
		ok(t, "Destroy", d.Destroy(t.Context(), spec.Ref()))
	}
	if left := w.left(t); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
