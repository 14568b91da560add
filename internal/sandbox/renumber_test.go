package sandbox_test

import (
	"context"
	"strconv"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
)

// TestNumbersOfOthers: numbers that somebody else has on the backend are left
// out, and when that cannot be known, nothing is allocated.
func TestNumbersOfOthers(t *testing.T) {
	inWorld(t, func(w *world) {
		w.host.PutForeign(1000)
		w.host.PutForeign(1001)
		if sb := w.create(agentlab.SandboxRequest{Name: "play"}); sb.VMID != 1002 {
			w.Errorf("number %d", sb.VMID)
		}
		remove := w.host.Inject(fake.Fault{Op: fake.OpTaken, Err: agentlab.Errorf(agentlab.CodeUnavailable, "the node is away")})
		_, err := w.svc.Create(context.Background(), agentlab.SandboxRequest{Name: "other"})
		wantCode(t, err, agentlab.CodeUnavailable)
		remove()
		w.destroyAll()
	})
}

// TestNumberTakenMeanwhile: somebody is quicker between the allocation and the
// making. The sandbox gets another number and comes up; what took the first
// one is not touched, and who was told the first one still finds the sandbox.
func TestNumberTakenMeanwhile(t *testing.T) {
	inWorld(t, func(w *world) {
		w.host.Inject(fake.Fault{Op: fake.OpCreate, Times: 2, Hook: func(r backend.Spec) { w.host.PutForeign(r.VMID) }})
		told := w.create(agentlab.SandboxRequest{Name: "play"})
		sb := w.until(told.VMID, agentlab.SandboxReady, agentlab.SandboxFailed)
		if sb.State != agentlab.SandboxReady || sb.VMID != told.VMID+2 || sb.UID != told.UID || w.power(sb) != backend.PowerRunning {
			w.Fatalf("%+v", sb)
		}
		for n := told.VMID; n < sb.VMID; n++ {
			if !w.host.Foreign(n) {
				w.Errorf("%d was another's and is gone", n)
			}
			got, err := w.svc.Get(context.Background(), strconv.Itoa(n))
			if err != nil || got.UID != sb.UID {
				w.Errorf("by its old number %d: %+v, %v", n, got, err)
			}
		}
		if evs := w.events(agentlab.EventSandboxRenumbered); len(evs) != 4 || evs[0].SandboxVMID != told.VMID || evs[3].SandboxVMID != sb.VMID {
			w.Errorf("events %+v", evs)
		}
		// Another sandbox may have the old number when that is free again; it
		// is found by it then.
		w.restart()
		if got := w.until(told.VMID, agentlab.SandboxReady); got.VMID != sb.VMID {
			w.Errorf("after a restart: %+v", got)
		}
		if _, err := w.svc.Destroy(context.Background(), told.VMID); err != nil {
			w.Error(err)
		}
		w.until(sb.VMID, agentlab.SandboxDestroyed)
		if !w.host.Foreign(told.VMID) {
			w.Error("the destroy of a sandbox by its old number took what has that now")
		}
	})
}

// TestNumberAlwaysTaken: a sandbox does not chase numbers for ever.
func TestNumberAlwaysTaken(t *testing.T) {
	inWorld(t, func(w *world) {
		w.host.Inject(fake.Fault{Op: fake.OpCreate, Hook: func(r backend.Spec) { w.host.PutForeign(r.VMID) }})
		told := w.create(agentlab.SandboxRequest{Name: "play"})
		sb := w.until(told.VMID, agentlab.SandboxReady, agentlab.SandboxFailed)
		if sb.State != agentlab.SandboxFailed || sb.VMID != told.VMID+5 {
			w.Errorf("%d is %s (%s)", sb.VMID, sb.State, sb.Reason)
		}
		w.destroyAll()
	})
}
