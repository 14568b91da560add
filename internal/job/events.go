package job

import "github.com/agentlab-vm/agentlab"

func jobEvent(kind string, j agentlab.Job, data map[string]any, format string, args ...any) agentlab.Event {
	return agentlab.NewEvent(kind, data, format, args...).About(j.SandboxVMID, j.ID)
}
