package client

import (
	"context"
	"net/url"

	"github.com/agentlab-vm/agentlab/api"
)

// SandboxQuery chooses sandboxes.
type SandboxQuery struct {
	State     string // only this state; "" means all
	Destroyed bool   // also those that are DESTROYED
	Limit     int    // at most this many, by VMID; 0 means all there are
	Cursor    string // Next of the page before
}

// CreateSandbox asks for a sandbox. It returns when the sandbox is recorded,
// which is before anything runs.
func (c *Client) CreateSandbox(ctx context.Context, s api.SandboxCreate) (api.Sandbox, error) {
	return post[api.Sandbox](ctx, c, "/v1/sandboxes", s)
}

// Sandboxes lists sandboxes by VMID.
func (c *Client) Sandboxes(ctx context.Context, q SandboxQuery) (api.List[api.Sandbox], error) {
	v := url.Values{}
	set(v, "state", q.State)
	set(v, "destroyed", q.Destroyed)
	return pages[api.Sandbox](ctx, c, "/v1/sandboxes", v, q.Limit, q.Cursor)
}

// Sandbox returns one sandbox, by VMID or name.
func (c *Client) Sandbox(ctx context.Context, sandbox string) (api.Sandbox, error) {
	p, err := join("sandboxes", sandbox)
	if err != nil {
		return api.Sandbox{}, err
	}
	return get[api.Sandbox](ctx, c, p, nil)
}

// StartSandbox asks for a stopped sandbox to run again.
func (c *Client) StartSandbox(ctx context.Context, sandbox string) (api.Sandbox, error) {
	return c.actOn(ctx, sandbox, "start", nil)
}

// SuspendSandbox asks for a READY sandbox to be frozen.
func (c *Client) SuspendSandbox(ctx context.Context, sandbox string) (api.Sandbox, error) {
	return c.actOn(ctx, sandbox, "suspend", nil)
}

// ResumeSandbox asks for a suspended sandbox to go on where it stood.
func (c *Client) ResumeSandbox(ctx context.Context, sandbox string) (api.Sandbox, error) {
	return c.actOn(ctx, sandbox, "resume", nil)
}

// StopSandbox asks for a sandbox to be powered off, its disk kept.
func (c *Client) StopSandbox(ctx context.Context, sandbox string, how api.SandboxStop) (api.Sandbox, error) {
	return c.actOn(ctx, sandbox, "stop", how)
}

// DestroySandbox asks for a sandbox to be destroyed, in whatever state it is.
func (c *Client) DestroySandbox(ctx context.Context, sandbox string) (api.Sandbox, error) {
	return c.actOn(ctx, sandbox, "destroy", nil)
}

// Orphans lists the virtual machines that bear the daemon's mark and belong to
// no sandbox.
func (c *Client) Orphans(ctx context.Context) (api.List[api.Orphan], error) {
	return get[api.List[api.Orphan]](ctx, c, "/v1/orphans", nil)
}

// DestroyOrphan destroys one of them, by UID, or by VMID where only one has it,
// and returns when nothing of it is left.
func (c *Client) DestroyOrphan(ctx context.Context, orphan string) (api.Orphan, error) {
	p, err := join("orphans", orphan, "destroy")
	if err != nil {
		return api.Orphan{}, err
	}
	return post[api.Orphan](ctx, c, p, nil)
}

// RenewLease lets the lease end minutes from now.
func (c *Client) RenewLease(ctx context.Context, sandbox string, minutes int) (api.Sandbox, error) {
	p, err := join("sandboxes", sandbox, "lease", "renew")
	if err != nil {
		return api.Sandbox{}, err
	}
	return post[api.Sandbox](ctx, c, p, api.LeaseRenew{TTLMinutes: minutes})
}

func (c *Client) actOn(ctx context.Context, sandbox, action string, in any) (api.Sandbox, error) {
	p, err := join("sandboxes", sandbox, action)
	if err != nil {
		return api.Sandbox{}, err
	}
	return post[api.Sandbox](ctx, c, p, in)
}

// Console reads what the VM wrote to its console. With follow it goes on
// until the sandbox is gone.
func (c *Client) Console(ctx context.Context, sandbox string, follow bool) (Body, error) {
	p, err := join("sandboxes", sandbox, "console")
	if err != nil {
		return nil, err
	}
	v := url.Values{}
	set(v, "follow", follow)
	return c.stream(ctx, p, v)
}

// SSHKey authorises an ephemeral public key in the guest and starts its sshd.
func (c *Client) SSHKey(ctx context.Context, sandbox string, key api.SSHKey) (api.SSHTarget, error) {
	p, err := join("sandboxes", sandbox, "ssh-key")
	if err != nil {
		return api.SSHTarget{}, err
	}
	return post[api.SSHTarget](ctx, c, p, key)
}
