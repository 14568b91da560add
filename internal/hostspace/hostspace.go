// Package hostspace keeps guests from filling the host's disk. What a guest
// writes is bounded by the size of its disk and the quotas of its job, but
// those of all guests together may be more than the host has. So nothing new
// is started while less than a configured amount is free. Below a part of that
// amount guests that write are paused, and nothing that guests send is stored. When the disk
// is full nevertheless, a reserve is released for the database.
package hostspace

import (
	"sync"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// reserve is the part of the minimum that only the database may use.
const reserve = 4

// fresh is how long one reading of the free space is valid. Uploads ask for
// every buffer.
const fresh = time.Second

// Guard watches the file system of one directory. It is safe for concurrent
// use; nil guards nothing.
type Guard struct {
	dir   string
	min   int64
	free  func(dir string) (int64, error)
	clock func() time.Time

	mu   sync.Mutex
	at   time.Time
	have int64
	err  error
}

// New returns a Guard of dir's file system, which requires least bytes to be
// free, and at least PauseLeast. nil means the real file system and time.Now.
func New(dir string, least int64, free func(dir string) (int64, error), clock func() time.Time) *Guard {
	if free == nil {
		free = FreeBytes
	}
	if clock == nil {
		clock = time.Now
	}
	return &Guard{dir: dir, min: least, free: free, clock: clock}
}

// FreeBytes returns how much users other than root may still write at path.
func FreeBytes(path string) (int64, error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(path, &st); err != nil {
		return 0, err
	}
	return int64(st.Bavail) * int64(st.Bsize), nil //nolint:unconvert // bytes of a disk fit; the size of a block has another type on macOS
}

// Free returns how many bytes are free for users other than root.
func (g *Guard) Free() (int64, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if now := g.clock(); g.at.IsZero() || now.Sub(g.at) >= fresh || now.Before(g.at) {
		g.at = now
		g.have, g.err = g.free(g.dir)
	}
	return g.have, g.err
}

// Start returns an error with code no_space when nothing new may be started. If the
// file system cannot be measured there is no error: a write to it will report what
// is wrong.
func (g *Guard) Start() error {
	if g == nil {
		return nil
	}
	return g.check(max(g.min, PauseBelow(g.min)), "nothing is started on it")
}

// Keep returns an error with code no_space when nothing that guests send may be stored.
func (g *Guard) Keep() error {
	if g == nil {
		return nil
	}
	return g.check(PauseBelow(g.min), "data of guests is not stored on it")
}

func (g *Guard) check(least int64, consequence string) error {
	have, err := g.Free()
	if err != nil || have >= least {
		return nil //nolint:nilerr // see Start
	}
	return agentlab.Errorf(agentlab.CodeNoSpace, "the disk of %s has %d MiB free, less than %d: %s", g.dir, have>>20, least>>20, consequence).
		WithHint("free disk space: destroy sandboxes and delete old images and jobs; limits.min_free_mb in config.yaml sets how much must stay free")
}
