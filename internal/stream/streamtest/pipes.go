// Package streamtest helps tests of servers of streams.
package streamtest

import (
	"net"
	"sync"
)

// Pipes is a listener of connections in memory, whose time testing/synctest
// can fake.
type Pipes struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

// NewPipes returns a listener that nobody has dialled.
func NewPipes() *Pipes { return &Pipes{conns: make(chan net.Conn), done: make(chan struct{})} }

// Dial returns the client's end of a new connection, once it was accepted.
func (p *Pipes) Dial() net.Conn {
	a, b := net.Pipe()
	p.conns <- b
	return a
}

// Accept implements net.Listener.
func (p *Pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (p *Pipes) Close() error {
	p.once.Do(func() { close(p.done) })
	return nil
}

// Addr implements net.Listener.
func (p *Pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }
