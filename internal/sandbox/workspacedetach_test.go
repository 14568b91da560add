package sandbox_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
)

// A backend that detaches workspaces from stopped sandboxes only refuses others before
// it announces anything.
func TestDetachWithoutHotplug(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorldOn(t, fake.Config{BootDelay: 2 * time.Second, NoVolumeHotplug: true})
		ctx := context.Background()
		sb := w.create(onWorkspace("data", 0))
		w.until(sb.VMID, agentlab.SandboxReady)
		before := len(w.events(agentlab.EventWorkspaceLease))
		for _, force := range []bool{false, true} {
			_, err := w.workspaces.Release(ctx, "data", force)
			wantCode(t, err, agentlab.CodeConflict)
			if !strings.Contains(agentlab.HintOf(err), "agentlab sandbox stop "+w.get(sb.VMID).Name) {
				t.Errorf("hint %q", agentlab.HintOf(err))
			}
		}
		synctest.Wait()
		if got := len(w.events(agentlab.EventWorkspaceLease)); got != before {
			t.Errorf("%d events about a request that was refused", got-before)
		}
		must(w.svc.Stop(ctx, sb.VMID, 0))(t)
		w.until(sb.VMID, agentlab.SandboxStopped)
		if _, err := w.workspaces.Release(ctx, "data", false); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got := w.leases("data"); len(got) != 0 || w.attachedTo("data") != "" {
			t.Errorf("leases %v", got)
		}
	})
}
