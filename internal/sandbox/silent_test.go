package sandbox_test

import (
	"context"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
)

// silent is a driver whose guests accept connections and do not answer.
type silent struct {
	*fake.Driver
	asked chan struct{} // gets a value when a guest is called, if there is room
	calls *atomic.Int32
}

func (d silent) DialControl(context.Context, backend.Ref) (net.Conn, error) {
	host, guest := net.Pipe()
	go func() {
		_, _ = io.Copy(io.Discard, guest) // until the caller leaves
		_ = guest.Close()
	}()
	d.calls.Add(1)
	select {
	case d.asked <- struct{}{}:
	default:
	}
	return host, nil
}

// silence makes the guests of the next daemon silent.
func (w *world) silence() silent {
	s := silent{asked: make(chan struct{}), calls: &atomic.Int32{}}
	w.wrap = func(d backend.Driver) backend.Driver {
		s.Driver = d.(*fake.Driver) //nolint:forcetypeassert // it is the world's
		return s
	}
	return s
}

// wantPolicySoon narrows a policy while a guest is being asked.
func wantPolicySoon(w *world, vmid int, most time.Duration) {
	w.Helper()
	begin := time.Now()
	if err := w.svc.NarrowNetwork(context.Background(), vmid, allowlist("a.example")); err != nil {
		w.Fatal(err)
	}
	if took := time.Since(begin); took > most {
		w.Errorf("the policy was in force after %s, want at most %s", took, most)
	}
	w.wantInForce(vmid, agentlab.Network{Mode: agentlab.NetworkNAT, Layers: []agentlab.Network{allowlist("a.example")}})
}

// A guest that accepts connections and does not answer delays neither its own
// policy nor that of another sandbox.
func TestASilentGuestDelaysNoPolicy(t *testing.T) {
	t.Run("running", func(t *testing.T) {
		inWorld(t, func(w *world) {
			hostile, other := w.create(agentlab.SandboxRequest{Profile: "secrets"}), w.create(agentlab.SandboxRequest{})
			w.until(hostile.VMID, agentlab.SandboxReady)
			w.until(other.VMID, agentlab.SandboxReady)
			s := w.silence()
			w.limits.Workers = 1
			w.restart() // the next daemon does not know whether the guest has its answer
			<-s.asked
			wantPolicySoon(w, hostile.VMID, 100*time.Millisecond)
			<-s.asked
			wantPolicySoon(w, other.VMID, 2100*time.Millisecond)
			// The pauses between the questions grow, also if something else wakes
			// the step.
			s.calls.Store(0)
			for range 600 {
				time.Sleep(time.Second)
				w.svc.Wake(hostile.VMID)
			}
			if n := s.calls.Load(); n < 8 || n > 14 {
				t.Errorf("the guest was asked %d times in ten minutes", n)
			}
		})
	})
	t.Run("changed just before the question", func(t *testing.T) {
		inWorld(t, func(w *world) {
			s := w.silence()
			w.restart()
			sb := w.create(agentlab.SandboxRequest{})
			<-s.asked
			took := make(chan time.Duration)
			w.host.Inject(fake.Fault{Op: fake.OpListenGuest, Times: 1, Hook: func(backend.Spec) {
				go func() {
					begin := time.Now()
					if err := w.svc.NarrowNetwork(context.Background(), sb.VMID, allowlist("a.example")); err != nil {
						t.Error(err)
					}
					took <- time.Since(begin)
				}()
				time.Sleep(time.Millisecond) // the row is written at once
			}})
			w.restart()
			if d := <-took; d > 100*time.Millisecond {
				t.Errorf("the policy was in force after %s", d)
			}
		})
	})
	t.Run("booting", func(t *testing.T) {
		inWorld(t, func(w *world) {
			s := w.silence()
			w.restart()
			sb := w.create(agentlab.SandboxRequest{})
			<-s.asked
			wantPolicySoon(w, sb.VMID, 100*time.Millisecond)
		})
	})
}
