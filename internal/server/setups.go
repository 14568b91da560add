package server

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// setupRoutes returns the routes for the snapshots after setup.
func (s *Server) setupRoutes() []route {
	const all, one = "/v1/setups", "/v1/setups/{setup}"
	return []route{
		{get, all, AccessRead, "sandbox.read", noTarget, anyOrigin, 200, "setups", "List the snapshots after setup, the last used first", listing(s.listSetups)},
		{del, all, AccessWrite, "sandbox.snapshot", noTarget, anyOrigin, 200, "remove-setups", "Remove all snapshots after setup", listing(s.removeSetups)},
		{del, one, AccessWrite, "sandbox.snapshot", noTarget, anyOrigin, 200, "remove-setup", "Remove a snapshot after setup", listing(s.removeSetup)},
	}
}

func (s *Server) listSetups(ctx context.Context, _ *struct{}) ([]api.Setup, error) {
	list, err := s.cfg.Services.Snapshots.Setups(ctx)
	return mapSlice(list, toSetup), err
}

func (s *Server) removeSetup(ctx context.Context, in *setupInput) ([]api.Setup, error) {
	list, err := s.cfg.Services.Snapshots.DeleteSetups(ctx, in.Setup)
	return mapSlice(list, toSetup), err
}

func (s *Server) removeSetups(ctx context.Context, _ *struct{}) ([]api.Setup, error) {
	list, err := s.cfg.Services.Snapshots.DeleteSetups(ctx, "")
	return mapSlice(list, toSetup), err
}

func toSetup(n agentlab.Snapshot) api.Setup {
	return api.Setup{
		ID: n.UID, Repo: n.Setup.Repo, Ref: n.Setup.Ref, Profile: n.Profile, Image: n.Image, State: string(n.State), Bytes: n.Bytes,
		CreatedAt: n.CreatedAt.UTC(), UsedAt: n.UsedAt.UTC(),
	}
}
