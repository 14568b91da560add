package sandbox_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// A VM with our mark and without a row is reported, listed, and destroyed when
// that is asked for.
func TestOrphanIsDestroyedByRequest(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		one, two := w.Stray(7777), w.Stray(7778)
		time.Sleep(time.Minute)
		if got := w.Svc.Orphaned(); len(got) != 2 {
			w.Errorf("the audit found %v", got)
		}
		list, _, err := w.Svc.Orphans(ctx)
		if err != nil || len(list) != 2 || list[0].Name != "stray" {
			w.Fatalf("%+v, %v", list, err)
		}
		for id, want := range map[string]backend.Ref{"7777": one, two.UID: two} {
			in, err := w.Svc.DestroyOrphan(ctx, id)
			if err != nil || in.Ref.UID != want.UID {
				w.Errorf("%s: %+v, %v", id, in, err)
			}
		}
		_, err = w.Svc.DestroyOrphan(ctx, "7777")
		sandboxtest.WantCode(w.T, err, agentlab.CodeNotFound)
		time.Sleep(time.Minute)
		left, err := w.Driver.List(ctx)
		if err != nil || len(left) != 1 || left[0].Ref.UID != sb.UID || len(w.Svc.Orphaned()) != 0 {
			w.Errorf("left: %+v, %v; orphans %v", left, err, w.Svc.Orphaned())
		}
		destroyed := 0
		for _, e := range w.Events(agentlab.EventDrift) {
			if strings.Contains(e.Data, `"destroyed":true`) && (strings.Contains(e.Data, one.UID) || strings.Contains(e.Data, two.UID)) {
				destroyed++
			}
		}
		if destroyed != 2 {
			w.Errorf("events: %+v", w.Events(agentlab.EventDrift))
		}
	})
}

// A VM with a row, in any state, or without our mark is not an orphan.
func TestOnlyOrphansAreDestroyed(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Host.PutForeign(8000)
		for _, id := range []string{"1000", sb.UID, "play", "8000", "9999", ""} {
			_, err := w.Svc.DestroyOrphan(ctx, id)
			sandboxtest.WantCode(w.T, err, agentlab.CodeNotFound)
			if id == "1000" && !strings.Contains(agentlab.HintOf(err), "agentlab sandbox destroy 1000") {
				w.Errorf("hint %q", agentlab.HintOf(err))
			}
		}
		if p := w.Power(sb); p != backend.PowerRunning {
			w.Errorf("the sandbox is %q", p)
		}
		if !w.Host.Foreign(8000) {
			w.Error("what is foreign is gone")
		}
	})
}

// A sandbox that is just being made has a row before it has a VM.
func TestOrphanIsNotASandboxBeingMade(t *testing.T) {
	for _, at := range []fake.Point{fake.Before, fake.Half, fake.After} {
		t.Run(string(at), func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				var tried atomic.Int32
				w.Host.Inject(fake.Fault{Op: fake.OpCreate, At: at, Hook: func(r backend.Spec) {
					tried.Add(1)
					_, err := w.Svc.DestroyOrphan(context.Background(), r.UID)
					if agentlab.CodeOf(err) != agentlab.CodeNotFound {
						w.Errorf("while it is made: %v", err)
					}
				}})
				sb := w.Create(agentlab.SandboxRequest{Name: "play"})
				w.Until(sb.VMID, agentlab.SandboxReady)
				if tried.Load() == 0 {
					w.Error("not tried")
				}
			})
		})
	}
}

// twins lists each VM a second time, under another mark.
type twins struct{ backend.Driver }

func (d twins) List(ctx context.Context) ([]backend.Instance, error) {
	list, err := d.Driver.List(ctx)
	for _, in := range list {
		in.Ref.UID = agentlab.NewUID()
		list = append(list, in)
	}
	return list, err
}

// bare lists VMs as a backend does that has lost the numbers of their sandboxes.
type bare struct {
	backend.Driver
	hostVM int
}

func (d bare) List(ctx context.Context) ([]backend.Instance, error) {
	list, err := d.Driver.List(ctx)
	for i := range list {
		list[i].VMID, list[i].HostVM, list[i].Ref.Handle = 0, d.hostVM, "5555"
	}
	return list, err
}

// The event about an orphan names it: by its number, by that of its VM, or by
// its UID. A handle is opaque: it is never read as a number.
func TestOrphanEventNamesTheVM(t *testing.T) {
	for name, c := range map[string]struct {
		wrap func(backend.Driver) backend.Driver
		want string // how its message goes on
	}{
		"number":         {func(d backend.Driver) backend.Driver { return d }, "VM 7777,"},
		"number of VM":   {func(d backend.Driver) backend.Driver { return bare{d, 104711} }, "VM 104711,"},
		"without either": {func(d backend.Driver) backend.Driver { return bare{d, 0} }, "the VM with the UID "},
	} {
		t.Run(name, func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				w.Kill() // it would report the orphan, too
				ref := w.Stray(7777)
				w.Wrap = c.wrap
				w.Begin()
				time.Sleep(time.Minute)
				got := w.Events(agentlab.EventDrift)
				if len(got) != 1 || !strings.HasPrefix(got[0].Message, "the backend has "+c.want) || !strings.Contains(got[0].Data, ref.UID) {
					t.Fatalf("%+v", got)
				}
				if strings.HasSuffix(c.want, "UID ") && !strings.Contains(got[0].Message, ref.UID) {
					t.Errorf("%q", got[0].Message)
				}
			})
		})
	}
}

// A number that two orphans have names neither of them.
func TestOrphanMustBeNamed(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		w.Kill()
		ref := w.Stray(7777)
		w.Wrap = func(d backend.Driver) backend.Driver { return twins{d} }
		w.Begin()
		_, err := w.Svc.DestroyOrphan(ctx, "7777")
		sandboxtest.WantCode(w.T, err, agentlab.CodeConflict)
		if _, err := w.Svc.DestroyOrphan(ctx, ref.UID); err != nil {
			w.Error(err)
		}
	})
}
