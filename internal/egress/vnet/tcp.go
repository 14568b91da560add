package vnet

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

const (
	timeWait          = time.Second
	keepaliveIdle     = 5 * time.Minute
	keepaliveInterval = 30 * time.Second
	copyBuffer        = 32 << 10
)

var copyBuffers = sync.Pool{New: func() any { return new([copyBuffer]byte) }}

// handleTCP answers one connection request of the guest. The stack calls it
// in a goroutine of its own.
func (n *Network) handleTCP(req *tcp.ForwarderRequest) {
	if !n.enter() {
		req.Complete(false)
		return
	}
	defer n.wg.Done()
	id := req.ID()
	dst := fromStack(id.LocalAddress, id.LocalPort)
	if dst.Addr() == n.cfg.Gateway {
		n.handleService(req, dst)
		return
	}
	d := Decision{Proto: egress.TCP, Addr: dst, Name: n.names.lookup(dst.Addr())}
	verdict := n.cfg.Policy.Decide(egress.Flow{Proto: egress.TCP, Dst: dst})
	d.Allow, d.Rule = verdict.Allow, verdict.Rule
	if d.Allow && !n.tcp.take() {
		d.Allow, d.Rule = false, egress.RuleLimit
	}
	if !d.Allow {
		n.audit.record(d)
		req.Complete(true)
		return
	}
	defer n.tcp.give()
	outside, err := n.dial("tcp", &d)
	if err != nil {
		req.Complete(true)
		return
	}
	defer closeQuietly(outside)
	if guest := n.accept(req); guest != nil {
		n.relay(guest, outside)
	}
}

// dial opens the outside half of an allowed flow and records the decision
// with its outcome. The dialer has the last word: an address that only it
// knows to be forbidden turns the decision into a denial.
func (n *Network) dial(network string, d *Decision) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(n.ctx, n.cfg.Limits.DialTimeout)
	defer cancel()
	conn, err := n.cfg.Dialer.DialContext(ctx, network, d.Addr.String())
	if denied, ok := errors.AsType[*egress.DeniedError](err); ok {
		d.Allow, d.Rule = false, denied.Rule
	} else if err != nil {
		d.Error = err.Error()
	}
	n.audit.record(*d)
	return conn, err
}

// handleService connects the guest to a service of the gateway.
func (n *Network) handleService(req *tcp.ForwarderRequest, dst netip.AddrPort) {
	serve := n.cfg.Services[dst.Port()]
	if dst.Port() == dnsPort {
		serve = n.dns.serveTCP
	}
	d := Decision{Proto: egress.TCP, Addr: dst, Rule: egress.RuleGateway}
	if serve != nil && !n.service.take() {
		serve, d.Rule = nil, egress.RuleLimit
	}
	if serve == nil {
		n.audit.record(d)
		req.Complete(true)
		return
	}
	defer n.service.give()
	if guest := n.accept(req); guest != nil {
		serve(guest)
		n.finish(guest)
	}
}

// guestConn is the guest's half of a flow.
type guestConn struct {
	*gonet.TCPConn
	ep tcpip.Endpoint
	wq *waiter.Queue
}

// accept completes the guest's handshake; nil when the guest went away.
func (n *Network) accept(req *tcp.ForwarderRequest) *guestConn {
	wq := new(waiter.Queue)
	ep, err := req.CreateEndpoint(wq)
	if err != nil {
		req.Complete(true)
		return nil
	}
	req.Complete(false)
	// A guest whose program is gone answers a probe with a reset, so that a
	// forgotten flow does not hold its slot for ever.
	idle, interval := tcpip.KeepaliveIdleOption(keepaliveIdle), tcpip.KeepaliveIntervalOption(keepaliveInterval)
	_ = ep.SetSockOpt(&idle)
	_ = ep.SetSockOpt(&interval)
	ep.SocketOptions().SetKeepAlive(true)
	return &guestConn{TCPConn: gonet.NewTCPConn(wq, ep), ep: ep, wq: wq}
}

// finish closes the guest's half in order and waits until the stack has let
// go of it, so that the flow's slot stays taken while the flow holds memory.
func (n *Network) finish(g *guestConn) {
	entry, gone := waiter.NewChannelEntry(waiter.EventHUp)
	g.wq.EventRegister(&entry)
	defer g.wq.EventUnregister(&entry)
	g.ep.Close()
	limit := time.NewTimer(n.cfg.Limits.CloseTimeout)
	defer limit.Stop()
	for {
		switch tcp.EndpointState(g.ep.State()) {
		case tcp.StateClose, tcp.StateError, tcp.StateTimeWait:
			return
		}
		select {
		case <-gone:
		case <-limit.C:
			g.ep.Abort()
			return
		case <-n.ctx.Done():
			g.ep.Abort()
			return
		}
	}
}

// relay copies both ways until both sides have ended. An end of stream is
// passed on as a half-close; an error resets the other side.
func (n *Network) relay(guest *guestConn, outside net.Conn) {
	abort := sync.OnceFunc(func() {
		guest.ep.Abort()
		reset(outside)
	})
	stop := context.AfterFunc(n.ctx, abort)
	defer stop()
	sent := make(chan error, 1)
	if !n.spawn(func() { sent <- copyHalf(outside, guest, abort) }) {
		abort()
		return
	}
	received := copyHalf(guest, outside, abort)
	if err := <-sent; err == nil && received == nil {
		n.finish(guest)
	}
}

// copyHalf carries one direction. It returns nil after a clean end.
func copyHalf(dst, src net.Conn, abort func()) error {
	buf := copyBuffers.Get().(*[copyBuffer]byte) //nolint:forcetypeassert // only this type is put in
	defer copyBuffers.Put(buf)
	for {
		n, err := src.Read(buf[:])
		if n > 0 {
			if _, werr := dst.Write(buf[:n]); werr != nil {
				abort()
				return werr
			}
		}
		switch {
		case err == nil:
			continue
		case !errors.Is(err, io.EOF):
			abort()
			return err
		}
		if half, ok := dst.(interface{ CloseWrite() error }); ok {
			if half.CloseWrite() == nil {
				return nil
			}
			// The peer is gone already; what it may still have sent is lost
			// with it, as it is on a wire.
		}
		abort()
		return io.ErrClosedPipe
	}
}

// reset closes a connection so that its peer sees a reset where that exists.
func reset(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	_ = c.Close()
}

func closeQuietly(c io.Closer) { _ = c.Close() }
