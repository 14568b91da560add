package daemon

import (
	"context"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// The services do not import store or server, and these import no service. The
// adapters in this file convert between their types.

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
