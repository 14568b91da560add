package server

import (
	"context"

	"github.com/agentlab-vm/agentlab/api"
)

func (s *Server) listOrphans(ctx context.Context, _ *struct{}) (api.List[api.Orphan], error) {
	list, err := s.cfg.Services.Sandboxes.Orphans(ctx)
	return api.List[api.Orphan]{Items: append([]api.Orphan{}, list...)}, err
}

type orphanInput struct {
	Orphan string `path:"orphan" doc:"UID of an orphan, or its VMID if that is unique"`
}

func (s *Server) destroyOrphan(ctx context.Context, in *orphanInput) (api.Orphan, error) {
	return s.cfg.Services.Sandboxes.DestroyOrphan(ctx, in.Orphan)
}
