package sandbox_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// A lease that ends while no daemon runs ends all the same, and the next
// daemon says so.
func TestLeaseEndsWithoutDaemon(t *testing.T) {
	for name, keep := range map[string]bool{"destroyed": false, "kept": true} {
		t.Run(name, func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				sb := w.Create(agentlab.SandboxRequest{Name: "play", TTL: time.Hour, Keepalive: &keep})
				w.Until(sb.VMID, agentlab.SandboxReady)
				w.Kill()
				time.Sleep(time.Hour)
				if p := w.Power(sb); p != backend.PowerRunning {
					t.Errorf("power %s when its lease ends: a daemon that lives acts first", p)
				}
				time.Sleep(3 * time.Minute)
				if p := w.Power(sb); p != backend.PowerStopped {
					t.Errorf("power %s after its lease", p)
				}
				w.Begin()
				sb = w.Until(sb.VMID, map[bool]agentlab.SandboxState{false: agentlab.SandboxDestroyed, true: agentlab.SandboxStopped}[keep])
				if !strings.HasPrefix(sb.Reason, "its lease ended; it was powered off by its supervisor") {
					t.Errorf("reason %q", sb.Reason)
				}
				var states []string
				for _, e := range w.Events(agentlab.EventSandboxState) {
					states = append(states, e.Message)
				}
				if all := strings.Join(states, "|"); !strings.Contains(all, "play is TIMEOUT: its lease ended") || strings.Contains(all, "FAILED") {
					t.Error(all)
				}
			})
		})
	}
}

// The deadline follows the lease, also while the sandbox is off.
func TestDeadlineFollowsTheLease(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Create(agentlab.SandboxRequest{TTL: time.Hour})
		w.Until(sb.VMID, agentlab.SandboxReady)
		if _, err := w.Svc.RenewLease(ctx, sb.VMID, 3*time.Hour); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		w.Kill()
		time.Sleep(2 * time.Hour)
		if p := w.Power(sb); p != backend.PowerRunning {
			t.Errorf("power %s, and its lease was renewed", p)
		}
		w.Begin()
		time.Sleep(time.Minute)
		if _, err := w.Svc.Stop(ctx, sb.VMID, time.Second); err != nil {
			t.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxStopped)
		if _, err := w.Svc.RenewLease(ctx, sb.VMID, 30*time.Minute); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Svc.Start(ctx, sb.VMID); err != nil {
			t.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Kill()
		time.Sleep(35 * time.Minute)
		if p := w.Power(sb); p != backend.PowerStopped {
			t.Errorf("power %s after its lease", p)
		}
	})
}

// A clock that was set back while no daemon ran does not extend a lease.
func TestClockSetBackExtendsNoLease(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{TTL: time.Hour})
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Kill()
		w.Clock = func() time.Time { return time.Now().Add(-24 * time.Hour) }
		w.Begin()
		began := time.Now()
		w.Until(sb.VMID, agentlab.SandboxTimeout, agentlab.SandboxStopped, agentlab.SandboxDestroyed)
		if d := time.Since(began); d > 65*time.Minute {
			t.Errorf("it ended after %s", d)
		}
	})
}

// A backend that cannot take the deadline now gets it later.
func TestDeadlineIsSetAgain(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{TTL: time.Hour})
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Host.Inject(fake.Fault{Op: fake.OpSetDeadline, Times: 3, Err: agentlab.Errorf(agentlab.CodeUnavailable, "it does not answer")})
		if _, err := w.Svc.RenewLease(context.Background(), sb.VMID, 2*time.Hour); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Minute)
		w.Kill()
		time.Sleep(100 * time.Minute)
		if p := w.Power(sb); p != backend.PowerRunning {
			t.Errorf("power %s, and its lease was renewed", p)
		}
		time.Sleep(20 * time.Minute)
		if p := w.Power(sb); p != backend.PowerStopped {
			t.Errorf("power %s after its lease", p)
		}
	})
}
