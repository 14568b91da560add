package doctor

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// memoryLimit is how long a status request reads the memory of sandboxes.
const memoryLimit = time.Second

// memoryListed is the maximum number of sandboxes that a status lists with their memory:
// there may be thousands.
const memoryListed = 20

// VMMemory returns the memory of the host, in bytes, that the processes of running
// sandboxes occupy, as far as it can be read in time: what only one sandbox has, and
// what several have or the host can drop, each page counted once. It is 0 if the driver
// does not know it.
func (s *Service) VMMemory(ctx context.Context) (unique, shared int64, _ error) {
	for _, m := range s.memory(ctx) {
		unique += m.UniqueBytes
		shared += max(0, m.ProportionalBytes-m.UniqueBytes)
	}
	return unique, shared, ctx.Err()
}

// memory returns the memory of the host that running sandboxes occupy, as far as
// it can be read in time.
func (s *Service) memory(ctx context.Context) []api.SandboxMemory {
	ctx, cancel := context.WithTimeout(ctx, memoryLimit)
	defer cancel()
	backends := s.cfg.Fleet.All()
	found := make([][]api.SandboxMemory, len(backends))
	var wait sync.WaitGroup
	for i, b := range backends {
		if b.Host != nil {
			wait.Go(func() { found[i] = memoryOn(ctx, b) })
		}
	}
	wait.Wait()
	return append([]api.SandboxMemory{}, slices.Concat(found...)...)
}

// memoryOn is memory for one backend.
func memoryOn(ctx context.Context, b *fleet.Backend) (out []api.SandboxMemory) {
	list, err := b.List(ctx)
	if err != nil {
		return nil
	}
	for _, in := range list {
		if ctx.Err() != nil {
			break
		}
		if in.Power != backend.PowerRunning && in.Power != backend.PowerSuspended {
			continue
		}
		m, err := b.Host.Memory(ctx, in.Ref)
		if agentlab.CodeOf(err) == agentlab.CodeUnsupported {
			break
		}
		if err == nil {
			out = append(out, api.SandboxMemory{VMID: in.Number(), Memory: api.Memory{UniqueBytes: m.Unique, SharedBytes: m.Shared, ProportionalBytes: m.Proportional}})
		}
	}
	return out
}

// largest returns those of all that occupy the most memory, and the total of all.
func largest(all []api.SandboxMemory) ([]api.SandboxMemory, api.MemoryTotal) {
	total := api.MemoryTotal{Sandboxes: len(all)}
	for _, m := range all {
		total.UniqueBytes += m.UniqueBytes
	}
	slices.SortFunc(all, func(a, b api.SandboxMemory) int {
		return cmp.Or(cmp.Compare(b.UniqueBytes, a.UniqueBytes), cmp.Compare(a.VMID, b.VMID))
	})
	return slices.Clip(all[:min(len(all), memoryListed)]), total
}
