package daemon

import (
	"context"
	"errors"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// The services know neither store nor server, and these know no service: here
// one's words are put into the other's.

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

// sandboxView is the sandbox service as the control API sees it.
type sandboxView struct{ *sandbox.Service }

// Orphans lists what the backend holds that belongs to no sandbox.
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
	return api.Orphan{VMID: in.VMID, UID: in.Ref.UID, Name: in.Name, Power: string(in.Power), Reason: in.Reason}
}
