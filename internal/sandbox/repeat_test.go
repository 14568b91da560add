package sandbox_test

import (
	"context"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
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
		begin func(w *world) agentlab.Sandbox
		do    func(w *world, vmid int) error
		done  func(agentlab.Sandbox) bool
	}{
		{
			"suspend", fake.OpSuspend,
			func(w *world) agentlab.Sandbox { return w.ready("play") },
			func(w *world, vmid int) error { _, err := w.svc.Suspend(ctx, vmid, false); return err },
			in(agentlab.SandboxSuspended),
		},
		{
			"resume", fake.OpResume,
			func(w *world) agentlab.Sandbox { return w.suspended("play") },
			func(w *world, vmid int) error { _, err := w.svc.Resume(ctx, vmid); return err },
			in(agentlab.SandboxReady),
		},
		{
			"stop", fake.OpStop,
			func(w *world) agentlab.Sandbox { return w.ready("play") },
			func(w *world, vmid int) error { _, err := w.svc.Stop(ctx, vmid, time.Second); return err },
			in(agentlab.SandboxStopped),
		},
		{
			"destroy", fake.OpDestroy,
			func(w *world) agentlab.Sandbox { return w.ready("play") },
			func(w *world, vmid int) error { _, err := w.svc.Destroy(ctx, vmid); return err },
			in(agentlab.SandboxDestroyed),
		},
		{
			"restore", fake.OpRestoreSnapshot,
			func(w *world) agentlab.Sandbox {
				sb := w.ready("play")
				w.save(sb, "clean", false)
				return sb
			},
			func(w *world, vmid int) error { _, err := w.snaps.RestoreSnapshot(ctx, vmid, "clean"); return err },
			func(sb agentlab.Sandbox) bool { return sb.Restoring == "" },
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				sb := tc.begin(w)
				w.host.Inject(fake.Fault{Op: tc.op, Delay: 10 * time.Second})
				began := time.Now()
				for range 3 {
					if err := tc.do(w, sb.VMID); err != nil {
						t.Fatal(err)
					}
					time.Sleep(time.Second)
				}
				w.untilIt(sb.VMID, tc.done)
				if d := time.Since(began); d >= 10900*time.Millisecond {
					t.Errorf("it was done after %s: the backend was called again", d)
				}
			})
		})
	}
}

// A stop with another grace counts at once, also while the guest powers off.
func TestStopWithAnotherGrace(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		sb := w.create(agentlab.SandboxRequest{Name: "never-stops"})
		w.until(sb.VMID, agentlab.SandboxReady)
		must(w.svc.Stop(ctx, sb.VMID, time.Hour))(t)
		time.Sleep(time.Second)
		began := time.Now()
		must(w.svc.Stop(ctx, sb.VMID, 0))(t)
		w.until(sb.VMID, agentlab.SandboxStopped)
		if d := time.Since(began); d > 5*time.Second {
			t.Errorf("it stopped after %s", d)
		}
	})
}

// The grace of a stop is not that of a later stop, such as the end of a lease.
func TestGraceIsOfOneStop(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		sb := w.create(agentlab.SandboxRequest{Name: "never-stops", TTL: time.Hour, Keepalive: new(true)})
		w.until(sb.VMID, agentlab.SandboxReady)
		for range 2 { // the second one finds a stopped sandbox
			must(w.svc.Stop(ctx, sb.VMID, 0))(t)
			w.until(sb.VMID, agentlab.SandboxStopped)
		}
		sb = must(w.svc.Start(ctx, sb.VMID))(t)
		w.until(sb.VMID, agentlab.SandboxReady)
		w.until(sb.VMID, agentlab.SandboxStopped)
		if d := time.Since(sb.LeaseExpiresAt); d < 30*time.Second {
			t.Errorf("it stopped %s after its lease, want the usual grace of 30 s", d)
		}
	})
}
