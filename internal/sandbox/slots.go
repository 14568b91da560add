package sandbox

import (
	"slices"
	"sync"
	"time"
)

// slots limits how many VMs boot at the same time, in the order of their
// requests. No call blocks: a sandbox that gets no slot is woken when one is
// free.
type slots struct {
	mu      sync.Mutex
	free    int
	held    map[int]bool
	waiting []waiter
}

// waiter is a sandbox in the queue for slots.
type waiter struct {
	vmid  int
	since time.Time
}

// acquire reports whether vmid has a slot now; if not, it is in the queue.
func (s *slots) acquire(vmid int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[vmid] {
		return true
	}
	if s.free > 0 && (len(s.waiting) == 0 || s.waiting[0].vmid == vmid) {
		if len(s.waiting) > 0 {
			s.waiting = s.waiting[1:]
		}
		if s.held == nil {
			s.held = map[int]bool{}
		}
		s.held[vmid] = true
		s.free--
		return true
	}
	if !slices.ContainsFunc(s.waiting, func(w waiter) bool { return w.vmid == vmid }) {
		s.waiting = append(s.waiting, waiter{vmid, time.Now()})
	}
	return false
}

// release frees vmid's slot or its place in the queue, and wakes the sandboxes
// that can have a slot now.
func (s *slots) release(vmid int, wake func(int)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[vmid] {
		delete(s.held, vmid)
		s.free++
	}
	s.waiting = slices.DeleteFunc(s.waiting, func(w waiter) bool { return w.vmid == vmid })
	if s.free > 0 && len(s.waiting) > 0 {
		wake(s.waiting[0].vmid)
	}
}

// queue returns how many sandboxes wait, and how long the first has waited.
func (s *slots) queue() (waiting int, first time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.waiting) > 0 {
		first = time.Since(s.waiting[0].since)
	}
	return len(s.waiting), first
}

// busy reports whether a sandbox has a slot or waits for one.
func (s *slots) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.held) > 0 || len(s.waiting) > 0
}

// next wakes the first in the queue if there is another free slot. A caller
// that got a slot calls it after acquire.
func (s *slots) next(wake func(int)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.free > 0 && len(s.waiting) > 0 {
		wake(s.waiting[0].vmid)
	}
}
