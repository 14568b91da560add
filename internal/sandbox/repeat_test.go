package sandbox_test

import (
	"context"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// A request that is repeated while it is carried out does not interrupt the
// backend: a resume that is interrupted may lose the memory of the guest.
func TestRepeatedRequestDoesNotInterrupt(t *testing.T) {
	ctx := context.Background()
	in := func(state agentlab.SandboxState) func(agentlab.Sandbox) bool {
		return func(sb agentlab.Sandbox) bool { return sb.State == state }
	}
	for _, tc := range []struct {
		name  string
		op    fake.Op
		begin func(w *sandboxtest.World) agentlab.Sandbox
		do    func(w *sandboxtest.World, vmid int) error
		done  func(agentlab.Sandbox) bool
	}{
		{
			"suspend", fake.OpSuspend,
			func(w *sandboxtest.World) agentlab.Sandbox { return w.Ready("play") },
			func(w *sandboxtest.World, vmid int) error { _, err := w.Svc.Suspend(ctx, vmid, false); return err },
			in(agentlab.SandboxSuspended),
		},
		{
			"resume", fake.OpResume,
			func(w *sandboxtest.World) agentlab.Sandbox { return w.Suspended("play") },
			func(w *sandboxtest.World, vmid int) error { _, err := w.Svc.Resume(ctx, vmid); return err },
			in(agentlab.SandboxReady),
		},
		{
			"stop", fake.OpStop,
			func(w *sandboxtest.World) agentlab.Sandbox { return w.Ready("play") },
			func(w *sandboxtest.World, vmid int) error { _, err := w.Svc.Stop(ctx, vmid, time.Second); return err },
			in(agentlab.SandboxStopped),
		},
		{
			"destroy", fake.OpDestroy,
			func(w *sandboxtest.World) agentlab.Sandbox { return w.Ready("play") },
			func(w *sandboxtest.World, vmid int) error { _, err := w.Svc.Destroy(ctx, vmid); return err },
			in(agentlab.SandboxDestroyed),
		},
		{
			"restore", fake.OpRestoreSnapshot,
			func(w *sandboxtest.World) agentlab.Sandbox {
				sb := w.Ready("play")
				w.Save(sb, "clean", false)
				return sb
			},
			func(w *sandboxtest.World, vmid int) error {
				_, err := w.Snaps.RestoreSnapshot(ctx, vmid, "clean")
				return err
			},
			func(sb agentlab.Sandbox) bool { return sb.Restoring == "" },
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				sb := tc.begin(w)
				w.Host.Inject(fake.Fault{Op: tc.op, Delay: 10 * time.Second})
				began := time.Now()
				for range 3 {
					if err := tc.do(w, sb.VMID); err != nil {
						t.Fatal(err)
					}
					time.Sleep(time.Second)
				}
				w.UntilIt(sb.VMID, tc.done)
				if d := time.Since(began); d >= 10900*time.Millisecond {
					t.Errorf("it was done after %s: the backend was called again", d)
				}
			})
		})
	}
}

// A stop with another grace counts at once, also while the guest powers off.
func TestStopWithAnotherGrace(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Create(agentlab.SandboxRequest{Name: "never-stops"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		sandboxtest.Must(w.Svc.Stop(ctx, sb.VMID, time.Hour))(t)
		time.Sleep(time.Second)
		began := time.Now()
		sandboxtest.Must(w.Svc.Stop(ctx, sb.VMID, 0))(t)
		w.Until(sb.VMID, agentlab.SandboxStopped)
		if d := time.Since(began); d > 5*time.Second {
			t.Errorf("it stopped after %s", d)
		}
	})
}

// The grace of a stop is not that of a later stop, such as the end of a lease.
func TestGraceIsOfOneStop(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Create(agentlab.SandboxRequest{Name: "never-stops", TTL: time.Hour, Keepalive: new(true)})
		w.Until(sb.VMID, agentlab.SandboxReady)
		for range 2 { // the second one finds a stopped sandbox
			sandboxtest.Must(w.Svc.Stop(ctx, sb.VMID, 0))(t)
			w.Until(sb.VMID, agentlab.SandboxStopped)
		}
		sb = sandboxtest.Must(w.Svc.Start(ctx, sb.VMID))(t)
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Until(sb.VMID, agentlab.SandboxStopped)
		if d := time.Since(sb.LeaseExpiresAt); d < 30*time.Second {
			t.Errorf("it stopped %s after its lease, want the usual grace of 30 s", d)
		}
	})
}
