package job

import (
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// phaseDone is the phase of the last report of a runner.
const phaseDone = "done"

// has reports whether a job has an artifact with a path.
func has(files []agentlab.Artifact, path string) bool {
	return slices.ContainsFunc(files, func(a agentlab.Artifact) bool { return a.Path == path })
}

// resultStored reports whether all work in the repository of an ended job is in
// its result.
func resultStored(j agentlab.Job, files []agentlab.Artifact) bool {
	return j.Result.Known() && (!j.Result.HasWork() || has(files, agentlab.ArtifactResult))
}

// hasUnshipped reports whether a job has, or may have, work on the disk of its sandbox
// that is not stored. A user's sandbox and one that was only prepared have none: their
// jobs run no agent.
func hasUnshipped(j agentlab.Job, files []agentlab.Artifact) bool {
	if j.StartedAt.IsZero() || j.Agent == agentlab.AgentNone || j.Prepares() || j.Salvages != "" {
		return false
	}
	if !j.Bundled && j.RepoURL == "" { // the runner uploads the declared outputs before its last report
		return j.Status != agentlab.JobCompleted && j.Phase != phaseDone
	}
	return !resultStored(j, files)
}

// unshipped returns an event that names the work of a job that ends, if its
// sandbox may have work that AgentLab has not stored; else nothing. When it is
// not known, there may be such work.
func unshipped(j agentlab.Job, files []agentlab.Artifact) []agentlab.Event {
	if !hasUnshipped(j, files) {
		return nil
	}
	var taken time.Time
	for _, a := range files {
		if agentlab.IsCheckpoint(a.Path) && a.CreatedAt.After(taken) {
			taken = a.CreatedAt
		}
	}
	data := map[string]any{"kept": j.Keepalive}
	stored := "has no result and no checkpoint"
	if !taken.IsZero() {
		data["checkpoint"] = taken.UTC().Format(time.RFC3339)
		stored = "has no result, but a checkpoint of " + taken.UTC().Format(time.RFC3339)
	}
	rest := "other work is deleted with the disk of its sandbox, unless that is kept ('agentlab job salvage " + j.ID + "'); what is in a workspace remains"
	if j.Keepalive {
		rest = "other work remains on the disk of its sandbox until the sandbox is destroyed"
	}
	return []agentlab.Event{jobEvent(agentlab.EventJobUnshipped, j, data, "job %s %s; %s", j.ID, stored, rest)}
}
