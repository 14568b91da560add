package sandbox

import (
	"slices"
	"sync"
	"time"
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

// queue returns how many sandboxes wait, and how long the one that has waited longest.
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
