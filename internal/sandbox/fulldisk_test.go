package sandbox_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
)

// untilGone lets time pass until the backend has nothing of a sandbox.
func (w *world) untilGone(sb agentlab.Sandbox) {
	w.Helper()
	for range 60 {
		if w.power(sb) == "" {
			return
		}
		time.Sleep(time.Second)
	}
	w.Fatalf("the VM is %s after a minute", w.power(sb))
}

// A sandbox is destroyed also when the database has no room to say so, and its
// row follows when there is room, in this process or in the next one.
func TestDestroyOnFullDisk(t *testing.T) {
	for name, crash := range map[string]bool{"same process": false, "next process": true} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				sb := w.create(agentlab.SandboxRequest{Name: "hog"})
				w.until(sb.VMID, agentlab.SandboxReady)
				w.dbFull.Store(true)
				got, err := w.svc.Destroy(context.Background(), sb.VMID)
				if err != nil || got.Desired != agentlab.DesiredDestroyed {
					w.Fatalf("%s, %v", got.Desired, err)
				}
				w.untilGone(sb)
				if row := w.get(sb.VMID); row.State != agentlab.SandboxReady || row.Desired != agentlab.DesiredRunning {
					w.Errorf("the database was written: %s, %s", row.State, row.Desired)
				}
				if crash {
					w.kill()
					w.dbFull.Store(false)
					w.begin()
				}
				w.dbFull.Store(false)
				w.until(sb.VMID, agentlab.SandboxDestroyed, agentlab.SandboxFailed)
				if row := w.get(sb.VMID); row.State != agentlab.SandboxDestroyed || row.Desired != agentlab.DesiredDestroyed {
					w.Errorf("%s, to be %s: %s", row.State, row.Desired, row.Reason)
				}
				w.settle()
				if left, err := os.ReadDir(w.intents); err != nil || len(left) != 0 {
					w.Errorf("stored requests are left: %v, %v", left, err)
				}
			})
		})
	}
}

// settle lets the loop finish what it does at this moment.
func (w *world) settle() {
	w.Helper()
	time.Sleep(time.Second) // of the bubble
}

// A lease ends also when the database has no room to say so.
func TestLeaseEndsOnFullDisk(t *testing.T) {
	inWorld(t, func(w *world) {
		sb := w.create(agentlab.SandboxRequest{Name: "hog", TTL: 10 * time.Minute})
		kept := w.create(agentlab.SandboxRequest{Name: "kept", TTL: 10 * time.Minute, Keepalive: new(true)})
		w.until(sb.VMID, agentlab.SandboxReady)
		w.until(kept.VMID, agentlab.SandboxReady)
		w.dbFull.Store(true)
		time.Sleep(10 * time.Minute)
		w.untilGone(sb)
		if p := w.power(kept); p != backend.PowerRunning {
			w.Errorf("a sandbox that is kept is %q", p)
		}
		w.dbFull.Store(false)
		w.until(sb.VMID, agentlab.SandboxDestroyed)
		w.until(kept.VMID, agentlab.SandboxStopped)
	})
}

// A request that was written down before the disk became full is met, too.
func TestWrittenDestroyOnFullDisk(t *testing.T) {
	inWorld(t, func(w *world) {
		sb := w.create(agentlab.SandboxRequest{Name: "hog", TTL: 10 * time.Minute})
		w.until(sb.VMID, agentlab.SandboxReady)
		free := w.host.Inject(fakeFault(fake.OpDestroy, agentlab.Errorf(agentlab.CodeBusy, "injected")))
		if _, err := w.svc.Destroy(context.Background(), sb.VMID); err != nil {
			w.Fatal(err)
		}
		w.dbFull.Store(true)
		free()
		w.untilGone(sb)
		w.dbFull.Store(false)
		w.until(sb.VMID, agentlab.SandboxDestroyed)
	})
}
