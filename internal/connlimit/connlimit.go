// Package connlimit limits how many connections of a listener are open, and knows
// which errors of a listener are temporary.
package connlimit

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"github.com/agentlab-vm/agentlab/internal/stream"
)

// Temporary reports whether an error of a listening socket does not concern the
// socket, such as a lack of file descriptors.
func Temporary(err error) bool {
	return slices.ContainsFunc([]error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED},
		func(e error) bool { return errors.Is(err, e) })
}

// Listener is a net.Listener with a limit. It closes further connections at
// once.
type Listener struct {
	net.Listener
	most, mostOfHost int

	mu     sync.Mutex
	open   int
	byHost map[netip.Prefix]int
}

// New returns a listener on l that allows most open connections in total and
// mostOfHost of one Host.
func New(l net.Listener, most, mostOfHost int) *Listener {
	return &Listener{Listener: l, most: most, mostOfHost: mostOfHost, byHost: map[netip.Prefix]int{}}
}

// Host returns the addresses that one client can have: an IPv4 address, or an
// IPv6 /64 network. It is the zero Prefix for an invalid address.
func Host(from netip.Addr) netip.Prefix {
	from = from.Unmap().WithZone("")
	bits := from.BitLen()
	if from.Is6() {
		bits = 64
	}
	p, err := from.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from, _ := netip.ParseAddrPort(c.RemoteAddr().String()) // fails for a unix socket
		host := Host(from.Addr())
		if !l.acquire(host) {
			_ = c.Close()
			continue
		}
		return &conn{Conn: c, release: sync.OnceFunc(func() { l.release(host) })}, nil
	}
}

func (l *Listener) acquire(host netip.Prefix) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open >= l.most || l.byHost[host] >= l.mostOfHost {
		return false
	}
	l.open++
	l.byHost[host]++
	return true
}

func (l *Listener) release(host netip.Prefix) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	if l.byHost[host]--; l.byHost[host] == 0 {
		delete(l.byHost, host)
	}
}

// conn is a connection that no longer counts after it is closed.
type conn struct {
	net.Conn
	release func()
}

func (c *conn) Close() error {
	defer c.release()
	return c.Conn.Close()
}

// CloseWrite passes on the half close, which embedding hides.
func (c *conn) CloseWrite() error { return stream.CloseWrite(c.Conn) }
