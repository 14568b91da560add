package sandbox_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// refs notes with which Ref the service stops and destroys.
type refs struct {
	backend.Driver
	mu   sync.Mutex
	seen []backend.Ref
}

func (d *refs) note(ref backend.Ref) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.seen = append(d.seen, ref)
}

// all returns the Refs so far.
func (d *refs) all() []backend.Ref {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.seen)
}

func (d *refs) Stop(ctx context.Context, ref backend.Ref, grace time.Duration) error {
	d.note(ref)
	return d.Driver.Stop(ctx, ref, grace)
}

func (d *refs) Destroy(ctx context.Context, ref backend.Ref) error {
	d.note(ref)
	return d.Driver.Destroy(ctx, ref)
}

// The handle that a driver gives is in the row of a sandbox once it is READY,
// and the driver gets it back, also from the next process.
func TestHandleIsPassedBack(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		var d *refs
		w.Wrap = func(inner backend.Driver) backend.Driver { d = &refs{Driver: inner}; return d }
		w.Restart()
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		if sb = w.Until(sb.VMID, agentlab.SandboxReady); sb.Handle != "fake-"+sb.UID {
			w.Fatalf("handle %q", sb.Handle)
		}
		if _, err := w.Svc.Stop(ctx, sb.VMID, 0); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxStopped)
		seen := d.all()
		w.Restart()
		if _, err := w.Svc.Destroy(ctx, sb.VMID); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
		if seen = append(seen, d.all()...); len(seen) < 2 {
			w.Errorf("calls: %+v", seen)
		}
		for _, ref := range seen {
			if ref != backend.RefOf(sb) {
				w.Errorf("called with %+v, want %+v", ref, backend.RefOf(sb))
			}
		}
	})
}
