package proxmox

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lock"
)

// vmCache caches recent states of sandboxes, so that not every check of a
// booting guest needs a call. All of it may be lost.
type vmCache struct {
	mu  sync.Mutex
	all map[string]*vmCacheEntry // by UID
}

// vmCacheEntry is the cache of one sandbox.
type vmCacheEntry struct {
	started time.Time // if this process started it; zero if it did not
	looked  time.Time // when the node last reported it as running

	seedAfter time.Time // when its seed is tried again at the earliest
	seedPause time.Duration

	address  netip.Addr // the guest's discovered address
	askAfter time.Time  // when its agent is asked for it again at the earliest
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

// How long a node's answer is used while a guest boots: half the time since
// its start, within these limits.
const (
	minCacheAge  = time.Second
	maxCacheAge  = 10 * time.Second
	bootDuration = 5 * time.Minute
)

// recentlyRunning reports whether a sandbox counts as running without a call.
func (m *vmCache) recentlyRunning(uid string, now time.Time) (yes bool) {
	m.with(uid, func(i *vmCacheEntry) {
		if i.started.IsZero() || now.Sub(i.started) > bootDuration {
			return
		}
		yes = now.Sub(i.looked) < min(max(i.looked.Sub(i.started)/2, minCacheAge), maxCacheAge)
	})
	return yes
}

// seenWithin reports whether a sandbox was running at most age ago.
func (m *vmCache) seenWithin(uid string, now time.Time, age time.Duration) (yes bool) {
	m.with(uid, func(i *vmCacheEntry) { yes = !i.looked.IsZero() && now.Sub(i.looked) < age })
	return yes
}

// markRunning records that a sandbox is running; started means that this process has
// just started it.
func (m *vmCache) markRunning(uid string, now time.Time, started bool) {
	m.with(uid, func(i *vmCacheEntry) {
		if started {
			*i = vmCacheEntry{started: now}
		}
		i.looked = now
	})
}

// gate is held during calls to nodes.
type gate struct{ lock.Mutex }

func (g *gate) lock(ctx context.Context) error {
	if err := g.Lock(ctx); err != nil {
		return agentlab.Errorf(agentlab.CodeBusy, "waiting for another request to the nodes: %w", err)
	}
	return nil
}

// timed is the last answer of nodes with its time; the zero value has none.
type timed[T any] struct {
	value T
	at    time.Time
}

// within returns the answer if it is younger than age.
func (l timed[T]) within(age time.Duration, now time.Time) (value T, ok bool) {
	if age <= 0 || l.at.IsZero() || now.Sub(l.at) >= age {
		return value, false
	}
	return l.value, true
}

// cached is an answer of the nodes that all calls share.
type cached[T any] struct {
	asking gate
	last   timed[T]
}

// get returns the answer if it is younger than age, otherwise a new one.
func (c *cached[T]) get(ctx context.Context, now func() time.Time, age time.Duration, ask func(context.Context) (T, error)) (value T, err error) {
	if err := c.asking.lock(ctx); err != nil {
		return value, err
	}
	defer c.asking.Unlock()
	at := now()
	if last, ok := c.last.within(age, at); ok {
		return last, nil
	}
	if value, err = ask(ctx); err == nil {
		c.last = timed[T]{value, at}
	}
	return value, err
}
