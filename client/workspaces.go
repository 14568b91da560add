package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/agentlab-vm/agentlab/api"
)

// CreateWorkspace requests an empty workspace.
func (c *Client) CreateWorkspace(ctx context.Context, w api.WorkspaceCreate) (api.Workspace, error) {
	return post[api.Workspace](ctx, c, w, "workspaces")
}

// Workspaces lists workspaces, or with trash the deleted ones.
func (c *Client) Workspaces(ctx context.Context, trash bool) (api.List[api.Workspace], error) {
	q := url.Values{}
	set(q, "trash", trash)
	return list[api.Workspace](ctx, c, q, 0, "", "workspaces")
}

// Workspace returns the workspace with that ID or name.
func (c *Client) Workspace(ctx context.Context, workspace string) (api.Workspace, error) {
	return get[api.Workspace](ctx, c, nil, "workspaces", workspace)
}

// RenameWorkspace changes the name of a workspace.
func (c *Client) RenameWorkspace(ctx context.Context, workspace, name string) (api.Workspace, error) {
	return post[api.Workspace](ctx, c, api.WorkspaceRename{Name: name}, "workspaces", workspace, "rename")
}

// ReplaceWorkspace puts a copy of a workspace in its place, and the workspace in the trash.
func (c *Client) ReplaceWorkspace(ctx context.Context, workspace string, r api.WorkspaceReplace) (api.Workspace, error) {
	return post[api.Workspace](ctx, c, r, "workspaces", workspace, "replace")
}

// ResizeWorkspace requests that a workspace becomes larger; sizeGB is in GiB.
func (c *Client) ResizeWorkspace(ctx context.Context, workspace string, sizeGB int) (api.Workspace, error) {
	return post[api.Workspace](ctx, c, api.WorkspaceResize{SizeGB: sizeGB}, "workspaces", workspace, "resize")
}

// DeleteWorkspace moves a workspace to the trash, or with purge deletes it for good.
func (c *Client) DeleteWorkspace(ctx context.Context, workspace string, purge bool) (api.Workspace, error) {
	q := url.Values{}
	set(q, "purge", purge)
	return send[api.Workspace](ctx, c, http.MethodDelete, q, nil, "", "workspaces", workspace)
}

// UndeleteWorkspace returns a workspace from the trash, with another name unless name
// is "".
func (c *Client) UndeleteWorkspace(ctx context.Context, workspace, name string) (api.Workspace, error) {
	return post[api.Workspace](ctx, c, api.WorkspaceUndelete{Name: name}, "workspaces", workspace, "undelete")
}

// ForkWorkspace requests a copy of a workspace.
func (c *Client) ForkWorkspace(ctx context.Context, workspace string, r api.WorkspaceFork) (api.Workspace, error) {
	return post[api.Workspace](ctx, c, r, "workspaces", workspace, "fork")
}

// WorkspaceSnapshots lists the snapshots of a workspace.
func (c *Client) WorkspaceSnapshots(ctx context.Context, workspace string) (api.List[api.WorkspaceSnapshot], error) {
	return get[api.List[api.WorkspaceSnapshot]](ctx, c, nil, "workspaces", workspace, "snapshots")
}

// SaveWorkspaceSnapshot requests a snapshot of a workspace.
func (c *Client) SaveWorkspaceSnapshot(ctx context.Context, workspace string, r api.WorkspaceSnapshotCreate) (api.WorkspaceSnapshot, error) {
	return post[api.WorkspaceSnapshot](ctx, c, r, "workspaces", workspace, "snapshots")
}

// RestoreWorkspaceSnapshot requests that a workspace be restored to one of its
// snapshots.
func (c *Client) RestoreWorkspaceSnapshot(ctx context.Context, workspace, name string) (api.Workspace, error) {
	return post[api.Workspace](ctx, c, nil, "workspaces", workspace, "snapshots", name, "restore")
}

// DeleteWorkspaceSnapshot requests the deletion of a snapshot of a workspace.
func (c *Client) DeleteWorkspaceSnapshot(ctx context.Context, workspace, name string) (api.WorkspaceSnapshot, error) {
	return del[api.WorkspaceSnapshot](ctx, c, "workspaces", workspace, "snapshots", name)
}

// CheckWorkspaces compares a workspace, or all for "", with the backend now.
func (c *Client) CheckWorkspaces(ctx context.Context, workspace string) (api.List[api.Finding], error) {
	q := url.Values{}
	set(q, "workspace", workspace)
	return get[api.List[api.Finding]](ctx, c, q, "workspace-checks")
}

// AttachWorkspace requests that a sandbox gets a workspace, and returns the sandbox.
func (c *Client) AttachWorkspace(ctx context.Context, workspace string, r api.WorkspaceAttach) (api.Sandbox, error) {
	return post[api.Sandbox](ctx, c, r, "workspaces", workspace, "attach")
}

// RebindWorkspace creates a sandbox and moves a workspace to it.
func (c *Client) RebindWorkspace(ctx context.Context, workspace string, r api.WorkspaceRebind) (api.Sandbox, error) {
	return post[api.Sandbox](ctx, c, r, "workspaces", workspace, "rebind")
}

// DetachWorkspace requests that a workspace is taken from the sandbox that has it, and
// returns the lease that ends then.
func (c *Client) DetachWorkspace(ctx context.Context, workspace string, force bool) (api.WorkspaceLease, error) {
	return post[api.WorkspaceLease](ctx, c, api.WorkspaceDetach{Force: force}, "workspaces", workspace, "detach")
}
