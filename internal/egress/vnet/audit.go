package vnet

import (
	"container/list"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

// Decision is the record of one verdict on what the guest wanted.
type Decision struct {
	Time  time.Time
	Proto egress.Proto
	// Name is what Addr was last resolved from by this guest, with a final
	// dot, or the question put to DNS; "" when not known. It is a hint: many
	// names share an address.
	Name  string
	Addr  netip.AddrPort
	Allow bool
	Rule  string
	Error string // why an allowed flow could not be opened
	// Suppressed counts the decisions before this one that were not told of
	// because they came too quickly.
	Suppressed int
}

// auditor hands decisions on at a bounded rate.
type auditor struct {
	tell  func(Decision)
	now   func() time.Time
	limit *rate.Limiter

	mu         sync.Mutex
	suppressed int
}

func (a *auditor) record(d Decision) {
	if a.tell == nil {
		return
	}
	d.Time = a.now()
	a.mu.Lock()
	if !a.limit.AllowN(d.Time, 1) {
		a.suppressed++
		a.mu.Unlock()
		return
	}
	d.Suppressed, a.suppressed = a.suppressed, 0
	a.mu.Unlock()
	a.tell(d)
}

// nameCache remembers which name an address came from, so that audit records
// can say more than a number. When it is full the name learnt longest ago goes.
type nameCache struct {
	max int

	mu    sync.Mutex
	order *list.List // of nameEntry, oldest at the front
	index map[netip.Addr]*list.Element
}

type nameEntry struct {
	addr netip.Addr
	name string
}

func newNameCache(size int) *nameCache {
	return &nameCache{max: size, order: list.New(), index: map[netip.Addr]*list.Element{}}
}

func (c *nameCache) learn(a netip.Addr, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.index[a]; ok {
		e.Value = nameEntry{a, name}
		c.order.MoveToBack(e)
		return
	}
	c.index[a] = c.order.PushBack(nameEntry{a, name})
	if c.order.Len() > c.max {
		oldest := c.order.Front()
		c.order.Remove(oldest)
		delete(c.index, oldest.Value.(nameEntry).addr) //nolint:forcetypeassert // only nameEntry is put in
	}
}

func (c *nameCache) lookup(a netip.Addr) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.index[a]; ok {
		return e.Value.(nameEntry).name //nolint:forcetypeassert // only nameEntry is put in
	}
	return ""
}
