package sandbox_test

import (
	"context"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// Many sandboxes are made, survive a restart, and go.
func TestMany(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped in short mode: many sandboxes take some seconds")
	}
	inWorld(t, func(w *world) {
		const n = many
		ctx := context.Background()
		w.limits = sandbox.Limits{ParallelBoots: 50}
		w.restart()
		for range n {
			w.create(agentlab.SandboxRequest{TTL: 10 * time.Hour})
		}
		all := func(state agentlab.SandboxState) {
			w.Helper()
			for range 1000 {
				counts, err := w.store.CountSandboxes(ctx)
				if err != nil {
					w.Fatal(err)
				}
				if counts[state] == n {
					return
				}
				time.Sleep(time.Second)
			}
			counts, _ := w.store.CountSandboxes(ctx)
			w.Fatalf("not all are %s: %v", state, counts)
		}
		all(agentlab.SandboxReady)
		w.restart()
		time.Sleep(time.Minute)
		all(agentlab.SandboxReady)
		w.destroyAll()
		all(agentlab.SandboxDestroyed)
	})
}
