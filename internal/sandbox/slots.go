package sandbox

import (
	"slices"
	"sync"
)

// slots lets only so many VMs boot at the same time, first come, first
// served. Nobody blocks: who finds none is woken when one comes free.
type slots struct {
	mu      sync.Mutex
	free    int
	held    map[int]bool
	waiting []int
}

// acquire reports whether vmid holds a slot now; if not, it is in the queue.
func (s *slots) acquire(vmid int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[vmid] {
		return true
	}
	if s.free > 0 && (len(s.waiting) == 0 || s.waiting[0] == vmid) {
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
	if !slices.Contains(s.waiting, vmid) {
		s.waiting = append(s.waiting, vmid)
	}
	return false
}

// release gives back vmid's slot or its place in the queue, and wakes those
// that can have a slot now.
func (s *slots) release(vmid int, wake func(int)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[vmid] {
		delete(s.held, vmid)
		s.free++
	}
	s.waiting = slices.DeleteFunc(s.waiting, func(w int) bool { return w == vmid })
	if s.free > 0 && len(s.waiting) > 0 {
		wake(s.waiting[0])
	}
}

// next wakes the first in the queue when there still is a slot for it; called
// after acquire by who got one.
func (s *slots) next(wake func(int)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.free > 0 && len(s.waiting) > 0 {
		wake(s.waiting[0])
	}
}
