package work

import (
	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// Brief returns ui without the events that each start of a sandbox has. The error of a wait
// has the reason of a failure.
func Brief(ui UI) UI { return brief{ui} }

type brief struct{ UI }

// ShowEvent implements UI.
func (b brief) ShowEvent(e api.Event) {
	if !isRoutine(e) {
		b.UI.ShowEvent(e)
	}
}

// isRoutine reports whether each start of a sandbox has an event like e.
func isRoutine(e api.Event) bool {
	_, refused := e.Data["refused"]
	return e.Kind == agentlab.EventSession || e.Kind == agentlab.EventSandboxNested || e.Kind == agentlab.EventSandboxState && !refused
}
