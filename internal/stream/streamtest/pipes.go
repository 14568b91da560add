// Package streamtest has helpers for tests of stream servers.
package streamtest

import (
	"net"
	"sync"
)

// Pipes is a listener for in-memory connections, which work with the fake time
// of testing/synctest.
type Pipes struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

// NewPipes returns a listener without connections.
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
