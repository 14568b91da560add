package sandbox_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// A sandbox is destroyed also when the database has no room to say so, and its
// row follows when there is room, in this process or in the next one.
func TestDestroyOnFullDisk(t *testing.T) {
	for name, crash := range map[string]bool{"same process": false, "next process": true} {
		t.Run(name, func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				sb := w.Create(agentlab.SandboxRequest{Name: "hog"})
				w.Until(sb.VMID, agentlab.SandboxReady)
				w.DBFull.Store(true)
				got, err := w.Svc.Destroy(context.Background(), sb.VMID)
				if err != nil || got.Desired != agentlab.DesiredDestroyed {
					w.Fatalf("%s, %v", got.Desired, err)
				}
				w.UntilGone(sb)
				if row := w.Get(sb.VMID); row.State != agentlab.SandboxReady || row.Desired != agentlab.DesiredRunning {
					w.Errorf("the database was written: %s, %s", row.State, row.Desired)
				}
				if crash {
					w.Kill()
					w.DBFull.Store(false)
					w.Begin()
				}
				w.DBFull.Store(false)
				w.Until(sb.VMID, agentlab.SandboxDestroyed, agentlab.SandboxFailed)
				if row := w.Get(sb.VMID); row.State != agentlab.SandboxDestroyed || row.Desired != agentlab.DesiredDestroyed {
					w.Errorf("%s, to be %s: %s", row.State, row.Desired, row.Reason)
				}
				w.Settle()
				if left, err := os.ReadDir(w.Intents); err != nil || len(left) != 0 {
					w.Errorf("stored requests are left: %v, %v", left, err)
				}
			})
		})
	}
}

// A lease ends also when the database has no room to say so.
func TestLeaseEndsOnFullDisk(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "hog", TTL: 10 * time.Minute})
		kept := w.Create(agentlab.SandboxRequest{Name: "kept", TTL: 10 * time.Minute, Keepalive: new(true)})
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Until(kept.VMID, agentlab.SandboxReady)
		w.DBFull.Store(true)
		time.Sleep(10 * time.Minute)
		w.UntilGone(sb)
		if p := w.Power(kept); p != backend.PowerRunning {
			w.Errorf("a sandbox that is kept is %q", p)
		}
		w.DBFull.Store(false)
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
		w.Until(kept.VMID, agentlab.SandboxStopped)
	})
}

// A request that was written down before the disk became full is met, too.
func TestWrittenDestroyOnFullDisk(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "hog", TTL: 10 * time.Minute})
		w.Until(sb.VMID, agentlab.SandboxReady)
		free := w.Host.Inject(fakeFault(fake.OpDestroy, agentlab.Errorf(agentlab.CodeBusy, "injected")))
		if _, err := w.Svc.Destroy(context.Background(), sb.VMID); err != nil {
			w.Fatal(err)
		}
		w.DBFull.Store(true)
		free()
		w.UntilGone(sb)
		w.DBFull.Store(false)
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
	})
}
