package workspace

import (
	"fmt"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// stateEvent is the event of the current state of a workspace. If a request was given
// up, cause is why.
func stateEvent(v agentlab.Workspace, cause error) agentlab.Event {
	return eventWith(map[string]any{}, v, cause)
}

// endEvent is stateEvent for a workspace whose operation has ended: what was requested
// before, and how long it took.
func endEvent(before, v agentlab.Workspace, took time.Duration, cause error) agentlab.Event {
	data := map[string]any{}
	switch op := before.Operation(); {
	case op == "":
	case cause != nil || v.State == agentlab.WorkspaceFailed:
		data["failed_operation"] = op
	default:
		data["operation"], data["seconds"] = op, took.Seconds()
	}
	return eventWith(data, v, cause)
}

func eventWith(data map[string]any, v agentlab.Workspace, cause error) agentlab.Event {
	data["workspace"], data["name"], data["state"], data["size_gb"] = v.ID, v.Name, v.State, v.SizeGB
	text := fmt.Sprintf("workspace %s is %s", v.Name, v.State)
	if v.Reason != "" {
		data["reason"] = v.Reason
		text += ": " + v.Reason
	}
	if cause != nil {
		refused(data, cause)
		if v.State != agentlab.WorkspaceFailed {
			text += ", a request failed: " + agentlab.Reason(cause.Error())
		}
	}
	return agentlab.NewEvent(agentlab.EventWorkspaceState, data, "%s", text)
}

// snapshotEvent is the event of the current state of a snapshot. If it was not saved,
// cause is why.
func snapshotEvent(v agentlab.Workspace, n agentlab.WorkspaceSnapshot, cause error) agentlab.Event {
	data := map[string]any{"workspace": v.ID, "snapshot": n.UID, "name": n.Name, "state": n.State, "consistency": n.Consistency}
	if n.State == agentlab.WorkspaceSnapshotReady {
		data["seconds"] = n.SavedAt.Sub(n.CreatedAt).Seconds()
	}
	text := fmt.Sprintf("snapshot %s of workspace %s is %s", n.Name, v.Name, n.State)
	if cause != nil {
		refused(data, cause)
		text = fmt.Sprintf("snapshot %s of workspace %s was not saved: %s", n.Name, v.Name, agentlab.Reason(cause.Error()))
	}
	return agentlab.NewEvent(agentlab.EventWorkspaceSnapshot, data, "%s", text)
}

// refused adds why a request was given up. Clients that wait for it then return an
// error.
func refused(data map[string]any, cause error) {
	data["refused"], data["code"], data["hint"] = agentlab.Reason(cause.Error()), agentlab.CodeOf(cause), agentlab.HintOf(cause)
}
