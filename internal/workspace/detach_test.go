package workspace_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// A backend that detaches workspaces from stopped sandboxes only refuses others before
// it announces anything.
func TestDetachWithoutHotplug(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := sandboxtest.NewWorldOn(t, fake.Config{BootDelay: 2 * time.Second, NoVolumeHotplug: true})
		ctx := context.Background()
		sb := w.Create(sandboxtest.OnWorkspace("data", 0))
		w.Until(sb.VMID, agentlab.SandboxReady)
		before := len(w.Events(agentlab.EventWorkspaceLease))
		for _, force := range []bool{false, true} {
			_, err := w.Workspaces.Release(ctx, "data", force)
			sandboxtest.WantCode(t, err, agentlab.CodeConflict)
			if !strings.Contains(agentlab.HintOf(err), "agentlab sandbox stop "+w.Get(sb.VMID).Name) {
				t.Errorf("hint %q", agentlab.HintOf(err))
			}
		}
		synctest.Wait()
		if got := len(w.Events(agentlab.EventWorkspaceLease)); got != before {
			t.Errorf("%d events about a request that was refused", got-before)
		}
		sandboxtest.Must(w.Svc.Stop(ctx, sb.VMID, 0))(t)
		w.Until(sb.VMID, agentlab.SandboxStopped)
		if _, err := w.Workspaces.Release(ctx, "data", false); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got := w.Leases("data"); len(got) != 0 || w.AttachedTo("data") != "" {
			t.Errorf("leases %v", got)
		}
	})
}
