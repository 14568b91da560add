package server

import (
	"context"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

func (s *Server) listOrphans(ctx context.Context, _ *struct{}) (api.List[api.Orphan], error) {
	list, missing, err := s.cfg.Services.Sandboxes.Orphans(ctx)
	return api.List[api.Orphan]{Items: nonNil(mapSlice(list, toOrphan)), Missing: texts(missing)}, err
}

// texts returns the texts of errors.
func texts(errs []error) (out []string) {
	for _, err := range errs {
		out = append(out, err.Error())
	}
	return out
}

type orphanInput struct {
	Orphan string `path:"orphan" doc:"UID of an orphan, or its VMID if that is unique"`
}

func (s *Server) destroyOrphan(ctx context.Context, in *orphanInput) (api.Orphan, error) {
	o, err := s.cfg.Services.Sandboxes.DestroyOrphan(ctx, in.Orphan)
	return toOrphan(o), err
}

func toOrphan(in fleet.Instance) api.Orphan {
	return api.Orphan{VMID: in.Number(), UID: in.Ref.UID, Name: in.Name, Power: string(in.Power), Reason: in.Reason}
}
