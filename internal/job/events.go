package job

import "github.com/agentlab-vm/agentlab"

func jobEvent(kind string, j agentlab.Job, data map[string]any, format string, args ...any) agentlab.Event {
	return agentlab.NewEvent(kind, data, format, args...).About(j.SandboxVMID, j.ID)
}

// end changes j, which is not final, to a final status.
func (s *Service) end(j *agentlab.Job, status agentlab.JobStatus, reason string) []agentlab.Event {
	j.Status, j.Reason, j.Waiting, j.FinishedAt = status, agentlab.Reason(reason), "", s.clock().UTC()
	if status == agentlab.JobCompleted {
		j.Reason = ""
	}
	return []agentlab.Event{statusEvent(*j)}
}

func statusEvent(j agentlab.Job) agentlab.Event {
	data := map[string]any{"status": j.Status}
	text := ""
	if j.Reason != "" {
		data["reason"] = j.Reason
		text = ": " + j.Reason
	}
	if j.ExitCode != nil {
		data["exit_code"] = *j.ExitCode
	}
	return jobEvent(agentlab.EventJobStatus, j, data, "job %s is %s%s", j.ID, j.Status, text)
}
