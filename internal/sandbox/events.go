package sandbox

import (
	"time"

	"github.com/agentlab-vm/agentlab"
)

func event(kind string, sb agentlab.Sandbox, data map[string]any, format string, args ...any) agentlab.Event {
	return agentlab.NewEvent(kind, data, format, args...).About(sb.VMID, sb.JobID)
}

func createdEvent(sb agentlab.Sandbox) agentlab.Event {
	return event(agentlab.EventSandboxCreated, sb,
		map[string]any{"name": sb.Name, "profile": sb.Profile, "image": sb.Image, "lease_expires_at": sb.LeaseExpiresAt.Format(time.RFC3339)},
		"sandbox %s requested with profile %s", sb.Name, sb.Profile)
}

// stateEvent tells of a state that was entered.
func stateEvent(sb agentlab.Sandbox, from agentlab.SandboxState) agentlab.Event {
	data := map[string]any{"from": from, "to": sb.State}
	text := ""
	if sb.Reason != "" {
		switch sb.State {
		case agentlab.SandboxFailed, agentlab.SandboxTimeout, agentlab.SandboxStopped, agentlab.SandboxDestroyed:
			text = ": " + sb.Reason
			data["reason"] = sb.Reason
		}
	}
	return event(agentlab.EventSandboxState, sb, data, "sandbox %s is %s%s", sb.Name, sb.State, text)
}

func desiredEvent(sb agentlab.Sandbox) agentlab.Event {
	return event(agentlab.EventSandboxState, sb, map[string]any{"desired": sb.Desired, "state": sb.State}, "sandbox %s is to be %s", sb.Name, sb.Desired)
}

func leaseEvent(sb agentlab.Sandbox, what string) agentlab.Event {
	end := sb.LeaseExpiresAt.UTC().Format(time.RFC3339)
	return event(agentlab.EventSandboxLease, sb, map[string]any{"lease_expires_at": end}, "lease of sandbox %s %s, ends %s", sb.Name, what, end)
}
