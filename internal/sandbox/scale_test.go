package sandbox_test

import (
	"context"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// Many sandboxes are made, survive a restart, and go: 1000 in a full run.
func TestMany(t *testing.T) {
	n := 50
	if sample.Full() {
		n = 1000
	}
	inWorld(t, func(w *world) {
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
