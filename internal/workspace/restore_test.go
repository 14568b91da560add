package workspace

import (
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
)

// Only a restoration that succeeded to a snapshot without a file system permits the
// next guest to create one.
func TestFailedRestoreKeepsFormatted(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		v := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 4}))
		w.save(v, "blank")
		if _, err := w.store.UpdateWorkspace(ctx, v.ID, agentlab.WorkspaceQuota{}, func(now *agentlab.Workspace) ([]agentlab.Event, error) {
			now.Formatted = true
			return nil, nil
		}); err != nil {
			t.Fatal(err)
		}
		w.host.Inject(fake.Fault{Op: fake.OpRestoreVolume, At: fake.Before, Times: 1, Err: agentlab.Errorf(agentlab.CodeInternal, "a disk error")})
		v = w.must(w.RestoreSnapshot(ctx, "data", "blank"))
		if w.is(v, agentlab.WorkspaceReady); !v.Formatted {
			t.Error("after a failed restoration, a file system may be created over the files")
		}
		crashed := false
		w.host.Inject(fake.Fault{Op: fake.OpRestoreVolume, At: fake.After, Times: 1, Crash: true, Hook: func(backend.Spec) { crashed = true }})
		if _, err := w.RestoreSnapshot(ctx, "data", "blank"); err != nil {
			t.Fatal(err)
		}
		w.settled()
		if w.kill(); !crashed {
			t.Fatal("the driver did not crash")
		}
		w.begin()
		if v = w.row(v.ID); v.State == agentlab.WorkspaceRestoring && !v.Formatted {
			t.Errorf("before the restoration is complete: %+v", v)
		}
		w.settled()
		if v = w.row(v.ID); v.State != agentlab.WorkspaceReady || v.Formatted {
			t.Errorf("restored: %+v", v)
		}
	})
}
