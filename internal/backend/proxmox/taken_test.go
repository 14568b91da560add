package proxmox

import (
	"strconv"
	"sync"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// Trap 16: a number may be a container's, or that of a VM of another node. A
// clone checks neither before it begins: the cluster file system refuses its
// first file, with a different message than for a number that is used on the
// same node. A client that does not know this message retries the same number
// without end.
func TestTrap16NumberElsewhere(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell, nodes: []string{"pve", "pve2"}})
		w.node.AddContainer(t, 1001, "pve")
		w.node.AddContainer(t, 1002, "pve2")
		w.node.AddTemplate(t, pvenode.Template{VMID: 1003, Node: "pve2", Storage: "local-zfs"})
		for n := 1; n <= 3; n++ {
			s := w.spec(n)
			w.elsewhere(t, s)
			ok(t, "Start", w.driver.Start(t.Context(), s.Ref()))
			ok(t, "Destroy", w.driver.Destroy(t.Context(), s.Ref()))
		}
		if _, err := pve.New(w.root).Config(t.Context(), "pve2", 1003); err != nil {
			t.Error(err)
		}
		ok(t, "Create of the next number", w.driver.Create(t.Context(), w.spec(4)))
	})
}

// A sandbox was destroyed by hand, and a container created with its number:
// the sandbox is gone, and its destruction must not fail permanently. A token
// must be allowed to see the container.
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

// elsewhere makes a sandbox whose number something else has: its VM gets another.
func (w *world) elsewhere(t testing.TB, spec backend.Spec) vmID {
	t.Helper()
	ok(t, "Create", w.driver.Create(t.Context(), spec))
	in := w.inspect(t, spec.Ref())
	n, err := strconv.Atoi(in.Ref.Handle)
	if err != nil || n == spec.VMID || !w.driver.inRange(n) || in.VMID != spec.VMID || in.Power != backend.PowerStopped {
		t.Fatalf("%+v", in)
	}
	return vmID{VMID: n, UID: spec.UID}
}

// Something else is quicker between the allocation of a number and the clone.
// The sandbox keeps its number and lives with another VM, whatever is known of
// it; what took the number is not touched.
func TestNumberTakenDuringCreate(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		ctx, spec := t.Context(), w.spec(1)
		var once sync.Once
		var untouched func(*testing.T)
		w.node.Fail("POST /nodes/{node}/qemu/{vmid}/clone", pvenode.Fault{Reached: func() {
			once.Do(func() { untouched = w.foreign(t, spec.VMID, "quick", nil) })
		}})
		id := w.elsewhere(t, spec)
		if id.VMID != 1999 {
			t.Errorf("VM %d, want the highest number", id.VMID)
		}
		ok(t, "Create again", w.driver.Create(ctx, spec))
		if taken, err := w.driver.Taken(ctx, 1999, 1999); err != nil || len(taken) != 1 {
			t.Errorf("the number of its VM is not taken: %v, %v", taken, err)
		}
		ok(t, "Start", w.driver.Start(ctx, spec.Ref()))
		c, err := w.driver.DialControl(ctx, spec.Ref())
		ok(t, "DialControl", err)
		_ = c.Close()
		d := w.open()
		for _, ref := range []backend.Ref{spec.Ref(), refOf(id), refOf(idOf(spec))} {
			if in := w.inspect(t, ref); in.Power != backend.PowerRunning || in.Ref != refOf(id) {
				t.Errorf("%+v: %+v", ref, in)
			}
		}
		ok(t, "Stop", d.Stop(ctx, spec.Ref(), 0))
		w.loseHandle(t, spec)
		ok(t, "Create after its handle was lost", d.Create(ctx, spec))
		if in := w.listed(t, spec.Ref()); in == nil || in.Ref != refOf(id) {
			t.Errorf("%+v", in)
		}
		w.loseHandle(t, spec)
		ok(t, "Destroy", d.Destroy(ctx, refOf(idOf(spec)))) // the handle of before the loss is outdated
		untouched(t)
		if left := w.left(t, spec.VMID); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
}

// Sandboxes that look for another number at the same time get one each.
func TestOtherNumbersAreDistinct(t *testing.T) {
	w := newWorld(t, worldConfig{shell: true})
	const n = 4
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		w.foreign(t, w.spec(i).VMID, "foreign", nil)
	}
	for i := range n {
		wg.Go(func() { errs[i] = w.driver.Create(t.Context(), w.spec(i)) })
	}
	wg.Wait()
	have := map[string]bool{}
	for i := range n {
		ok(t, "Create", errs[i])
		have[w.inspect(t, w.spec(i).Ref()).Ref.Handle] = true
		ok(t, "Destroy", w.driver.Destroy(t.Context(), w.spec(i).Ref()))
	}
	if len(have) != n {
		t.Errorf("numbers %v", have)
	}
}

// A process dies between two numbers: the next one begins with the first again.
func TestKilledBetweenNumbers(t *testing.T) {
	w := newWorld(t, worldConfig{shell: true})
	spec := w.spec(1)
	untouched := w.foreign(t, spec.VMID, "foreign", nil)
	for _, destroy := range []bool{true, false} {
		w.driver.crash = func(at string) {
			if at == "number lost" {
				panic(died{at})
			}
		}
		if err := (mortal{w.driver}).Create(t.Context(), spec); err == nil {
			t.Fatal("it did not die")
		}
		w.open()
		if destroy {
			ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
			continue
		}
		w.elsewhere(t, spec)
	}
	ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	untouched(t)
	if left := w.left(t, spec.VMID); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// More numbers in a row than are tried have something that the token may not
// see: a free number below them is found.
func TestManyUnreadableVMIDs(t *testing.T) {
	for name, free := range map[string]int{"many": 1500, "few": 1020} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, worldConfig{alter: func(c *Config) {
				if name == "few" {
					c.Last = 1100
				}
			}})
			spec := w.spec(1)
			for n := spec.VMID; n <= w.driver.cfg.Last; n++ {
				if n > free || n == spec.VMID {
					w.node.AddContainer(t, n, w.node.Name())
				}
			}
			w.elsewhere(t, spec)
			ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
		})
	}
}

// A sandbox does not try numbers without end.
func TestNumberAlwaysTaken(t *testing.T) {
	w := newWorld(t, worldConfig{shell: true})
	spec := w.spec(1)
	var checks []func(*testing.T)
	var numbers []int
	w.driver.crash = func(at string) {
		if at != "clone about to be sent" {
			return
		}
		h, err := w.driver.readHandle(spec.Ref())
		ok(t, "handle", err)
		numbers = append(numbers, h.id().VMID)
		checks = append(checks, w.foreign(t, h.id().VMID, "quick", nil))
	}
	wantCode(t, "Create", w.driver.Create(t.Context(), spec), agentlab.CodeExists)
	if len(numbers) != 1+otherNumbers || numbers[0] != spec.VMID {
		t.Errorf("numbers %v", numbers)
	}
	wantCode(t, "Inspect", inspectErr(w.driver.Inspect(t.Context(), spec.Ref())), agentlab.CodeNotFound)
	ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	for _, untouched := range checks {
		untouched(t)
	}
	if left := w.left(t, numbers...); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
