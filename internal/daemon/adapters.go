package daemon

import (
	"context"
	"errors"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// The services do not import store or server, and these import no service. The
// adapters in this file convert between their types.

type gcFiles struct {
	*artifact.Service
	s *services
}

func (f gcFiles) Sweep(ctx context.Context, known func(context.Context, string) (bool, error)) (int, error) {
	if err := checkInstallation(ctx, f.s.cfg.Paths, f.s.store); err != nil {
		return 0, err
	}
	n, err := f.Service.Sweep(ctx, known)
	err = errors.Join(err, f.s.records.sweep(ctx, known, f.s.cfg.Clock(), f.Limits().Quarantine))
	forgotten, ferr := f.s.bootstrap.Sweep(ctx, known)
	return n.Temporary + n.Files + n.Jobs + n.Bundles + n.Expired + forgotten, errors.Join(err, ferr)
}

// sandboxView adapts the sandbox service to the control API.
type sandboxView struct{ *sandbox.Service }

// Orphans lists the VMs of the backend that belong to no sandbox.
func (v sandboxView) Orphans(ctx context.Context) ([]api.Orphan, error) {
	list, err := v.Service.Orphans(ctx)
	out := make([]api.Orphan, len(list))
	for i, in := range list {
		out[i] = toOrphan(in)
	}
	return out, err
}

// DestroyOrphan destroys one of them.
func (v sandboxView) DestroyOrphan(ctx context.Context, id string) (api.Orphan, error) {
	in, err := v.Service.DestroyOrphan(ctx, id)
	return toOrphan(in), err
}

func toOrphan(in backend.Instance) api.Orphan {
	return api.Orphan{VMID: in.Number(), UID: in.Ref.UID, Name: in.Name, Power: string(in.Power), Reason: in.Reason}
}
