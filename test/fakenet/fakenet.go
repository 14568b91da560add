// Package fakenet is an internet for tests: names, web servers, git hosts and
// echo services at addresses that look public. It has no way out of the
// machine, because it has no socket but pairs made in this process and, when
// asked for, one unix socket for shims in other processes.
//
// A Net is a gate.Dialer: what is dialled is looked up in its tables, and an
// address that is in none of them refuses the connection.
package fakenet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
)

// Block is where a Net takes its addresses from. It is one of the AS112
// blocks: public by every rule, and a sink on the real internet.
var Block = netip.MustParsePrefix("192.31.196.0/24")

// Net is a fake internet. Its zero value is not usable; see New.
type Net struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	ended   bool
	tcp     map[netip.AddrPort]func(net.Conn)
	udp     map[netip.AddrPort]func(net.Conn)
	pings   map[netip.Addr]bool     // what answers echo requests
	zone    map[string][]netip.Addr // canonical names
	later   map[string][]netip.Addr // answers after the first for its type
	asked   map[string]bool         // "name type" that were answered once, of names in later
	next    netip.Addr
	dials   []string
	trap    *Responder // serves every address that has no service; nil: none does
	outside probe.Outside
	closers []func() // last in, first out
}

// New returns an empty internet with a DNS service: every address answers on
// port 53 from the Net's zone. Close ends it.
func New() *Net {
	n := &Net{
		tcp:   map[netip.AddrPort]func(net.Conn){},
		udp:   map[netip.AddrPort]func(net.Conn){},
		zone:  map[string][]netip.Addr{},
		pings: map[netip.Addr]bool{},
		later: map[string][]netip.Addr{},
		asked: map[string]bool{},
		next:  Block.Addr(),
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	return n
}

// Close ends every service and connection and waits for them.
func (n *Net) Close() {
	n.mu.Lock()
	n.ended = true
	closers := n.closers
	n.closers = nil
	n.mu.Unlock()
	n.cancel()
	for _, c := range slices.Backward(closers) {
		c()
	}
	n.wg.Wait()
}

func (n *Net) onClose(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closers = append(n.closers, f)
}

// Host gives a name an address of its own, once, and returns it.
func (n *Net) Host(name string) netip.Addr {
	n.mu.Lock()
	defer n.mu.Unlock()
	name = canonical(name)
	if a := n.zone[name]; len(a) > 0 {
		return a[0]
	}
	n.next = n.next.Next()
	if !Block.Contains(n.next) {
		panic("fakenet: the block of addresses is used up")
	}
	n.zone[name] = []netip.Addr{n.next}
	return n.next
}

// SetName makes a name resolve to just these addresses, which may be such as
// no real zone should hold.
func (n *Net) SetName(name string, addrs ...netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.zone[canonical(name)] = addrs
}

// HandleTCP serves a TCP port of a host. The service owns the connection; it
// is closed when serve returns and when the Net ends.
func (n *Net) HandleTCP(name string, port uint16, serve func(net.Conn)) netip.AddrPort {
	return n.handle(n.tcp, name, port, serve)
}

// HandleUDP serves a UDP port of a host: each flow is a connection whose
// reads and writes are datagrams.
func (n *Net) HandleUDP(name string, port uint16, serve func(net.Conn)) netip.AddrPort {
	return n.handle(n.udp, name, port, serve)
}

func (n *Net) handle(table map[netip.AddrPort]func(net.Conn), name string, port uint16, serve func(net.Conn)) netip.AddrPort {
	at := netip.AddrPortFrom(n.Host(name), port)
	n.mu.Lock()
	defer n.mu.Unlock()
	table[at] = serve
	return at
}

// Dials returns everything that was dialled so far, as "network addr".
func (n *Net) Dials() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.dials)
}

// DialContext implements gate.Dialer. An address without a service refuses
// the connection (syscall.ECONNREFUSED).
func (n *Net) DialContext(_ context.Context, network, addr string) (net.Conn, error) {
	at, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not an IP address and port", addr)
	}
	n.mu.Lock()
	n.dials = append(n.dials, network+" "+addr)
	var serve func(net.Conn)
	kind := unix.SOCK_STREAM
	proto := strings.TrimRight(network, "46")
	n.outside.Flows = append(n.outside.Flows, probe.Trace{Proto: proto, Addr: at.Addr(), Port: at.Port()})
	switch proto {
	case "tcp":
		serve = n.tcp[at]
		if serve == nil && at.Port() == 53 {
			serve = n.serveDNSStream
		}
		if serve == nil && n.trap != nil {
			serve = n.trap.ServeStream
		}
	case "udp":
		kind = unix.SOCK_SEQPACKET // keeps borders as datagrams do, and shows the end
		serve = n.udp[at]
		if serve == nil && at.Port() == 53 {
			serve = n.serveDNSPackets
		}
		if serve == nil && n.trap != nil {
			serve = n.trap.ServePackets
		}
	case "icmp":
		kind = unix.SOCK_SEQPACKET
		if n.pings[at.Addr()] || n.trap != nil {
			serve = echoPackets
		}
	}
	n.mu.Unlock()
	if serve == nil {
		return nil, fmt.Errorf("dial %s %s: %w", network, addr, syscall.ECONNREFUSED)
	}
	near, far, err := pair(kind, at)
	if err != nil {
		return nil, err
	}
	if !n.serve(far, serve) {
		_ = near.Close()
		return nil, errors.New("the fake internet is closed")
	}
	return near, nil
}

// serve runs a service on a connection, for as long as the Net lives.
func (n *Net) serve(conn net.Conn, serve func(net.Conn)) bool {
	ok := n.spawn(func() {
		stop := context.AfterFunc(n.ctx, func() { _ = conn.Close() })
		defer stop()
		serve(conn)
		_ = conn.Close()
	})
	if !ok {
		_ = conn.Close()
	}
	return ok
}

func (n *Net) spawn(f func()) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ended {
		return false
	}
	n.wg.Go(f)
	return true
}

// Conn is one end of a connection inside the Net. It has half-close.
type Conn struct {
	*net.UnixConn
	at netip.AddrPort
}

// RemoteAddr implements net.Conn with the address that was dialled.
func (c *Conn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(c.at) }

func pair(kind int, at netip.AddrPort) (near, far *Conn, err error) {
	fds, err := sockets(kind)
	if err != nil {
		return nil, nil, fmt.Errorf("make a pair of sockets: %w", err)
	}
	a, errA := fileConn(fds[0])
	b, errB := fileConn(fds[1])
	if err := errors.Join(errA, errB); err != nil {
		return nil, nil, err
	}
	return &Conn{a, at}, &Conn{b, at}, nil
}

func fileConn(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "fakenet")
	defer func() { _ = f.Close() }()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}
