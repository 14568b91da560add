package server

import (
	"context"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Workspaces is the workspace service. Every workspace is named by its ID or name.
// *workspace.Service implements it.
type Workspaces interface {
	Create(ctx context.Context, sel agentlab.WorkspaceSelection) (agentlab.Workspace, error)
	Get(ctx context.Context, idOrName string) (agentlab.Workspace, error)
	List(ctx context.Context, trash bool) ([]agentlab.Workspace, error)
	Bytes(v agentlab.Workspace) int64
	Rename(ctx context.Context, idOrName, name string) (agentlab.Workspace, error)
	Resize(ctx context.Context, idOrName string, sizeGB int) (agentlab.Workspace, error)
	Delete(ctx context.Context, idOrName string, purge bool) (agentlab.Workspace, error)
	Undelete(ctx context.Context, idOrName, name string) (agentlab.Workspace, error)
	Replace(ctx context.Context, idOrName, by string, vmid int) (agentlab.Workspace, error)
	Fork(ctx context.Context, idOrName, name, snapshot string) (agentlab.Workspace, error)
	Attach(ctx context.Context, vmid int, sel agentlab.WorkspaceSelection) (agentlab.Sandbox, error)
	Snapshots(ctx context.Context, idOrName string) ([]agentlab.WorkspaceSnapshot, error)
	SaveSnapshot(ctx context.Context, idOrName, name string, attached agentlab.WorkspaceConsistency) (agentlab.WorkspaceSnapshot, error)
	RestoreSnapshot(ctx context.Context, idOrName, name string) (agentlab.Workspace, error)
	DeleteSnapshot(ctx context.Context, idOrName, name string) (agentlab.WorkspaceSnapshot, error)
	Check(ctx context.Context, idOrName string) ([]backend.Finding, error)    // of one, or all for ""
	Leases(ctx context.Context, id string) ([]agentlab.WorkspaceLease, error) // of one, or all for ""
	Release(ctx context.Context, idOrName string, force bool) (agentlab.WorkspaceLease, error)
}

// workspaceRoutes returns the routes for workspaces.
func (s *Server) workspaceRoutes() []route {
	const all, one = "/v1/workspaces", "/v1/workspaces/{workspace}"
	const snapshots, snapshot = one + "/snapshots", one + "/snapshots/{snapshot}"
	const read, write, remove = "workspace.read", "workspace.write", "workspace.delete"
	return []route{
		{post, all, AccessWrite, write, noTarget, anyOrigin, 202, "create-workspace", "Create an empty workspace", call(s.createWorkspace)},
		{get, all, AccessRead, read, noTarget, anyOrigin, 200, "workspaces", "List workspaces", paged("workspaces", s.listWorkspaces, workspaceKey)},
		{get, one, AccessRead, read, noTarget, anyOrigin, 200, "workspace", "Show a workspace", call(s.getWorkspace)},
		{post, one + "/rename", AccessWrite, write, noTarget, anyOrigin, 200, "rename-workspace", "Change the name of a workspace", call(s.renameWorkspace)},
		{post, one + "/resize", AccessWrite, write, noTarget, anyOrigin, 202, "resize-workspace", "Make a workspace larger", call(s.resizeWorkspace)},
		{del, one, AccessWrite, remove, noTarget, anyOrigin, 202, "delete-workspace", "Move a workspace to the trash, or delete it for good", call(s.deleteWorkspace)},
		{post, one + "/undelete", AccessWrite, remove, noTarget, anyOrigin, 200, "undelete-workspace", "Return a workspace from the trash", call(s.undeleteWorkspace)},
		{post, one + "/replace", AccessWrite, remove, noTarget, anyOrigin, 200, "replace-workspace", "Put a copy of a workspace in its place, and the workspace in the trash", call(s.replaceWorkspace)},
		{post, one + "/fork", AccessWrite, write, noTarget, anyOrigin, 202, "fork-workspace", "Create a copy of a workspace or of one of its snapshots", call(s.forkWorkspace)},
		{post, one + "/attach", AccessWrite, write, noTarget, anyOrigin, 202, "attach-workspace", "Give a sandbox a workspace", call(s.attachWorkspace)},
		{post, one + "/detach", AccessWrite, write, noTarget, anyOrigin, 202, "detach-workspace", "Take a workspace from the sandbox that has it", call(s.detachWorkspace)},
		{post, one + "/rebind", AccessWrite, write, noTarget, anyOrigin, 202, "rebind-workspace", "Create a sandbox, and move a workspace to it", call(s.rebindWorkspace)},
		{get, snapshots, AccessRead, read, noTarget, anyOrigin, 200, "workspace-snapshots", "List the snapshots of a workspace", listing(s.listWorkspaceSnapshots)},
		{post, snapshots, AccessWrite, write, noTarget, anyOrigin, 202, "save-workspace-snapshot", "Save the content of a workspace", call(s.saveWorkspaceSnapshot)},
		{post, snapshot + "/restore", AccessWrite, write, noTarget, anyOrigin, 202, "restore-workspace-snapshot", "Restore a workspace to one of its snapshots", call(s.restoreWorkspaceSnapshot)},
		{del, snapshot, AccessWrite, remove, noTarget, anyOrigin, 202, "delete-workspace-snapshot", "Delete a snapshot of a workspace", call(s.deleteWorkspaceSnapshot)},
		{get, "/v1/workspace-checks", AccessRead, read, noTarget, anyOrigin, 200, "check-workspaces", "Compare workspaces with the backend now", listing(s.checkWorkspaces)},
	}
}

// WorkspaceInput is the path parameter of calls about one workspace.
type WorkspaceInput struct {
	Workspace string `path:"workspace" doc:"ID or name of a workspace"`
}

func (s *Server) toWorkspace(v agentlab.Workspace, err error) (api.Workspace, error) {
	if err != nil {
		return api.Workspace{}, err
	}
	out := api.Workspace{
		ID: v.ID, Name: v.Name, State: string(v.State), Reason: v.Reason, Backend: v.Backend, Storage: v.Storage,
		SizeGB: v.SizeGB, GrowToGB: v.GrowToGB, Bytes: s.cfg.Services.Workspaces.Bytes(v), Unused: !v.Formatted, UID: v.UID, From: v.From.Name, CreatedAt: v.CreatedAt.UTC(), TrashedAt: optionalTime(v.TrashedAt),
	}
	if !v.TrashedAt.IsZero() && s.cfg.Trash > 0 {
		out.DeleteAfter = optionalTime(v.TrashedAt.Add(s.cfg.Trash))
	}
	return out, nil
}

type createWorkspaceInput struct{ Body api.WorkspaceCreate }

func (s *Server) createWorkspace(ctx context.Context, in *createWorkspaceInput) (api.Workspace, error) {
	return s.toWorkspace(s.cfg.Services.Workspaces.Create(ctx, agentlab.WorkspaceSelection{
		Workspace: in.Body.Name, SizeGB: in.Body.SizeGB, Storage: in.Body.Storage, Backend: in.Body.Backend,
	}))
}

type listWorkspacesInput struct {
	Trash bool `query:"trash" doc:"List the deleted ones instead"`
	PageInput
}

func workspaceKey(v api.Workspace) []string { return []string{timeKey(v.CreatedAt), v.ID} }

func (s *Server) listWorkspaces(ctx context.Context, in *listWorkspacesInput) ([]api.Workspace, error) {
	list, err := s.cfg.Services.Workspaces.List(ctx, in.Trash)
	if err != nil {
		return nil, err
	}
	leases, err := s.leases(ctx, "")
	return mapSlice(list, func(v agentlab.Workspace) api.Workspace {
		out, _ := s.toWorkspace(v, nil) // fails only with an error of its own
		out.Leases = leases[v.ID]
		return out
	}), err
}

func (s *Server) getWorkspace(ctx context.Context, in *WorkspaceInput) (api.Workspace, error) {
	out, err := s.toWorkspace(s.cfg.Services.Workspaces.Get(ctx, in.Workspace))
	if err != nil {
		return out, err
	}
	leases, err := s.leases(ctx, out.ID)
	out.Leases = leases[out.ID]
	return out, err
}

// leases returns the leases of a workspace, or of all for "", by workspace.
func (s *Server) leases(ctx context.Context, id string) (map[string][]api.WorkspaceLease, error) {
	list, err := s.cfg.Services.Workspaces.Leases(ctx, id)
	out := map[string][]api.WorkspaceLease{}
	for _, l := range list {
		out[l.WorkspaceID] = append(out[l.WorkspaceID], s.toLease(ctx, l))
	}
	return out, err
}

// toLease converts a lease. It ends at the latest with that of its sandbox.
func (s *Server) toLease(ctx context.Context, l agentlab.WorkspaceLease) api.WorkspaceLease {
	out := api.WorkspaceLease{
		Number: l.Number, SandboxVMID: l.VMID, Nonce: l.Nonce, RequestedAt: l.RequestedAt.UTC(), AcquiredAt: optionalTime(l.AcquiredAt),
		Release: string(l.Release), Reason: l.Reason,
	}
	if !l.Acquired() {
		out.WaitUntil = optionalTime(l.WaitUntil)
	}
	if sb, err := s.cfg.Services.Sandboxes.Get(ctx, strconv.Itoa(l.VMID)); err == nil && sb.UID == l.UID {
		out.Sandbox, out.JobID, out.ExpiresAt = sb.Name, sb.JobID, optionalTime(sb.LeaseExpiresAt)
	}
	return out
}

type attachWorkspaceInput struct {
	WorkspaceInput
	Body api.WorkspaceAttach
}

func (s *Server) attachWorkspace(ctx context.Context, in *attachWorkspaceInput) (api.Sandbox, error) {
	name := in.Body.Sandbox
	switch vmid := in.Body.VMID; {
	case name == "" && vmid == 0:
		return api.Sandbox{}, agentlab.Errorf(agentlab.CodeInvalid, "missing").WithField("sandbox")
	case name == "":
		name = strconv.Itoa(vmid)
	case vmid != 0:
		return api.Sandbox{}, agentlab.Errorf(agentlab.CodeInvalid, "sandbox names one, too").WithField("vmid")
	}
	return s.updateSandbox(ctx, name, func(vmid int) (agentlab.Sandbox, error) {
		sel := agentlab.WorkspaceSelection{Workspace: in.Workspace, Wait: time.Duration(in.Body.WaitSeconds) * time.Second}
		return s.cfg.Services.Workspaces.Attach(ctx, vmid, sel)
	})
}

type detachWorkspaceInput struct {
	WorkspaceInput
	Body api.WorkspaceDetach
}

func (s *Server) detachWorkspace(ctx context.Context, in *detachWorkspaceInput) (api.WorkspaceLease, error) {
	l, err := s.cfg.Services.Workspaces.Release(ctx, in.Workspace, in.Body.Force)
	if err != nil {
		return api.WorkspaceLease{}, err
	}
	return s.toLease(ctx, l), nil
}

type rebindWorkspaceInput struct {
	WorkspaceInput
	Body api.WorkspaceRebind
}

func (s *Server) rebindWorkspace(ctx context.Context, in *rebindWorkspaceInput) (api.Sandbox, error) {
	r := agentlab.SandboxRequest{Name: in.Body.Name, Profile: in.Body.Profile, TTL: minutes(in.Body.TTLMinutes), Keepalive: in.Body.Keepalive}
	if err := requireVerb(ctx, verbCreateSandbox, AccessWrite); err != nil {
		return api.Sandbox{}, err
	}
	if err := s.mayCreateSandbox(ctx, r); err != nil {
		return api.Sandbox{}, err
	}
	sb, err := s.cfg.Services.Sessions.Rebind(ctx, in.Workspace, r, in.Body.Force)
	if err != nil {
		return api.Sandbox{}, err
	}
	return toSandbox(sb), nil
}

type renameWorkspaceInput struct {
	WorkspaceInput
	Body api.WorkspaceRename
}

func (s *Server) renameWorkspace(ctx context.Context, in *renameWorkspaceInput) (api.Workspace, error) {
	return s.toWorkspace(s.cfg.Services.Workspaces.Rename(ctx, in.Workspace, in.Body.Name))
}

type replaceWorkspaceInput struct {
	WorkspaceInput
	Body api.WorkspaceReplace
}

func (s *Server) replaceWorkspace(ctx context.Context, in *replaceWorkspaceInput) (api.Workspace, error) {
	return s.toWorkspace(s.cfg.Services.Workspaces.Replace(ctx, in.Workspace, in.Body.By, in.Body.VMID))
}

type resizeWorkspaceInput struct {
	WorkspaceInput
	Body api.WorkspaceResize
}

func (s *Server) resizeWorkspace(ctx context.Context, in *resizeWorkspaceInput) (api.Workspace, error) {
	return s.toWorkspace(s.cfg.Services.Workspaces.Resize(ctx, in.Workspace, in.Body.SizeGB))
}

type deleteWorkspaceInput struct {
	WorkspaceInput
	Purge bool `query:"purge" doc:"Delete it for good, also if it is in the trash"`
}

func (s *Server) deleteWorkspace(ctx context.Context, in *deleteWorkspaceInput) (api.Workspace, error) {
	return s.toWorkspace(s.cfg.Services.Workspaces.Delete(ctx, in.Workspace, in.Purge))
}

type undeleteWorkspaceInput struct {
	WorkspaceInput
	Body api.WorkspaceUndelete
}

func (s *Server) undeleteWorkspace(ctx context.Context, in *undeleteWorkspaceInput) (api.Workspace, error) {
	return s.toWorkspace(s.cfg.Services.Workspaces.Undelete(ctx, in.Workspace, in.Body.Name))
}

type forkWorkspaceInput struct {
	WorkspaceInput
	Body api.WorkspaceFork
}

func (s *Server) forkWorkspace(ctx context.Context, in *forkWorkspaceInput) (api.Workspace, error) {
	return s.toWorkspace(s.cfg.Services.Workspaces.Fork(ctx, in.Workspace, in.Body.Name, in.Body.FromSnapshot))
}

func (s *Server) listWorkspaceSnapshots(ctx context.Context, in *WorkspaceInput) ([]api.WorkspaceSnapshot, error) {
	list, err := s.cfg.Services.Workspaces.Snapshots(ctx, in.Workspace)
	return mapSlice(list, toWorkspaceSnapshot), err
}

type saveWorkspaceSnapshotInput struct {
	WorkspaceInput
	Body api.WorkspaceSnapshotCreate
}

func (s *Server) saveWorkspaceSnapshot(ctx context.Context, in *saveWorkspaceSnapshotInput) (api.WorkspaceSnapshot, error) {
	n, err := s.cfg.Services.Workspaces.SaveSnapshot(ctx, in.Workspace, in.Body.Name, agentlab.WorkspaceConsistency(in.Body.Attached))
	return toWorkspaceSnapshot(n), err
}

type workspaceSnapshotInput struct {
	WorkspaceInput
	Snapshot string `path:"snapshot" doc:"Name of a snapshot of the workspace"`
}

func (s *Server) restoreWorkspaceSnapshot(ctx context.Context, in *workspaceSnapshotInput) (api.Workspace, error) {
	return s.toWorkspace(s.cfg.Services.Workspaces.RestoreSnapshot(ctx, in.Workspace, in.Snapshot))
}

func (s *Server) deleteWorkspaceSnapshot(ctx context.Context, in *workspaceSnapshotInput) (api.WorkspaceSnapshot, error) {
	n, err := s.cfg.Services.Workspaces.DeleteSnapshot(ctx, in.Workspace, in.Snapshot)
	return toWorkspaceSnapshot(n), err
}

func toWorkspaceSnapshot(n agentlab.WorkspaceSnapshot) api.WorkspaceSnapshot {
	return api.WorkspaceSnapshot{
		UID: n.UID, Name: n.Name, WorkspaceID: n.WorkspaceID, State: string(n.State),
		Consistency: string(n.Consistency), SizeGB: n.SizeGB, CreatedAt: n.CreatedAt.UTC(),
	}
}

type checkWorkspacesInput struct {
	Workspace string `query:"workspace" doc:"ID or name of a workspace; default: all"`
}

func (s *Server) checkWorkspaces(ctx context.Context, in *checkWorkspacesInput) ([]api.Finding, error) {
	list, err := s.cfg.Services.Workspaces.Check(ctx, in.Workspace)
	return mapSlice(list, func(f backend.Finding) api.Finding {
		return api.Finding{Name: f.Name, Level: string(f.Level), Detail: f.Detail, Remedy: f.Remedy}
	}), err
}
