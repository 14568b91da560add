package sandbox_test

import (
	"context"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// Many sandboxes are made, survive a restart, and go: 1000 in a full run.
func TestMany(t *testing.T) {
	n := 50
	if sample.Full() {
		n = 1000
	}
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		w.Limits = sandbox.Limits{ParallelBoots: 50}
		w.Restart()
		for range n {
			w.Create(agentlab.SandboxRequest{TTL: 10 * time.Hour})
		}
		all := func(state agentlab.SandboxState) {
			w.Helper()
			for range 1000 {
				counts, err := w.Store.CountSandboxes(ctx)
				if err != nil {
					w.Fatal(err)
				}
				if counts[state] == n {
					return
				}
				time.Sleep(time.Second)
			}
			counts, _ := w.Store.CountSandboxes(ctx)
			w.Fatalf("not all are %s: %v", state, counts)
		}
		all(agentlab.SandboxReady)
		w.Restart()
		time.Sleep(time.Minute)
		all(agentlab.SandboxReady)
		w.DestroyAll()
		all(agentlab.SandboxDestroyed)
	})
}
