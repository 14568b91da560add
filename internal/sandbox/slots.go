package sandbox

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// slots limits how many VMs boot at the same time on one backend, in the order of their
// requests. No call blocks: a sandbox that gets no slot is woken when one is
// free.
type slots struct {
	mu       sync.Mutex
	limit    int                  // of each backend
	backends map[string]*slotList // by name
}

// slotList are the slots of a backend.
type slotList struct {
	held    map[int]bool
	waiting []waiter
}

// waiter is a sandbox in the queue for slots.
type waiter struct {
	vmid  int
	since time.Time
}

// free reports whether another sandbox can have a slot of q.
func (s *slots) free(q *slotList) bool { return len(q.held) < s.limit }

// acquire reports whether vmid has a slot of a backend now; if not, it is in the queue. It
// wakes the next one in the queue if there is another free slot.
func (s *slots) acquire(backend string, vmid int, wake func(int)) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.backends[backend]
	if q == nil {
		q = &slotList{held: map[int]bool{}}
		if s.backends == nil {
			s.backends = map[string]*slotList{}
		}
		s.backends[backend] = q
	}
	if !q.held[vmid] {
		if !s.free(q) || len(q.waiting) > 0 && q.waiting[0].vmid != vmid {
			if !slices.ContainsFunc(q.waiting, func(w waiter) bool { return w.vmid == vmid }) {
				q.waiting = append(q.waiting, waiter{vmid, time.Now()})
			}
			return false
		}
		if len(q.waiting) > 0 {
			q.waiting = q.waiting[1:]
		}
		q.held[vmid] = true
	}
	s.wakeNext(q, wake)
	return true
}

// release frees vmid's slot or its place in the queue, and wakes the sandbox that can have
// a slot now.
func (s *slots) release(vmid int, wake func(int)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range s.backends {
		delete(q.held, vmid)
		q.waiting = slices.DeleteFunc(q.waiting, func(w waiter) bool { return w.vmid == vmid })
		s.wakeNext(q, wake)
	}
}

func (s *slots) wakeNext(q *slotList, wake func(int)) {
	if s.free(q) && len(q.waiting) > 0 {
		wake(q.waiting[0].vmid)
	}
}

// queue returns how many sandboxes wait, and the longest of their waits so far.
func (s *slots) queue() (waiting int, longest time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range s.backends {
		if len(q.waiting) > 0 {
			longest = max(longest, time.Since(q.waiting[0].since))
		}
		waiting += len(q.waiting)
	}
	return waiting, longest
}

// busy reports whether a sandbox of a backend has a slot or waits for one.
func (s *slots) busy(backend string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.backends[backend]
	return q != nil && (len(q.held) > 0 || len(q.waiting) > 0)
}

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
