package nft

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

// Limits on one sandbox's part of a transaction that allows addresses; the
// rest waits for the next transaction. So an answer waits for one or two
// transactions of limited size, regardless of the questions of other
// sandboxes.
const (
	maxTurnAddrs = 64
	maxTurnElems = 512
)

// maxRest limits the time between two transactions that allow addresses.
const maxRest = 100 * time.Millisecond

// lesson is a DNS answer that a sandbox is about to get.
type lesson struct {
	vmid  int
	from  *gate.Gate // the gate of the question: another sandbox may have the number later
	name  string
	addrs []netip.Addr // that are not allowed yet
	ttl   time.Duration
	done  chan error
}

// lessons are the DNS answers that wait until their addresses are allowed.
type lessons struct {
	mu      sync.Mutex
	waiting map[int][]*lesson // by sandbox, in their order
	busy    bool              // a goroutine processes the waiting answers
}

// add appends a lesson, and reports whether no goroutine processes lessons
// yet.
func (l *lessons) add(x *lesson) (first bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.waiting == nil {
		l.waiting = map[int][]*lesson{}
	}
	l.waiting[x.vmid] = append(l.waiting[x.vmid], x)
	first = !l.busy
	l.busy = true
	return first
}

// again puts the rest of a sandbox's lessons back, before newer ones.
func (l *lessons) again(vmid int, list []*lesson) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(list) > 0 {
		l.waiting[vmid] = append(list, l.waiting[vmid]...)
	}
}

// take removes and returns all waiting lessons. nil means that there are none,
// and that the next call of add returns true.
func (l *lessons) take() map[int][]*lesson {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == 0 {
		l.busy = false
		return nil
	}
	out := l.waiting
	l.waiting = map[int][]*lesson{}
	return out
}

// learn allows addresses for a sandbox before it gets them in a DNS answer.
// The answer waits for this. All waiting addresses are added by one run of
// nft, because most of the cost of a run is its start.
func (m *Manager) learn(vmid int, from *gate.Gate, name string, addrs []netip.Addr, ttl time.Duration) error {
	x := &lesson{vmid: vmid, from: from, name: name, addrs: slices.Clone(addrs), ttl: ttl, done: make(chan error, 1)}
	if m.lessons.add(x) {
		go m.teach()
	}
	return <-x.done
}

// teach processes lessons until none wait. Between two transactions it pauses
// for as long as the first one took, so that a guest cannot keep the host busy
// with questions and the lock is free for others.
func (m *Manager) teach() {
	for {
		turn := m.lessons.take()
		if turn == nil {
			return
		}
		began := time.Now()
		m.teachTurn(turn)
		time.Sleep(min(time.Since(began), maxRest))
	}
}

// teachTurn runs one transaction with a part for each waiting sandbox.
func (m *Manager) teachTurn(turn map[int][]*lesson) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var text strings.Builder
	var done []*lesson
	for _, vmid := range slices.Sorted(maps.Keys(turn)) {
		x := m.members[vmid]
		list := slices.DeleteFunc(turn[vmid], func(l *lesson) bool {
			gone := x == nil || x.gate != l.from
			if gone {
				l.done <- agentlab.Errorf(agentlab.CodeNotFound, "sandbox %d is gone", vmid)
			}
			return gone
		})
		if len(list) == 0 {
			continue
		}
		n := m.teachMember(&text, x, list)
		done = append(done, list[:n]...)
		m.lessons.again(vmid, list[n:])
	}
	var err error
	if text.Len() > 0 {
		err = m.commit(context.Background(), text.String())
	}
	for _, l := range done {
		l.done <- err
	}
}

// teachMember writes the commands that allow the addresses of a sandbox's
// lessons, and returns how many lessons are complete.
func (m *Manager) teachMember(w *strings.Builder, x *member, list []*lesson) int {
	now := m.opts.Now()
	addrs, elems := 0, 0
	for i, l := range list {
		for len(l.addrs) > 0 {
			if addrs >= maxTurnAddrs || elems >= maxTurnElems {
				return i
			}
			a := l.addrs[0].Unmap()
			l.addrs = l.addrs[1:]
			until := now.Add(l.ttl + graceTTL)
			if m.opts.Told != nil {
				m.opts.Told(x.VMID, Told{l.name, a, until})
			}
			for _, gone := range x.tell(a, l.name, until, now) {
				x.close(w, gone)
			}
			elems += x.open(w, a, now)
			addrs++
			for _, gone := range x.crowded(a, now) {
				x.close(w, gone)
			}
		}
	}
	return len(list)
}
