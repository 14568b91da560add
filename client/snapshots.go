package client

import (
	"context"

	"github.com/agentlab-vm/agentlab/api"
)

// Snapshots lists the snapshots of a sandbox, which may no longer exist, or all
// for "".
func (c *Client) Snapshots(ctx context.Context, sandbox string) (api.List[api.Snapshot], error) {
	if sandbox == "" {
		return list[api.Snapshot](ctx, c, nil, 0, "", "snapshots")
	}
	return list[api.Snapshot](ctx, c, nil, 0, "", "sandboxes", sandbox, "snapshots")
}

// SaveSnapshot requests a snapshot of a sandbox.
func (c *Client) SaveSnapshot(ctx context.Context, sandbox string, r api.SnapshotCreate) (api.Snapshot, error) {
	return post[api.Snapshot](ctx, c, r, "sandboxes", sandbox, "snapshots")
}

// RestoreSnapshot requests that a sandbox be restored to one of its snapshots.
func (c *Client) RestoreSnapshot(ctx context.Context, sandbox, name string) (api.Sandbox, error) {
	return post[api.Sandbox](ctx, c, nil, "sandboxes", sandbox, "snapshots", name, "restore")
}

// DeleteSnapshot requests the deletion of a snapshot.
func (c *Client) DeleteSnapshot(ctx context.Context, sandbox, name string) (api.Snapshot, error) {
	return del[api.Snapshot](ctx, c, "sandboxes", sandbox, "snapshots", name)
}

// ForkSandbox requests sandboxes that continue another one.
func (c *Client) ForkSandbox(ctx context.Context, r api.SandboxFork) (api.List[api.Sandbox], error) {
	return post[api.List[api.Sandbox]](ctx, c, r, "forks")
}
