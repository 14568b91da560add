package proxmox

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// inspectErr is the error of an Inspect.
func inspectErr(_ backend.Instance, err error) error { return err }

// Other people destroy VMs all the time. A node fails every list in which one
// of them vanishes, and no call about another sandbox may fail for it.
func TestForeignVMsDisappear(t *testing.T) {
	for _, storage := range []string{"zfspool", "dir"} {
		t.Run(storage, func(t *testing.T) {
			// With the pauses between attempts of a real node: all VMs are gone in less.
			w := newWorld(t, worldConfig{storage: storage, admin: true, alter: func(c *Config) { c.Poll.First = 100 * time.Millisecond }})
			const vanishing = 40
			for i := range vanishing {
				w.node.AddForeignVM(t, 500+i, fmt.Sprintf("other-%d", i), false, nil)
			}
			// Reading takes the real node a while, in which VMs vanish.
			for _, point := range []string{"list.config", "list.volume"} {
				w.node.Fail(point, pvenode.Fault{Delay: time.Millisecond, Times: -1})
			}
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				for i := range vanishing {
					if ctx.Err() != nil {
						return
					}
					if err := w.admin(t, pve.Delete, w.vmPath(500+i), nil); err != nil {
						t.Errorf("destroy VM %d: %v", 500+i, err)
					}
				}
			}()
			var all sync.WaitGroup
			for n := range 3 {
				all.Go(func() {
					for round := 0; round == 0 || !closed(gone); round++ {
						lifeAmongOthers(t, w, w.spec(n))
					}
				})
			}
			all.Wait()
			stop()
			<-gone
		})
	}
}

func closed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// lifeAmongOthers makes and destroys a sandbox, with the lists that the
// services ask for in between.
func lifeAmongOthers(t *testing.T, w *world, spec backend.Spec) {
	ctx := t.Context()
	step := func(what string, err error) {
		if err != nil {
			t.Errorf("%s of %d: %v (code %s)", what, spec.VMID, err, agentlab.CodeOf(err))
		}
	}
	_, err := w.driver.Taken(ctx, 1000, 1999)
	step("Taken", err)
	step("Create", w.driver.Create(ctx, spec))
	step("Start", w.driver.Start(ctx, spec.Ref()))
	_, err = w.driver.List(ctx)
	step("List", err)
	step("Inspect", inspectErr(w.driver.Inspect(ctx, spec.Ref())))
	step("Destroy", w.driver.Destroy(ctx, spec.Ref()))
}

// A list that fails again and again because of another VM is an error that may
// pass, and no proof that anything is absent.
func TestIncompleteList(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell, storage: "dir", admin: true})
		spec := w.create(t, 1)
		w.node.AddForeignVM(t, 500, "other", false, nil)
		w.node.Fail("list.config", pvenode.Fault{VMID: 500, Error: "Configuration file 'nodes/pve/qemu-server/500.conf' does not exist", Times: -1})
		_, err := w.driver.List(t.Context())
		wantCode(t, "List", err, agentlab.CodeUnavailable)
		if taken, err := w.open().Taken(t.Context(), 1000, 1999); err != nil || !slices.Contains(taken, spec.VMID) {
			t.Errorf("Taken does not need this list: %v, %v", taken, err)
		}
		disarm := w.node.Fail("GET /cluster/resources", pvenode.Fault{Status: 595, Error: "ipcc_send_rec[1] failed: Connection refused", Times: -1})
		_, err = w.open().Taken(t.Context(), 1000, 1999)
		wantCode(t, "Taken", err, agentlab.CodeUnavailable)
		wantCode(t, "Create", w.driver.Create(t.Context(), w.spec(2)), agentlab.CodeUnavailable)
		wantCode(t, "Destroy", w.driver.Destroy(t.Context(), w.spec(2).Ref()), agentlab.CodeUnavailable)
		disarm()
		ok(t, "Inspect", inspectErr(w.driver.Inspect(t.Context(), spec.Ref())))
		ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
		ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := w.driver.List(ctx); err == nil {
			t.Error("List goes on after its context has ended")
		}
	})
}

// A damaged foreign file on the storage does not prevent the creation of a
// sandbox, and Check names it.
func TestDamagedForeignFile(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell, storage: "dir", admin: true})
		if f := findingOf(t, w, "storage-disks"); f.Level != backend.LevelOK {
			t.Errorf("before: %+v", f)
		}
		w.node.Damage(w.node.AddVolume(t, "disks", 500, "vm-500-disk-0.qcow2", 1<<20))
		f := findingOf(t, w, "storage-disks")
		if f.Level != backend.LevelWarn || !strings.Contains(f.Detail, "/mnt/pve/disks/images/500/vm-500-disk-0.qcow2") || f.Remedy == "" {
			t.Errorf("%+v", f)
		}
		_, err := w.driver.Taken(t.Context(), 1000, 1999)
		ok(t, "Taken", err)
		spec := w.create(t, 1)
		ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
		ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
		// One with the number itself: another number is needed.
		w.node.Damage(w.node.AddVolume(t, "disks", 1002, "vm-1002-disk-0.qcow2", 1<<20))
		w.elsewhere(t, w.spec(2))
		if len(w.node.Volumes(1002)) != 1 {
			t.Error("the damaged file of another VM is gone")
		}
	})
}

func findingOf(t *testing.T, w *world, name string) backend.Finding {
	t.Helper()
	for _, f := range w.driver.Check(t.Context()) {
		if f.Name == name {
			return f
		}
	}
	t.Fatalf("there is no finding %s", name)
	return backend.Finding{}
}

// A node now and then kills the worker of a task before it begins: the call is
// made again, a few times.
func TestWorkerNotStarted(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		spec := w.spec(1)
		noWorker := pvenode.Fault{Error: "got no worker upid - start worker failed", Times: 3}
		w.node.Fail("fork", noWorker)
		ok(t, "Create", w.driver.Create(t.Context(), spec))
		w.node.Fail("fork", noWorker)
		ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
		w.node.Fail("fork", noWorker)
		ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))

		noWorker.Times = -1
		disarm := w.node.Fail("fork", noWorker)
		wantCode(t, "Create", w.driver.Create(t.Context(), spec), agentlab.CodeUnavailable)
		disarm()
		ok(t, "Create afterwards", w.driver.Create(t.Context(), spec))
		ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
		if left := w.left(t); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
}

// Where the API does not answer, templates are unknown, not missing.
func TestCheckWithoutAPI(t *testing.T) {
	w := newWorld(t, worldConfig{})
	w.open() // without what the one before knows of the template
	disarm := w.node.Fail("GET /nodes/{node}/qemu/{vmid}/config", pvenode.Fault{Status: 596, Error: "Broken pipe", Times: -1})
	if f := findingOf(t, w, "templates"); f.Level != backend.LevelWarn || !strings.Contains(f.Detail, "unknown") || f.Remedy == "" {
		t.Errorf("%+v", f)
	}
	disarm()
	w.node.Fail("*", pvenode.Fault{Status: 595, Error: "ipcc_send_rec[1] failed: Connection refused", Times: -1})
	if f := findingOf(t, w, "proxmox-api"); f.Level != backend.LevelError {
		t.Errorf("%+v", f)
	}
	if f := findingOf(t, w, "templates"); f.Level != backend.LevelWarn || !strings.Contains(f.Detail, "unknown") || f.Remedy == "" {
		t.Errorf("%+v", f)
	}
}
