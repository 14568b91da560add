package gate

import (
	"container/list"
	"net/netip"
	"slices"
	"sync"
	"time"
)

const (
	// maxNames limits the pairs of name and address that a Gate stores, and
	// maxNamesPerAddr those of one address, which limits the work for a
	// flow.
	maxNames, maxNamesPerAddr = 4096, 64
	// A client may use an address some time after its question, and many
	// use it until they exit.
	minTTL = time.Minute
	maxTTL = time.Hour
	// staleFor is how long a name may still be used after it expired, if
	// it is resolved again before a connection is dialled.
	staleFor = 6 * time.Hour
)

// clampTTL returns how long an answer with a time to live of seconds is valid.
func clampTTL(seconds uint32) time.Duration {
	return min(max(time.Duration(seconds)*time.Second, minTTL), maxTTL)
}

// names stores which names were resolved to an address for this guest. When it
// is full, the oldest entry is removed.
type names struct {
	now func() time.Time

	mu    sync.Mutex
	order *list.List // of *answer, the oldest at the front
	byIP  map[netip.Addr][]*list.Element
}

type answer struct {
	addr  netip.Addr
	name  string
	until time.Time
}

func newNames(now func() time.Time) *names {
	return &names{now: now, order: list.New(), byIP: map[netip.Addr][]*list.Element{}}
}

func (n *names) learn(a netip.Addr, name string, ttl time.Duration) {
	until := n.now().Add(ttl)
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, e := range n.byIP[a] {
		t := e.Value.(*answer)
		if t.name == name {
			if until.After(t.until) {
				t.until = until
			}
			n.order.MoveToBack(e)
			n.byIP[a] = append(slices.Delete(n.byIP[a], i, i+1), e) // the last one is the newest
			return
		}
	}
	if len(n.byIP[a]) >= maxNamesPerAddr {
		n.forget(n.byIP[a][0])
	}
	n.byIP[a] = append(n.byIP[a], n.order.PushBack(&answer{a, name, until}))
	if n.order.Len() > maxNames {
		n.forget(n.order.Front())
	}
}

func (n *names) forget(e *list.Element) {
	t := e.Value.(*answer)
	n.order.Remove(e)
	left := slices.DeleteFunc(n.byIP[t.addr], func(o *list.Element) bool { return o == e })
	if len(left) == 0 {
		delete(n.byIP, t.addr)
		return
	}
	n.byIP[t.addr] = left
}

// of returns the names of an address, the newest first: valid ones, and
// expired ones that may be resolved again.
func (n *names) of(a netip.Addr) (valid, stale []string) {
	now := n.now()
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, e := range slices.Backward(n.byIP[a]) {
		t := e.Value.(*answer)
		switch {
		case now.Before(t.until):
			valid = append(valid, t.name)
		case now.Before(t.until.Add(staleFor)):
			stale = append(stale, t.name)
		}
	}
	return valid, stale
}
