package server

import (
	"cmp"
	"encoding/json"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// mapSlice converts each element of a slice; the result is never nil.
func mapSlice[A, B any](in []A, f func(A) B) []B {
	out := make([]B, len(in))
	for i, a := range in {
		out[i] = f(a)
	}
	return out
}

// nonNil returns the list, which JSON writes as [] when it is empty.
func nonNil[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// optionalTime returns t as an optional field, nil if it is zero.
func optionalTime(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC()
	return &t
}

func toSandbox(s agentlab.Sandbox) api.Sandbox {
	return api.Sandbox{
		VMID: s.VMID, UID: s.UID, Name: s.Name, Backend: s.Backend, Profile: s.Profile, Image: s.Image,
		State: string(s.State), Desired: string(s.Desired), Reason: s.Reason, Waiting: s.Waiting, OnDisk: s.OnDisk,
		Cores: s.Resources.Cores, MemoryMB: s.Resources.MemoryMB, RootSizeGB: s.Resources.RootSizeGB,
		Nested: nested(s.Resources.Nested), NestedState: string(s.NestedState), NestedReason: s.NestedState.Reason(),
		NetworkMode: s.Network.Mode, Keepalive: s.Keepalive, JobID: s.JobID, Salvage: s.Salvage, Unbootable: s.Unbootable, WorkspaceID: s.Workspace, IP: s.IP, Handle: s.Handle, FromSnapshot: s.From.Name, Restoring: s.Restoring != "", Start: string(s.Start),
		LeaseExpiresAt: s.LeaseExpiresAt.UTC(), CreatedAt: s.CreatedAt.UTC(), UpdatedAt: s.UpdatedAt.UTC(), BootedAt: optionalTime(s.BootedAt),
	}
}

func nested(n agentlab.Nested) string { return string(cmp.Or(n, agentlab.NestedOff)) }

func toJob(j agentlab.Job) api.Job {
	var setup *api.JobSetup
	if j.Setup != (agentlab.JobSetup{}) {
		setup = &api.JobSetup{Reused: j.Setup.Reused, Note: j.Setup.Note}
	}
	return api.Job{
		Setup: setup,
		ID:    j.ID, RepoURL: j.RepoURL, Bundled: j.Bundled, Ref: j.Ref, Branch: j.Branch, Depth: j.Depth, Task: j.Task, Agent: j.Agent,
		Profile: j.Profile, Backend: j.Backend, Image: j.Image, Mode: j.Mode, TTLMinutes: int((j.TTL + time.Minute - 1) / time.Minute),
		Keepalive: j.Keepalive, Status: string(j.Status), Phase: j.Phase, Reason: j.Reason, Waiting: j.Waiting, ExitCode: j.ExitCode,
		SandboxVMID: j.SandboxVMID,
		Result: api.JobResult{
			BaseCommit: j.Result.BaseCommit, HeadCommit: j.Result.HeadCommit, Branch: j.Result.Branch,
			Commits: j.Result.Commits, Pushed: j.Result.Pushed, Dirty: j.Result.Dirty, Uncommitted: j.Result.Uncommitted,
			JudgeExit: j.Result.JudgeExit, Score: j.Result.Score,
		},
		Pick: j.Pick, Winner: j.Winner, Salvages: j.Salvages, ParentID: j.ParentID, Attempt: j.Attempt, AttemptCount: j.Attempts,
		CreatedAt: j.CreatedAt.UTC(), UpdatedAt: j.UpdatedAt.UTC(), StartedAt: optionalTime(j.StartedAt),
		FinishedAt: optionalTime(j.FinishedAt), DeadlineAt: optionalTime(j.DeadlineAt),
	}
}

func toArtifact(a agentlab.Artifact) api.Artifact {
	return api.Artifact{JobID: a.JobID, Path: a.Path, Size: a.Size, SHA256: a.SHA256, MIME: a.MIME, CreatedAt: a.CreatedAt.UTC()}
}

func toEvent(e agentlab.Event) api.Event {
	out := api.Event{ID: e.ID, Time: e.Time.UTC(), Kind: e.Kind, SandboxVMID: e.SandboxVMID, JobID: e.JobID, Message: e.Message}
	if e.Data != "" && e.Data != "{}" {
		_ = json.Unmarshal([]byte(e.Data), &out.Data) // written by the daemon; an invalid one is shown without its data
	}
	return out
}
