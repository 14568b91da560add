package pvenode

import (
	"context"
	"sync"
	"time"
)

// flocks are the lock files of the node. They belong to a process: here to a
// holder, which may take one several times, and which loses all of them when
// it ends.
type flocks struct {
	mu    sync.Mutex
	files map[string]*flock
}

type flock struct {
	exclusive *holder
	depth     int
	shared    map[*holder]int
	awaited   int           // how many had to wait, ever
	changed   chan struct{} // closed and replaced when someone lets go
}

// holder is a process that takes locks.
type holder struct {
	held map[string]int
}

func newHolder() *holder { return &holder{held: map[string]int{}} }

func (f *flocks) init() { f.files = map[string]*flock{} }

func (f *flocks) file(path string) *flock {
	l := f.files[path]
	if l == nil {
		l = &flock{shared: map[*holder]int{}, changed: make(chan struct{})}
		f.files[path] = l
	}
	return l
}

// try takes the lock when it is free; f.mu is held.
func (l *flock) try(h *holder, shared bool) bool {
	if l.exclusive == h {
		l.depth++
		return true
	}
	if l.exclusive != nil {
		return false
	}
	if shared {
		l.shared[h]++
		return true
	}
	for other := range l.shared {
		if other != h {
			return false
		}
	}
	l.exclusive, l.depth = h, 1
	return true
}

// take waits for a lock. waiting is called once when it is not free, got when
// it came after waiting.
func (f *flocks) take(ctx context.Context, h *holder, path string, shared bool, wait time.Duration, waiting, got func()) *Error {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	waited := false
	for {
		f.mu.Lock()
		l := f.file(path)
		if l.try(h, shared) {
			h.held[path]++
			f.mu.Unlock()
			if waited {
				got()
			}
			return nil
		}
		changed := l.changed
		f.mu.Unlock()
		if !waited {
			waited = true
			f.mu.Lock()
			l.awaited++
			f.mu.Unlock()
			waiting()
		}
		select {
		case <-changed:
		case <-timer.C:
			return dief("can't lock file '%s' - got timeout", path).exit(4)
		case <-ctx.Done():
			return dief("can't lock file '%s' - %v", path, ctx.Err())
		}
	}
}

// release lets a lock go once.
func (f *flocks) release(h *holder, path string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.file(path)
	switch {
	case l.exclusive == h:
		l.depth--
		if l.depth == 0 {
			l.exclusive = nil
		}
	case l.shared[h] > 0:
		l.shared[h]--
		if l.shared[h] == 0 {
			delete(l.shared, h)
		}
	default:
		return
	}
	h.held[path]--
	if h.held[path] == 0 {
		delete(h.held, path)
	}
	close(l.changed)
	l.changed = make(chan struct{})
}

// drop lets everything go that a process held, as its death does.
func (f *flocks) drop(h *holder) {
	f.mu.Lock()
	held := map[string]int{}
	for path, times := range h.held {
		held[path] = times
	}
	f.mu.Unlock()
	for path, times := range held {
		for range times {
			f.release(h, path)
		}
	}
}

// vmLockFile is the lock of a VM's configuration.
func vmLockFile(vmid int) string { return "/var/lock/qemu-server/lock-" + itoa(vmid) + ".conf" }

// lock takes a lock file for the process that runs c, and returns what lets
// it go.
func (c *call) lock(path string, shared bool, wait time.Duration) (func(), *Error) {
	proc, file := c.proc, c.node+":"+path
	err := c.n.locks.take(c.ctx, proc, file, shared, wait,
		func() { c.warnInline("trying to acquire lock...") }, func() { c.warnInline(" OK") })
	if err != nil {
		if err := c.interrupted(); err != nil {
			return nil, err
		}
		err.Message = "can't lock file '" + path + "' - got timeout"
		return nil, err
	}
	return func() { c.n.locks.release(proc, file) }, nil
}

// lockVM takes the lock of a VM's configuration.
func (c *call) lockVM(vmid int) (func(), *Error) {
	return c.lock(vmLockFile(vmid), false, c.n.cfg.Waits.ConfigLock)
}
