package proxmox

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/test/pvenode"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// both runs a test over both transports.
func both(t *testing.T, test func(t *testing.T, shell bool)) {
	for _, shell := range []bool{false, true} {
		t.Run(map[bool]string{false: "rest", true: "shell"}[shell], func(t *testing.T) {
			if shell {
				sample.Long(t, "it runs the programs of a node")
			}
			test(t, shell)
		})
	}
}

func (w *world) create(t testing.TB, n int) backend.Spec {
	t.Helper()
	spec := w.spec(n)
	ok(t, "Create", w.driver.Create(t.Context(), spec))
	return spec
}

func (w *world) inspect(t testing.TB, ref backend.Ref) backend.Instance {
	t.Helper()
	in, err := w.driver.Inspect(t.Context(), ref)
	ok(t, "Inspect", err)
	return in
}

// forgetImpressions is the passing of time for what the driver believes.
func (w *world) forgetImpressions(ref backend.Ref) { w.driver.cache.forget(ref.UID) }

func (w *world) vmPath(vmid int) string {
	return fmt.Sprintf("/nodes/%s/qemu/%d", w.node.Name(), vmid)
}

// admin makes a call as an administrator does, and waits for its task.
func (w *world) admin(t testing.TB, m pve.Method, path string, params map[string][]string) error {
	t.Helper()
	data, err := w.root.Call(context.Background(), m, path, params)
	if err != nil {
		return err
	}
	if upid, err := pve.ParseUPID(strings.Trim(string(data), `"`)); err == nil {
		_, err := pve.New(w.root).WithPoll(quick).Wait(context.Background(), upid)
		return err
	}
	return nil
}

// The whole life once: create, start, connect, stop, start, destroy.
func TestLife(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		spec := w.create(t, 1)
		ref := spec.Ref()
		cfg, err := pve.New(w.root).Config(t.Context(), w.node.Name(), spec.VMID)
		ok(t, "config", err)
		for key, want := range map[string]string{"protection": "0", "onboot": "0", "memory": "512", "cores": "1", "balloon": "0", "ciupgrade": "0", "name": "sb-1"} {
			if !sameOption(key, cfg[key], want) {
				t.Errorf("%s is %q, want %q", key, cfg[key], want)
			}
		}
		for range 2 {
			ok(t, "Start", w.driver.Start(t.Context(), ref))
			c := control.New(func(ctx context.Context) (net.Conn, error) { return w.driver.DialControl(ctx, ref) })
			if _, err := c.Health(t.Context()); err != nil {
				t.Fatal(err)
			}
			in := w.inspect(t, ref)
			if in.Power != backend.PowerRunning || in.IP != spec.IPv4.String() {
				t.Errorf("%+v", in)
			}
			ok(t, "Stop", w.driver.Stop(t.Context(), ref, 5*time.Second))
		}
		ok(t, "Destroy", w.driver.Destroy(t.Context(), ref))
		if left := w.left(t); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
}

// What an administrator does to a sandbox is noticed with the next look.
func TestDrift(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		ctx := t.Context()

		t.Run("stopped by hand", func(t *testing.T) {
			spec := w.create(t, 1)
			ok(t, "Start", w.driver.Start(ctx, spec.Ref()))
			ok(t, "stop", w.admin(t, pve.Post, w.vmPath(spec.VMID)+"/status/stop", nil))
			in := w.listed(t, spec.Ref())
			if !shell && in != nil && in.Power == backend.PowerCrashed {
				return // a token sees no tasks but its own
			}
			if in == nil || in.Power != backend.PowerStopped || !strings.Contains(in.Reason, "root@pam") {
				t.Errorf("%+v", in)
			}
		})
		t.Run("suspended by hand", func(t *testing.T) {
			spec := w.create(t, 2)
			ok(t, "Start", w.driver.Start(ctx, spec.Ref()))
			ok(t, "suspend", w.admin(t, pve.Post, w.vmPath(spec.VMID)+"/status/suspend", nil))
			w.forgetImpressions(spec.Ref())
			if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerSuspended {
				t.Errorf("%+v", in)
			}
			ok(t, "Stop", w.driver.Stop(ctx, spec.Ref(), time.Second)) // a guest that stands still cannot be asked
			if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerStopped {
				t.Errorf("%+v", in)
			}
		})
		t.Run("resumed by hand", func(t *testing.T) {
			spec := w.create(t, 10)
			ok(t, "Start", w.driver.Start(ctx, spec.Ref()))
			ok(t, "Suspend", w.driver.Suspend(ctx, spec.Ref()))
			if in := w.listed(t, spec.Ref()); in == nil || in.Power != backend.PowerSuspended {
				t.Errorf("%+v", in)
			}
			ok(t, "resume", w.admin(t, pve.Post, w.vmPath(spec.VMID)+"/status/resume", nil))
			if in := w.listed(t, spec.Ref()); in == nil || in.Power != backend.PowerRunning {
				t.Errorf("%+v", in)
			}
			ok(t, "Suspend again", w.driver.Suspend(ctx, spec.Ref()))
			if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerSuspended {
				t.Errorf("%+v", in)
			}
		})
		t.Run("destroyed by hand", func(t *testing.T) {
			spec := w.create(t, 3)
			ok(t, "destroy", w.admin(t, pve.Delete, w.vmPath(spec.VMID), nil))
			if in := w.listed(t, spec.Ref()); in != nil {
				t.Errorf("%+v", in)
			}
			_, err := w.driver.Inspect(ctx, spec.Ref())
			wantCode(t, "Inspect", err, agentlab.CodeNotFound)
			ok(t, "Destroy", w.driver.Destroy(ctx, spec.Ref()))
		})
		t.Run("replaced by hand", func(t *testing.T) {
			spec := w.create(t, 4)
			ok(t, "destroy", w.admin(t, pve.Delete, w.vmPath(spec.VMID), nil))
			untouched := w.foreign(t, spec.VMID, spec.Name, nil)
			if !shell { // it may be the sandbox, out of the pool
				notKnown(t, "Start", w.driver.Start(ctx, spec.Ref()), idOf(spec))
				w.audited(t, spec.VMID)
			}
			if in := w.listed(t, spec.Ref()); in != nil {
				t.Errorf("%+v", in)
			}
			wantCode(t, "Start", w.driver.Start(ctx, spec.Ref()), agentlab.CodeNotFound)
			wantCode(t, "Stop", w.driver.Stop(ctx, spec.Ref(), 0), agentlab.CodeNotFound)
			ok(t, "Destroy", w.driver.Destroy(ctx, spec.Ref()))
			untouched(t)
		})
		t.Run("changed by hand", func(t *testing.T) { changedByHand(t, w) })
		t.Run("protected by hand", func(t *testing.T) {
			spec := w.create(t, 7)
			ok(t, "protect", w.admin(t, pve.Put, w.vmPath(spec.VMID)+"/config", map[string][]string{"protection": {"1"}}))
			ok(t, "Destroy", w.driver.Destroy(ctx, spec.Ref()))
		})
		t.Run("handle lost", func(t *testing.T) {
			spec := w.create(t, 9)
			w.loseHandle(t, spec)
			if in := w.listed(t, spec.Ref()); in == nil {
				t.Error("List has it no more")
			}
			w.inspect(t, spec.Ref())
			ok(t, "Create again", w.driver.Create(ctx, spec))
			w.loseHandle(t, spec)
			ok(t, "Destroy", w.driver.Destroy(ctx, spec.Ref()))
			_, err := w.driver.Inspect(ctx, spec.Ref())
			wantCode(t, "Inspect", err, agentlab.CodeNotFound)
		})
		for n := range 11 {
			ok(t, "Destroy", w.driver.Destroy(ctx, w.spec(n).Ref()))
		}
	})
}

// changedByHand: a second network device, which would be on another bridge
// without any rule, keeps a sandbox from being started.
func changedByHand(t *testing.T, w *world) {
	ctx := t.Context()
	for i, change := range []map[string][]string{
		{"net1": {"virtio,bridge=vmbr0"}},
		{"net0": {"virtio,bridge=vmbr0"}},
		{"ipconfig0": {"ip=10.77.1.99/16,gw=10.77.0.1"}},
		{"serial1": {"/dev/ttyS0"}},
	} {
		spec := w.create(t, 20+i)
		if err := w.admin(t, pve.Put, w.vmPath(spec.VMID)+"/config", change); err != nil {
			t.Logf("%v: the node itself refuses: %v", change, err)
			continue
		}
		err := w.driver.Start(ctx, spec.Ref())
		wantCode(t, fmt.Sprintf("Start after %v", change), err, agentlab.CodeDenied)
		if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerStopped {
			t.Errorf("%v: %+v", change, in)
		}
		ok(t, "Destroy", w.driver.Destroy(ctx, spec.Ref()))
	}
}

func (w *world) listed(t testing.TB, ref backend.Ref) *backend.Instance {
	t.Helper()
	all, err := w.driver.List(t.Context())
	ok(t, "List", err)
	if i := slices.IndexFunc(all, func(in backend.Instance) bool { return in.Ref.UID == ref.UID }); i >= 0 {
		return &all[i]
	}
	return nil
}

// Rules that cannot be put in force keep everything from starting.
func TestFailClosed(t *testing.T) {
	w := newWorld(t, worldConfig{})
	spec := w.create(t, 1)
	w.farm.notReady = agentlab.Errorf(agentlab.CodeUnavailable, "no rules")
	wantCode(t, "Start", w.driver.Start(t.Context(), spec.Ref()), agentlab.CodeUnavailable)
	if n := w.node.Calls()["POST /nodes/{node}/qemu/{vmid}/status/start"]; n != 0 {
		t.Errorf("%d starts were sent", n)
	}
	w.farm.notReady = nil
	ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
	w.farm.notReady = agentlab.Errorf(agentlab.CodeUnavailable, "no rules")
	n := agentlab.Network{Mode: agentlab.NetworkOff}
	wantCode(t, "UpdateNetwork", w.driver.UpdateNetwork(t.Context(), spec.Ref(), n), agentlab.CodeUnavailable)
	h, err := w.driver.readHandle(spec.Ref())
	ok(t, "handle", err)
	if h.network().Mode != agentlab.NetworkNAT {
		t.Error("the policy that could not be put in force is kept")
	}
}

// Foreign VMs on the number that we want, on that of the template, with our
// name, with our tags copied: never stopped, changed or destroyed.
func TestForeign(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		ctx := t.Context()
		spec := w.spec(1)
		checks := []func(*testing.T){
			w.foreign(t, spec.VMID, "foreign", nil),
			w.foreign(t, 1002, "sb-2", nil),
			w.foreign(t, 1003, "sb-3", map[string]string{"tags": tags(testUID(3))}),
			w.foreign(t, 1004, "sb-4", map[string]string{"description": "agentlab-uid: " + testUID(4) + "\n"}),
			w.foreign(t, 200, "sb-5", map[string]string{"description": description(idOf(w.spec(5)), w.driver.installation), "tags": tags(testUID(5))}),
		}
		template := w.look(t, templateVMID)
		for n := 1; n <= 5; n++ {
			s := w.spec(n)
			if n == 5 {
				s.VMID = 200
			}
			if n == 5 {
				wantCode(t, "Create outside of the range", w.driver.Create(ctx, s), agentlab.CodeDenied)
			}
			for _, ref := range []backend.Ref{s.Ref(), refOf(idOf(s))} {
				wantCode(t, "Start", w.driver.Start(ctx, ref), agentlab.CodeNotFound)
				wantCode(t, "Stop", w.driver.Stop(ctx, ref, 0), agentlab.CodeNotFound)
				wantCode(t, "Suspend", w.driver.Suspend(ctx, ref), agentlab.CodeNotFound)
				ok(t, "Destroy", w.driver.Destroy(ctx, ref))
			}
			if n < 5 {
				w.elsewhere(t, s)
				ok(t, "Start", w.driver.Start(ctx, s.Ref()))
				ok(t, "Destroy", w.driver.Destroy(ctx, refOf(idOf(s))))
			}
		}
		s := w.spec(6)
		s.VMID = templateVMID
		if err := w.driver.Create(ctx, s); agentlab.CodeOf(err) != agentlab.CodeExists && agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("Create on the template's number: %v", err)
		}
		ok(t, "Destroy of the template", w.driver.Destroy(ctx, s.Ref()))
		if all, err := w.driver.List(ctx); err != nil || len(all) != 0 {
			t.Errorf("List: %v, %v", all, err)
		}
		taken, err := w.driver.Taken(ctx, 1000, 9999)
		ok(t, "Taken", err)
		for _, n := range []int{1001, 1002, 1003, 1004, templateVMID} {
			if n != templateVMID && !shell { // a token does not see foreign VMs; the clone gets the error
				continue
			}
			if !slices.Contains(taken, n) {
				t.Errorf("%d is not told as taken: %v", n, taken)
			}
		}
		for _, untouched := range checks {
			untouched(t)
		}
		if now := w.look(t, templateVMID); now != template {
			t.Errorf("the template was\n%s\nand is\n%s", template, now)
		}
	})
}

// Trap 16: two clones to one number: the task of the loser fails, and the
// winner is not changed. Here the winner is another client, between our check
// of the number and our clone.
func TestTrap16NumberLost(t *testing.T) {
	w := newWorld(t, worldConfig{})
	spec := w.spec(1)
	var once sync.Once
	var untouched func(*testing.T)
	w.node.Fail("POST /nodes/{node}/qemu/{vmid}/clone", pvenode.Fault{Reached: func() {
		once.Do(func() { untouched = w.foreign(t, spec.VMID, "quick", nil) })
	}})
	w.elsewhere(t, spec)
	ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	untouched(t)
}
