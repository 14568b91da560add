package workspacecmd

import (
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// The hint for a sandbox whose workspace cannot be mounted names the command that finds
// the damage.
func TestHintForAnUnmountableWorkspace(t *testing.T) {
	err := work.SandboxFailed(api.Sandbox{Name: "play", VMID: 1000, State: string(agentlab.SandboxFailed), WorkspaceID: "ws-1", Reason: "workspace data cannot be mounted"})
	if hint := agentlab.HintOf(err); !strings.Contains(hint, "agentlab workspace fsck ws-1") {
		t.Errorf("hint %q", hint)
	}
}
