package sandbox

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// A sandbox that continues the guest of a snapshot is a copy. Its guest has run the
// programs of users, so it may be hostile and never answer. A copy has its slot for
// booting only until its CPUs run: after that it causes no load of a boot. Until its
// guest answers it has a slot of the copies. So silent copies delay other copies, for
// a limited time, and nothing else.
const (
	// copyPatience is how long the guest of a copy may take until it has its
	// identity, from when its CPUs run. A guest that answers at all does so within
	// seconds, also on a busy host.
	copyPatience = time.Minute
	// copyRest is that time for the other copies of a snapshot after one was silent.
	copyRest = 10 * time.Second
)

// copies reports whether the next start of a sandbox continues the guest of a
// snapshot.
func (s *Service) copies(ctx context.Context, sb agentlab.Sandbox) bool {
	if sb.From.Snapshot == "" || !sb.BootedAt.IsZero() || !s.On(sb).Can().Forks {
		return false
	}
	return s.snaps.HasMemory(ctx, sb.From.Snapshot)
}

// acquireSlots reports whether a sandbox may start its VM now. If not, its step runs
// again when it may.
func (s *Core) acquireSlots(sb agentlab.Sandbox, isCopy bool) bool {
	take := func(q *slots) bool { return q.acquire(sb.Backend, sb.VMID, s.loop.Wake) }
	return (!isCopy || take(&s.copySlots)) && take(&s.boots)
}

// ReleaseSlots frees all slots of a sandbox, and its places in the queues.
func (s *Core) ReleaseSlots(vmid int) {
	s.boots.release(vmid, s.loop.Wake)
	s.copySlots.release(vmid, s.loop.Wake)
}

// BootQueue returns how many sandboxes wait for a slot, and how long the first of them
// has waited.
func (s *Service) BootQueue() (waiting int, first time.Duration) {
	boots, first := s.boots.queue()
	copies, firstCopy := s.copySlots.queue()
	return boots + copies, max(first, firstCopy)
}

// vmStarted records that the VM of a sandbox was started by this process.
func (s *Service) vmStarted(vmid int, isCopy bool) {
	s.withState(vmid, func(m *runtimeState) { m.blank, m.isCopy = true, isCopy })
	if isCopy {
		s.boots.release(vmid, s.loop.Wake) // its CPUs run
	}
}

// patience returns how long the guest of a BOOTING sandbox may take until it
// answers, and the part of it that is over.
func (s *Service) patience(vmid int) (limit, waited time.Duration, isCopy bool) {
	limit = s.lim.BootTimeout
	s.withState(vmid, func(m *runtimeState) {
		waited, isCopy = s.clock().Sub(m.running), m.isCopy
		switch {
		case isCopy && m.hurry:
			limit = min(limit, copyRest)
		case isCopy:
			limit = min(limit, copyPatience)
		}
	})
	return limit, waited, isCopy
}

// hurryCopies limits the time of the copies of a snapshot that have not started
// yet: one of them was silent.
func (s *Service) hurryCopies(ctx context.Context, sb agentlab.Sandbox) error {
	rest, err := s.cfg.Store.SandboxesFrom(ctx, sb.From.Snapshot)
	for _, child := range rest {
		s.withState(child.VMID, func(m *runtimeState) { m.hurry = true })
	}
	return err
}
