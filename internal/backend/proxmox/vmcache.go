package proxmox

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lock"
)

// vmCache is what this process has seen lately, so that a guest that boots is
// not asked about with every look at it. All of it may be lost.
type vmCache struct {
	mu  sync.Mutex
	all map[string]*vmCacheEntry // by UID
}

// vmCacheEntry is the cache of one sandbox.
type vmCacheEntry struct {
	started time.Time // when it was started; zero: not by this process
	looked  time.Time // when the node last said that it runs

	seedAfter time.Time // not before that is its seed tried again
	seedPause time.Duration

	address  netip.Addr // that the guest was found to have
	askAfter time.Time  // not before that is its agent asked for it again
	askPause time.Duration
}

func (m *vmCache) with(uid string, fn func(*vmCacheEntry)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.all == nil {
		m.all = map[string]*vmCacheEntry{}
	}
	if m.all[uid] == nil {
		m.all[uid] = &vmCacheEntry{}
	}
	fn(m.all[uid])
}

// forget drops what is known of a sandbox: it does not run, or it is gone.
func (m *vmCache) forget(uid string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.all, uid)
}

// How long the word of a node is believed while a guest boots: half as long
// as it has been booting, within these bounds.
const (
	believeLeast = time.Second
	believeMost  = 10 * time.Second
	bootLength   = 5 * time.Minute
)

// recentlyRunning reports whether a sandbox may be taken to run without asking.
func (m *vmCache) recentlyRunning(uid string, now time.Time) (yes bool) {
	m.with(uid, func(i *vmCacheEntry) {
		if i.started.IsZero() || now.Sub(i.started) > bootLength {
			return
		}
		yes = now.Sub(i.looked) < min(max(i.looked.Sub(i.started)/2, believeLeast), believeMost)
	})
	return yes
}

// seenWithin reports whether a sandbox was seen running at most age ago.
func (m *vmCache) seenWithin(uid string, now time.Time, age time.Duration) (yes bool) {
	m.with(uid, func(i *vmCacheEntry) { yes = !i.looked.IsZero() && now.Sub(i.looked) < age })
	return yes
}

// runs notes that a sandbox was seen running; started that this process has
// just started it.
func (m *vmCache) runs(uid string, now time.Time, started bool) {
	m.with(uid, func(i *vmCacheEntry) {
		if started {
			*i = vmCacheEntry{started: now}
		}
		i.looked = now
	})
}

// gate is held while nodes are asked.
type gate struct{ lock.Mutex }

func (g *gate) lock(ctx context.Context) error {
	if err := g.Lock(ctx); err != nil {
		return agentlab.Errorf(agentlab.CodeBusy, "another call asks the nodes: %w", err)
	}
	return nil
}

// timed is what nodes said last, and as of when; its zero value is nothing.
type timed[T any] struct {
	value T
	at    time.Time
}

// within returns what was said, if that is true of a moment less than age ago.
func (l timed[T]) within(age time.Duration, now time.Time) (value T, ok bool) {
	if age <= 0 || l.at.IsZero() || now.Sub(l.at) >= age {
		return value, false
	}
	return l.value, true
}
