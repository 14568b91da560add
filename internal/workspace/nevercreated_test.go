package workspace

import (
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
)

// A check of a workspace that was never created reports the reason, not a loss.
func TestCheckOfANeverCreatedWorkspace(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.host.Inject(fake.Fault{Op: fake.OpCreateVolume, Times: 1, Err: agentlab.Errorf(agentlab.CodeNoSpace, "the storage is full")})
		w.is(w.must(w.Create(t.Context(), agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 4})), agentlab.WorkspaceFailed)
		found, err := w.Check(t.Context(), "data")
		if err != nil || len(found) != 1 || found[0].Level != backend.LevelWarn || !strings.Contains(found[0].Detail, "the storage is full") ||
			strings.Contains(found[0].Remedy, "lost") || !strings.Contains(found[0].Remedy, "agentlab workspace delete") {
			t.Errorf("%+v, %v", found, err)
		}
	})
}
