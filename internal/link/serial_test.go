package link

import (
	"io"
	"net"
	"sync"
)

// serial is a virtio-serial port in memory: two bounded byte queues that
// survive the processes at their ends, and do not report that an end was
// closed.
type serial struct{ toGuest, toHost *queue }

func newSerial(size int) *serial {
	return &serial{toGuest: newQueue(size), toHost: newQueue(size)}
}

func (s *serial) host() *end  { return &end{in: s.toHost, out: s.toGuest, budget: -1} }
func (s *serial) guest() *end { return &end{in: s.toGuest, out: s.toHost, budget: -1} }

type queue struct {
	mu   sync.Mutex
	cond *sync.Cond
	buf  []byte
	size int
}

func newQueue(size int) *queue {
	q := &queue{size: size}
	q.cond = sync.NewCond(&q.mu)
	return q
}

// end is one opening of one side. After budget written bytes (if not
// negative) it behaves as if its owner was killed in the middle of the write.
type end struct {
	in, out *queue
	mu      sync.Mutex
	closed  bool
	budget  int
}

func (e *end) dead() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.closed
}

func (e *end) Read(p []byte) (int, error) {
	e.in.mu.Lock()
	defer e.in.mu.Unlock()
	for len(e.in.buf) == 0 && !e.dead() {
		e.in.cond.Wait()
	}
	if e.dead() {
		return 0, io.EOF
	}
	n := copy(p, e.in.buf)
	e.in.buf = e.in.buf[n:]
	e.in.cond.Broadcast()
	return n, nil
}

func (e *end) Write(p []byte) (int, error) {
	e.out.mu.Lock()
	defer e.out.mu.Unlock()
	total := 0
	for len(p) > 0 {
		for len(e.out.buf) >= e.out.size && !e.dead() {
			e.out.cond.Wait()
		}
		if e.dead() {
			return total, net.ErrClosed
		}
		n := min(len(p), e.out.size-len(e.out.buf))
		e.mu.Lock()
		if e.budget >= 0 {
			n = min(n, e.budget)
			if e.budget -= n; e.budget == 0 {
				e.closed = true
			}
		}
		e.mu.Unlock()
		e.out.buf = append(e.out.buf, p[:n]...)
		e.out.cond.Broadcast()
		total += n
		p = p[n:]
	}
	if e.dead() {
		e.wakeReader()
	}
	return total, nil
}

func (e *end) wakeReader() {
	go func() {
		e.in.mu.Lock()
		e.in.cond.Broadcast()
		e.in.mu.Unlock()
	}()
}

func (e *end) Close() error {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	for _, q := range []*queue{e.in, e.out} {
		q.mu.Lock()
		q.cond.Broadcast()
		q.mu.Unlock()
	}
	return nil
}
