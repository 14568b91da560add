package sandbox_test

import (
	"context"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
)

func (w *world) suspended(name string) agentlab.Sandbox {
	w.Helper()
	sb := w.create(agentlab.SandboxRequest{Name: name})
	_, err := w.svc.Suspend(context.Background(), sb.VMID)
	wantCode(w.T, err, agentlab.CodeConflict) // it is not READY yet
	w.until(sb.VMID, agentlab.SandboxReady)
	if _, err := w.svc.Suspend(context.Background(), sb.VMID); err != nil {
		w.Fatal(err)
	}
	return w.until(sb.VMID, agentlab.SandboxSuspended)
}

func TestSuspendAndResume(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		sb := w.suspended("play")
		if p := w.power(sb); p != backend.PowerSuspended {
			w.Errorf("power %s", p)
		}
		_, err := w.svc.DialGuest(ctx, sb.VMID, 7)
		wantCode(t, err, agentlab.CodeConflict)
		w.restart() // a process that knows nothing of it leaves it as it is
		if _, err := w.svc.Suspend(ctx, sb.VMID); err != nil {
			w.Errorf("suspending a suspended one: %v", err)
		}
		for range 2 {
			if _, err := w.svc.Resume(ctx, sb.VMID); err != nil {
				w.Fatal(err)
			}
			w.until(sb.VMID, agentlab.SandboxReady)
		}
		if p := w.power(sb); p != backend.PowerRunning {
			w.Errorf("power %s", p)
		}
	})
}

// The end of a suspended sandbox in different cases.
func TestSuspendedEnds(t *testing.T) {
	for name, test := range map[string]struct {
		do   func(w *world, sb agentlab.Sandbox) error
		want agentlab.SandboxState
	}{
		"stopped": {func(w *world, sb agentlab.Sandbox) error {
			_, err := w.svc.Stop(context.Background(), sb.VMID, time.Hour)
			return err
		}, agentlab.SandboxStopped},
		"destroyed": {func(w *world, sb agentlab.Sandbox) error {
			_, err := w.svc.Destroy(context.Background(), sb.VMID)
			return err
		}, agentlab.SandboxDestroyed},
		"lease": {func(*world, agentlab.Sandbox) error { time.Sleep(2 * time.Hour); return nil }, agentlab.SandboxDestroyed},
		"crashed": {func(w *world, sb agentlab.Sandbox) error {
			return w.host.CrashVM(backend.RefOf(sb), "power cut")
		}, agentlab.SandboxFailed},
		"vanished": {func(w *world, sb agentlab.Sandbox) error {
			return w.host.RemoveBehindBack(backend.RefOf(sb))
		}, agentlab.SandboxFailed},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				sb := w.suspended("play")
				if err := test.do(w, sb); err != nil {
					w.Fatal(err)
				}
				w.until(sb.VMID, test.want)
			})
		})
	}
}

// It was resumed by hand, so it is suspended again.
func TestResumedManually(t *testing.T) {
	inWorld(t, func(w *world) {
		sb := w.suspended("play")
		if err := w.driver.Resume(context.Background(), backend.RefOf(sb)); err != nil {
			w.Fatal(err)
		}
		for w.power(sb) != backend.PowerSuspended {
			time.Sleep(time.Second)
		}
	})
}

// A backend that is in the way for a while is asked again.
func TestSuspendIsTriedAgain(t *testing.T) {
	inWorld(t, func(w *world) {
		sb := w.create(agentlab.SandboxRequest{Name: "play"})
		w.until(sb.VMID, agentlab.SandboxReady)
		w.host.Inject(fake.Fault{Op: fake.OpSuspend, Times: 2, Err: agentlab.Errorf(agentlab.CodeBusy, "locked")})
		w.host.Inject(fake.Fault{Op: fake.OpResume, At: fake.After, Times: 2, Err: agentlab.Errorf(agentlab.CodeUnknownOutcome, "the answer was lost")})
		if _, err := w.svc.Suspend(context.Background(), sb.VMID); err != nil {
			w.Fatal(err)
		}
		w.until(sb.VMID, agentlab.SandboxSuspended)
		if _, err := w.svc.Resume(context.Background(), sb.VMID); err != nil {
			w.Fatal(err)
		}
		w.until(sb.VMID, agentlab.SandboxReady)
	})
}

// A backend that cannot suspend says so, whatever state the sandbox is in: to
// wait for READY would not help.
func TestSuspendIsNotOfEveryBackend(t *testing.T) {
	inWorld(t, func(w *world) {
		w.kill()
		w.plain = true
		w.begin()
		sb := w.create(agentlab.SandboxRequest{Name: "play"})
		for range 2 {
			_, err := w.svc.Suspend(context.Background(), sb.VMID)
			wantCode(t, err, agentlab.CodeUnsupported)
			w.until(sb.VMID, agentlab.SandboxReady)
		}
	})
}
