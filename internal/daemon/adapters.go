package daemon

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/server"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// The services know neither store nor server, and these know no service: here
// one's words are put into the other's.

type sandboxStore struct{ *store.Store }

func (s sandboxStore) Sandboxes(ctx context.Context, f sandbox.Filter) ([]agentlab.Sandbox, error) {
	return s.Store.Sandboxes(ctx, store.SandboxFilter(f))
}

type sandboxView struct{ *sandbox.Service }

func (v sandboxView) Create(ctx context.Context, r server.SandboxRequest) (agentlab.Sandbox, error) {
	return v.Service.Create(ctx, sandbox.Request{
		Name: r.Name, Profile: r.Profile, Image: r.Image, Keepalive: r.Keepalive, TTL: r.TTL, Cores: r.Cores, MemoryMB: r.MemoryMB,
	})
}

func (v sandboxView) List(ctx context.Context, f server.SandboxFilter) ([]agentlab.Sandbox, error) {
	q := sandbox.Filter{Destroyed: f.Destroyed, Limit: f.Limit, AfterVMID: f.AfterVMID}
	if f.State != "" {
		q.States = []agentlab.SandboxState{f.State}
	}
	return v.Service.List(ctx, q)
}
