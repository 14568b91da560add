package sandbox_test

import (
	"context"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// A guest that accepts connections and does not answer delays neither its own
// policy nor that of another sandbox.
func TestASilentGuestDelaysNoPolicy(t *testing.T) {
	t.Run("running", func(t *testing.T) {
		sandboxtest.InWorld(t, func(w *sandboxtest.World) {
			hostile, other := w.Create(agentlab.SandboxRequest{Profile: "secrets"}), w.Create(agentlab.SandboxRequest{})
			w.Until(hostile.VMID, agentlab.SandboxReady)
			w.Until(other.VMID, agentlab.SandboxReady)
			s := w.Silence()
			w.Limits.Workers = 1
			w.Restart() // the next daemon does not know whether the guest has its answer
			<-s.Asked
			sandboxtest.WantPolicySoon(w, hostile.VMID, 100*time.Millisecond)
			<-s.Asked
			sandboxtest.WantPolicySoon(w, other.VMID, 2100*time.Millisecond)
			// The pauses between the questions grow, also if something else wakes
			// the step.
			s.Calls.Store(0)
			for range 600 {
				time.Sleep(time.Second)
				w.Svc.Wake(hostile.VMID)
			}
			if n := s.Calls.Load(); n < 8 || n > 14 {
				t.Errorf("the guest was asked %d times in ten minutes", n)
			}
		})
	})
	t.Run("changed just before the question", func(t *testing.T) {
		sandboxtest.InWorld(t, func(w *sandboxtest.World) {
			s := w.Silence()
			w.Restart()
			sb := w.Create(agentlab.SandboxRequest{})
			<-s.Asked
			took := make(chan time.Duration)
			w.Host.Inject(fake.Fault{Op: fake.OpListenGuest, Times: 1, Hook: func(backend.Spec) {
				go func() {
					begin := time.Now()
					if err := w.Svc.NarrowNetwork(context.Background(), sb.VMID, sandboxtest.Allowlist("a.example")); err != nil {
						t.Error(err)
					}
					took <- time.Since(begin)
				}()
				time.Sleep(time.Millisecond) // the row is written at once
			}})
			w.Restart()
			if d := <-took; d > 100*time.Millisecond {
				t.Errorf("the policy was in force after %s", d)
			}
		})
	})
	t.Run("booting", func(t *testing.T) {
		sandboxtest.InWorld(t, func(w *sandboxtest.World) {
			s := w.Silence()
			w.Restart()
			sb := w.Create(agentlab.SandboxRequest{})
			<-s.Asked
			sandboxtest.WantPolicySoon(w, sb.VMID, 100*time.Millisecond)
		})
	})
}
