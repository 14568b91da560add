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
	maxBatchAddrs = 64
	maxBatchElems = 512
)

// maxBatchPause limits the time between two transactions that allow addresses.
const maxBatchPause = 100 * time.Millisecond

// pendingAnswer is a DNS answer that a sandbox is about to get.
type pendingAnswer struct {
	vmid  int
	from  *gate.Gate // the gate of the question: another sandbox may have the number later
	name  string
	addrs []netip.Addr // that are not allowed yet
	ttl   time.Duration
	done  chan error
}

// pendingAnswers are the DNS answers that wait until their addresses are allowed.
type pendingAnswers struct {
	mu      sync.Mutex
	waiting map[int][]*pendingAnswer // by sandbox, in their order
	busy    bool                     // a goroutine processes the waiting answers
}

// add appends a pendingAnswer, and reports whether no goroutine processes answers
// yet.
func (l *pendingAnswers) add(x *pendingAnswer) (first bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.waiting == nil {
		l.waiting = map[int][]*pendingAnswer{}
	}
	l.waiting[x.vmid] = append(l.waiting[x.vmid], x)
	first = !l.busy
	l.busy = true
	return first
}

// requeue adds the rest of a sandbox's answers again, before newer ones.
func (l *pendingAnswers) requeue(vmid int, list []*pendingAnswer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(list) > 0 {
		l.waiting[vmid] = append(list, l.waiting[vmid]...)
	}
}

// takeAll removes and returns all waiting answers. nil means that there are none,
// and that the next call of add returns true.
func (l *pendingAnswers) takeAll() map[int][]*pendingAnswer {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == 0 {
		l.busy = false
		return nil
	}
	out := l.waiting
	l.waiting = map[int][]*pendingAnswer{}
	return out
}

// learn allows addresses for a sandbox before it gets them in a DNS answer.
// The answer waits for this. All waiting addresses are added by one run of
// nft, because most of the cost of a run is its start.
func (m *Manager) learn(vmid int, from *gate.Gate, name string, addrs []netip.Addr, ttl time.Duration) error {
	x := &pendingAnswer{vmid: vmid, from: from, name: name, addrs: slices.Clone(addrs), ttl: ttl, done: make(chan error, 1)}
	if m.pending.add(x) {
		go m.applyAnswers()
	}
	return <-x.done
}

// applyAnswers processes answers until none wait. Between two transactions it pauses
// for as long as the first one took, so that a guest cannot keep the host busy
// with questions and the lock is free for others.
func (m *Manager) applyAnswers() {
	for {
		turn := m.pending.takeAll()
		if turn == nil {
			return
		}
		began := time.Now()
		m.applyBatch(turn)
		time.Sleep(min(time.Since(began), maxBatchPause))
	}
}

// applyBatch runs one transaction with a part for each waiting sandbox.
func (m *Manager) applyBatch(turn map[int][]*pendingAnswer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var text strings.Builder
	var done []*pendingAnswer
	for _, vmid := range slices.Sorted(maps.Keys(turn)) {
		x := m.members[vmid]
		list := slices.DeleteFunc(turn[vmid], func(l *pendingAnswer) bool {
			gone := x == nil || x.gate != l.from
			if gone {
				l.done <- agentlab.Errorf(agentlab.CodeNotFound, "sandbox %d was removed", vmid)
			}
			return gone
		})
		if len(list) == 0 {
			continue
		}
		n := m.writeAnswers(&text, x, list)
		done = append(done, list[:n]...)
		m.pending.requeue(vmid, list[n:])
	}
	var err error
	if text.Len() > 0 {
		err = m.commit(context.Background(), text.String())
	}
	for _, l := range done {
		l.done <- err
	}
}

// writeAnswers writes the commands that allow the addresses of a sandbox's
// answers, and returns how many answers are complete.
func (m *Manager) writeAnswers(w *strings.Builder, x *member, list []*pendingAnswer) int {
	now := m.opts.Now()
	addrs, elems := 0, 0
	for i, l := range list {
		for len(l.addrs) > 0 {
			if addrs >= maxBatchAddrs || elems >= maxBatchElems {
				return i
			}
			a := l.addrs[0].Unmap()
			l.addrs = l.addrs[1:]
			until := now.Add(l.ttl + graceTTL)
			if m.opts.Answered != nil {
				m.opts.Answered(x.VMID, Answer{l.name, a, until})
			}
			for _, gone := range x.addAnswer(a, l.name, until, now) {
				x.close(w, gone)
			}
			elems += x.open(w, a, now)
			addrs++
			for _, gone := range x.limitElements(a, now) {
				x.close(w, gone)
			}
		}
	}
	return len(list)
}
