package server

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// stubWorkspaces and stubSessions are the services of state that lasts.
type stubWorkspaces struct{ *stub }

func (s stubWorkspaces) act(name string) (agentlab.Workspace, error) {
	return agentlab.Workspace{ID: "ws-aaaaaaaaaaaaa", Name: "data", State: agentlab.WorkspaceReady}, s.called("workspace." + name)
}

func (s stubWorkspaces) snap(name string) (agentlab.WorkspaceSnapshot, error) {
	return agentlab.WorkspaceSnapshot{Name: "clean"}, s.called("workspace.snapshot." + name)
}

func (s stubWorkspaces) Create(context.Context, agentlab.WorkspaceSelection) (agentlab.Workspace, error) {
	return s.act("create")
}

func (s stubWorkspaces) Get(context.Context, string) (agentlab.Workspace, error) { return s.act("get") }

func (s stubWorkspaces) List(context.Context, bool) ([]agentlab.Workspace, error) {
	v, err := s.act("list")
	return []agentlab.Workspace{v}, err
}

func (stubWorkspaces) Bytes(agentlab.Workspace) int64 { return 4096 }

func (s stubWorkspaces) Rename(context.Context, string, string) (agentlab.Workspace, error) {
	return s.act("rename")
}

func (s stubWorkspaces) Replace(context.Context, string, string, int) (agentlab.Workspace, error) {
	return s.act("replace")
}

func (s stubWorkspaces) Resize(context.Context, string, int) (agentlab.Workspace, error) {
	return s.act("resize")
}

func (s stubWorkspaces) Delete(context.Context, string, bool) (agentlab.Workspace, error) {
	return s.act("delete")
}

func (s stubWorkspaces) Undelete(context.Context, string, string) (agentlab.Workspace, error) {
	return s.act("undelete")
}

func (s stubWorkspaces) Fork(context.Context, string, string, string) (agentlab.Workspace, error) {
	return s.act("fork")
}

func (s stubWorkspaces) Snapshots(context.Context, string) ([]agentlab.WorkspaceSnapshot, error) {
	n, err := s.snap("list")
	return []agentlab.WorkspaceSnapshot{n}, err
}

func (s stubWorkspaces) SaveSnapshot(context.Context, string, string, agentlab.WorkspaceConsistency) (agentlab.WorkspaceSnapshot, error) {
	return s.snap("save")
}

func (s stubWorkspaces) RestoreSnapshot(context.Context, string, string) (agentlab.Workspace, error) {
	return s.act("restore")
}

func (s stubWorkspaces) DeleteSnapshot(context.Context, string, string) (agentlab.WorkspaceSnapshot, error) {
	return s.snap("delete")
}

func (s stubWorkspaces) Check(context.Context, string) ([]backend.Finding, error) {
	return nil, s.called("workspace.check")
}

func (s stubWorkspaces) Leases(context.Context, string) ([]agentlab.WorkspaceLease, error) {
	return []agentlab.WorkspaceLease{{Number: 1, WorkspaceID: "ws-aaaaaaaaaaaaa", VMID: 1000, Nonce: "n"}}, s.called("workspace.leases")
}

func (s stubWorkspaces) Release(context.Context, string, bool) (agentlab.WorkspaceLease, error) {
	return agentlab.WorkspaceLease{Number: 1, WorkspaceID: "ws-aaaaaaaaaaaaa", VMID: 1000, Nonce: "n"}, s.called("workspace.release")
}

func (s stubWorkspaces) Attach(context.Context, int, agentlab.WorkspaceSelection) (agentlab.Sandbox, error) {
	return stubSandboxes(s).act("workspace")
}

type stubSessions struct{ *stub }

func (s stubSessions) act(name string) (agentlab.Session, error) {
	return agentlab.Session{ID: "se-aaaaaaaaaaaaa", Name: "fix", WorkspaceID: "ws-aaaaaaaaaaaaa"}, s.called("session." + name)
}

func (s stubSessions) box(name string) (agentlab.Sandbox, error) {
	return agentlab.Sandbox{VMID: 1000, Name: "fix"}, s.called("session." + name)
}

func (s stubSessions) Create(context.Context, agentlab.SessionRequest) (agentlab.Session, error) {
	return s.act("create")
}

func (s stubSessions) Get(context.Context, string) (agentlab.Session, error) { return s.act("get") }

func (s stubSessions) List(context.Context) ([]agentlab.Session, error) {
	v, err := s.act("list")
	return []agentlab.Session{v}, err
}

func (s stubSessions) History(context.Context, agentlab.Session) ([]agentlab.SessionSandbox, error) {
	return nil, s.called("session.history")
}

func (stubSessions) Sandbox(context.Context, agentlab.Session) (sb agentlab.Sandbox, ok bool, err error) {
	return sb, false, nil
}

func (s stubSessions) Resume(context.Context, string, time.Duration, *bool) (agentlab.Sandbox, error) {
	return s.box("resume")
}

func (s stubSessions) Stop(context.Context, string, bool) (agentlab.Sandbox, error) {
	return s.box("stop")
}

func (s stubSessions) Fork(context.Context, string, string, string) (agentlab.Session, error) {
	return s.act("fork")
}

func (s stubSessions) Rename(context.Context, string, string) (agentlab.Session, error) {
	return s.act("rename")
}

func (s stubSessions) Delete(context.Context, string, bool) error { return s.called("session.delete") }

func (s stubSessions) Rebind(context.Context, string, agentlab.SandboxRequest, bool) (agentlab.Sandbox, error) {
	return agentlab.Sandbox{VMID: 1, UID: ownUID, Name: "box"}, s.called("session.rebind")
}

func (s stubSessions) ForJob(_ context.Context, _ string, r agentlab.JobRequest) (agentlab.JobRequest, error) {
	return r, s.called("session.job")
}
