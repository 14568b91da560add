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

// Bounds on what one sandbox gets of a transaction that opens addresses; what
// is left of its questions waits for the next one. So an answer waits for one
// or two transactions of bounded size, whatever other sandboxes ask for.
const (
	maxTurnAddrs = 64
	maxTurnElems = 512
)

// maxRest bounds the time between two transactions that open addresses.
const maxRest = 100 * time.Millisecond

// lesson is an answer that a sandbox is about to be told.
type lesson struct {
	vmid  int
	from  *gate.Gate // who asked: the number may be another's when its turn comes
	name  string
	addrs []netip.Addr // that are not open yet
	ttl   time.Duration
	done  chan error
}

// lessons are the answers that wait until their addresses are open.
type lessons struct {
	mu      sync.Mutex
	waiting map[int][]*lesson // by sandbox, in their order
	busy    bool              // somebody takes what waits
}

// add puts lessons at the end, and tells whether nobody takes them yet.
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

// again puts back what is left of a sandbox's lessons, before those that came
// meanwhile.
func (l *lessons) again(vmid int, list []*lesson) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(list) > 0 {
		l.waiting[vmid] = append(list, l.waiting[vmid]...)
	}
}

// take takes all that wait; nil means that none does, and that whoever comes
// next has to see to it.
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

// learn opens addresses to a sandbox that is about to be told them. The answer
// waits for this. All that wait at a time are opened by one run of nft, since
// a run costs more than what it does.
func (m *Manager) learn(vmid int, from *gate.Gate, name string, addrs []netip.Addr, ttl time.Duration) error {
	x := &lesson{vmid: vmid, from: from, name: name, addrs: slices.Clone(addrs), ttl: ttl, done: make(chan error, 1)}
	if m.lessons.add(x) {
		go m.teach()
	}
	return <-x.done
}

// teach takes what waits until nothing does. Between two transactions it rests
// for as long as one took: a guest does not keep the host busy with questions,
// and others find the lock free.
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

// teachTurn gives each sandbox that waits its part of one transaction.
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

// teachMember writes what opens the addresses of a sandbox's lessons, and
// returns how many of them are complete.
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
