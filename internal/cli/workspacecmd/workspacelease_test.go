package workspacecmd

import (
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// A request about the lease of a workspace that was given up is no error of a command
// that waits for another workspace.
func TestRefusedLeaseOfAnotherWorkspace(t *testing.T) {
	mounted := func(e api.Event) bool { return e.Data["mounted"] == true }
	for _, c := range []struct {
		data  map[string]any
		ended bool
		code  agentlab.Code
	}{
		{map[string]any{"workspace": "ws-1", "mounted": true}, true, ""},
		{map[string]any{"workspace": "ws-1"}, false, ""},
		{map[string]any{"workspace": "ws-1", "refused": "busy", "code": "conflict"}, false, agentlab.CodeConflict},
		{map[string]any{"workspace": "ws-2", "refused": "busy", "code": "conflict"}, false, ""},
		{map[string]any{"workspace": "ws-2", "mounted": true}, false, ""},
	} {
		if ended, err := settlesLease(api.Event{Data: c.data}, "ws-1", mounted); ended != c.ended || agentlab.CodeOf(err) != c.code {
			t.Errorf("%v: %v, %v", c.data, ended, err)
		}
	}
}
