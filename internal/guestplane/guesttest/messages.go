package guesttest

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// SandboxRedactor implements guestplane.Redactors.
func (c *Controller) SandboxRedactor(ctx context.Context, _ int) (*redact.Redactor, error) {
	return c.Redactor(ctx, c.JobID)
}

// OfSandbox implements messages.Messages: the sandbox has a job and a workspace.
func (c *Controller) OfSandbox(_ context.Context, vmid int, kind agentlab.MessageScopeKind) (agentlab.MessageScope, string, error) {
	scope := agentlab.MessageScope{Kind: kind, ID: c.JobID}
	switch {
	case vmid != c.VMID:
		c.tb.Errorf("sandbox %d asks for its scope", vmid)
	case kind == "":
		scope.Kind = agentlab.MessageScopeJob
	case kind == agentlab.MessageScopeSession:
		return scope, "", agentlab.Errorf(agentlab.CodeNotFound, "this sandbox has no session")
	}
	return scope, "job:" + c.JobID, scope.Validate()
}

// Lease implements lease.Leases.
func (c *Controller) Lease(context.Context, int) (time.Time, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leaseEnds, nil
}

// RenewFromGuest implements lease.Leases. More than a day is refused.
func (c *Controller) RenewFromGuest(_ context.Context, vmid int, ttl time.Duration) (time.Time, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if vmid != c.VMID || ttl > 24*time.Hour {
		return time.Time{}, agentlab.Errorf(agentlab.CodeDenied, "the profile does not allow it")
	}
	c.leaseEnds = time.Unix(0, 0).Add(ttl)
	return c.leaseEnds, nil
}

// Post implements messages.Messages.
func (c *Controller) Post(_ context.Context, m agentlab.Message) (agentlab.Message, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.Kind == "" {
		m.Kind = "note"
	}
	if err := m.Validate(); err != nil {
		return m, err
	}
	if c.MaxPosts > 0 && len(c.messages) >= c.MaxPosts {
		return m, agentlab.Errorf(agentlab.CodeLimit, "too many")
	}
	m.ID = int64(len(c.messages) + 1)
	c.messages = append(c.messages, m)
	c.wake()
	return m, nil
}

// List implements messages.Messages.
func (c *Controller) List(_ context.Context, f agentlab.MessageFilter) (out []agentlab.Message, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range c.messages {
		if m.Scope == f.Scope && m.ID > f.AfterID {
			out = append(out, m)
		}
	}
	if f.Limit > 0 && len(out) > f.Limit {
		if f.Tail {
			return out[len(out)-f.Limit:], nil
		}
		out = out[:f.Limit]
	}
	return out, nil
}

// AwaitMessages implements messages.Messages.
func (c *Controller) AwaitMessages(ctx context.Context, f agentlab.MessageFilter) ([]agentlab.Message, error) {
	for {
		c.mu.Lock()
		changed := c.changed
		c.mu.Unlock()
		if list, err := c.List(ctx, f); err != nil || len(list) > 0 {
			return list, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, nil
		}
	}
}
