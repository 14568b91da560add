package fake

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// conns are the open connections of one guest. They end with the guest, and
// those of a driver end with the driver.
type conns struct {
	mu     sync.Mutex
	closed bool
	open   map[*conn]struct{}
}

// conn is one end of a pipe between a guest and a driver. Closing it closes
// the other end too.
type conn struct {
	net.Conn
	peer  net.Conn
	set   *conns
	owner *Driver // owner of the host's end
	guest *guest
}

// pipe connects g with the process of d. The guest's end refers to the guest.
func (g *guest) pipe(d *Driver) (guestEnd, hostEnd net.Conn, err error) {
	a, b := net.Pipe()
	ge := &conn{Conn: a, peer: b, set: &g.conns, owner: d, guest: g}
	if !g.conns.add(ge) {
		return nil, nil, agentlab.Errorf(agentlab.CodeUnavailable, "the VM of sandbox %d is not running", g.in.rec.Spec.VMID)
	}
	return ge, b, nil
}

// Close closes both ends.
func (c *conn) Close() error {
	c.set.mu.Lock()
	delete(c.set.open, c)
	if len(c.set.open) == 0 {
		c.set.open = nil // there are thousands of guests
	}
	c.set.mu.Unlock()
	_ = c.peer.Close()
	return c.Conn.Close()
}

func (s *conns) add(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	if s.open == nil {
		s.open = map[*conn]struct{}{}
	}
	s.open[c] = struct{}{}
	return true
}

// close closes all connections and rejects new ones.
func (s *conns) close() { s.closeIf(true, func(*conn) bool { return true }) }

// closeOf closes the connections whose other end belongs to d.
func (s *conns) closeOf(d *Driver) { s.closeIf(false, func(c *conn) bool { return c.owner == d }) }

func (s *conns) closeIf(forever bool, which func(*conn) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = s.closed || forever
	for c := range s.open {
		if which(c) {
			delete(s.open, c)
			_ = c.Conn.Close()
			_ = c.peer.Close()
		}
	}
}

// listener accepts a guest's connections to the controller. There are thousands.
type listener struct {
	owner *Driver

	mu     sync.Mutex
	closed bool
	accept func(net.Conn) // of Handle
	ended  func(error)
	queue  *connQueue // nil while nothing waits
}

// connQueue connects the guest with Accept.
type connQueue struct {
	conns   chan net.Conn
	changed chan struct{} // closed by Handle and at the end of the listener
}

var _ backend.PassiveListener = (*listener)(nil)

// change changes the listener, and wakes what waits. l.mu is not locked.
func (l *listener) change(fn func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fn()
	if l.queue != nil {
		close(l.queue.changed)
		l.queue = nil
	}
}

// wait returns the queue and the function that accepts connections instead; both are nil
// if the listener is closed.
func (l *listener) wait() (*connQueue, func(net.Conn)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, nil
	}
	if l.queue == nil && l.accept == nil {
		l.queue = &connQueue{conns: make(chan net.Conn), changed: make(chan struct{})}
	}
	return l.queue, l.accept
}

// Handle implements backend.PassiveListener.
func (l *listener) Handle(accept func(net.Conn), ended func(error)) {
	l.change(func() {
		l.accept, l.ended = accept, ended
		if l.closed { // by another listener of the guest
			go ended(net.ErrClosed)
		}
	})
}

// Accept waits for the next connection.
func (l *listener) Accept() (net.Conn, error) {
	for {
		q, _ := l.wait()
		if q == nil {
			return nil, net.ErrClosed
		}
		select {
		case c := <-q.conns:
			return c, nil
		case <-q.changed:
		}
	}
}

// Close closes the listener; accepted connections stay open.
func (l *listener) Close() error {
	l.change(func() { l.closed = true })
	return nil
}

// shut ends the listener although its owner did not close it.
func (l *listener) shut() {
	l.change(func() {
		if !l.closed && l.ended != nil {
			go l.ended(net.ErrClosed)
		}
		l.closed = true
	})
}

// Addr returns the controller's address for the guest.
func (l *listener) Addr() net.Addr {
	return &net.TCPAddr{IP: net.IPv4(10, 77, 0, 1), Port: backend.ControllerPort}
}

// dialController connects the guest to its current listener.
func (g *guest) dialController(ctx context.Context) (net.Conn, error) {
	g.in.mu.Lock()
	l := g.in.listener
	g.in.mu.Unlock()
	refused := agentlab.Errorf(agentlab.CodeUnavailable, "connection refused")
	if l == nil {
		return nil, refused
	}
	guestEnd, hostEnd, err := g.pipe(l.owner)
	if err != nil {
		return nil, err
	}
	for {
		q, accept := l.wait()
		if accept != nil {
			accept(hostEnd)
			return guestEnd, nil
		}
		if q == nil {
			err = refused
			break
		}
		select {
		case q.conns <- hostEnd:
			return guestEnd, nil
		case <-q.changed:
			continue
		case <-ctx.Done():
			err = ctx.Err()
		case <-g.ctx.Done():
			err = io.ErrClosedPipe
		}
		break
	}
	_ = guestEnd.Close()
	return nil, err
}

// httpClient returns a client for which every host is the controller.
func (g *guest) httpClient() *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return g.dialController(ctx) },
	}}
}

// oneConn is a listener that returns one connection and ends.
type oneConn struct{ c chan net.Conn }

func serveOne(c net.Conn) oneConn {
	l := oneConn{make(chan net.Conn, 1)}
	l.c <- c
	close(l.c)
	return l
}

// Accept returns the connection, then io.EOF.
func (l oneConn) Accept() (net.Conn, error) {
	if c, ok := <-l.c; ok {
		return c, nil
	}
	return nil, io.EOF
}

// Close does nothing.
func (l oneConn) Close() error { return nil }

// Addr returns a fixed address.
func (l oneConn) Addr() net.Addr { return &net.UnixAddr{Name: "fake", Net: "unix"} }
