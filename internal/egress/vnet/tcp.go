package vnet

import (
	"io"
	"net"
	"net/netip"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

const (
	timeWait          = time.Second
	keepaliveIdle     = 5 * time.Minute
	keepaliveInterval = 30 * time.Second
)

// handleTCP handles one connection request of the guest. The stack calls it in
// a separate goroutine.
func (n *Network) handleTCP(req *tcp.ForwarderRequest) {
	if !n.enter() {
		req.Complete(false)
		return
	}
	defer n.wg.Done()
	id := req.ID()
	dst := fromStack(id.LocalAddress, id.LocalPort)
	if n.isGateway(dst.Addr()) && !n.opensHost(dst) {
		n.handleService(req, dst)
		return
	}
	flow, err := n.gate.BeginTCP(n.ctx, dst)
	if err != nil {
		req.Complete(true)
		return
	}
	defer flow.End()
	if flow.NeedsName() {
		n.relayNamed(req, flow)
		return
	}
	outside, err := flow.Dial()
	if err != nil {
		req.Complete(true)
		return
	}
	guest := n.accept(req)
	if guest == nil {
		closeQuietly(outside)
		return
	}
	n.relay(flow, guest, outside)
}

// opensHost reports whether the policy allows a port of the host, which the
// guest reaches by the gateway's address. The gateway's own services take
// precedence.
func (n *Network) opensHost(dst netip.AddrPort) bool {
	return dst.Addr() == n.cfg.Gateway && n.cfg.Services[dst.Port()] == nil && dst.Port() != dnsPort && n.gate.OpensHost(dst.Port())
}

// relayNamed accepts a flow before it is dialled, because the guest sends the
// name only then.
func (n *Network) relayNamed(req *tcp.ForwarderRequest, flow *gate.Flow) {
	guest := n.accept(req)
	if guest == nil {
		return
	}
	outside, err := flow.DialNamed(guest)
	if err != nil {
		guest.ep.Abort()
		return
	}
	n.relay(flow, guest, outside)
}

func (n *Network) relay(flow *gate.Flow, guest *guestConn, outside net.Conn) {
	if flow.Relay(guest, outside, guest.ep.Abort) {
		n.finish(guest)
	}
}

// handleService connects the guest to a service of the gateway.
func (n *Network) handleService(req *tcp.ForwarderRequest, dst netip.AddrPort) {
	serve := n.cfg.Services[dst.Port()]
	if dst.Port() == dnsPort {
		serve = n.gate.ServeStream
	}
	rule := egress.RuleGateway
	if serve != nil && !n.service.Acquire() {
		serve, rule = nil, egress.RuleLimit
	}
	if serve == nil {
		n.deny(egress.TCP, dst, rule)
		req.Complete(true)
		return
	}
	defer n.service.Release()
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

// accept completes the guest's handshake. It returns nil if the guest has
// aborted it.
func (n *Network) accept(req *tcp.ForwarderRequest) *guestConn {
	wq := new(waiter.Queue)
	ep, err := req.CreateEndpoint(wq)
	if err != nil {
		req.Complete(true)
		return nil
	}
	req.Complete(false)
	// If the guest's program has ended, the guest answers a keepalive probe
	// with a reset, so that an abandoned flow does not use its slot
	// forever.
	idle, interval := tcpip.KeepaliveIdleOption(keepaliveIdle), tcpip.KeepaliveIntervalOption(keepaliveInterval)
	_ = ep.SetSockOpt(&idle)
	_ = ep.SetSockOpt(&interval)
	ep.SocketOptions().SetKeepAlive(true)
	return &guestConn{TCPConn: gonet.NewTCPConn(wq, ep), ep: ep, wq: wq}
}

// finish closes the guest's half normally and waits until the stack has
// released it, so that the flow counts as long as it uses memory.
func (n *Network) finish(g *guestConn) {
	entry, gone := waiter.NewChannelEntry(waiter.EventHUp)
	g.wq.EventRegister(&entry)
	defer g.wq.EventUnregister(&entry)
	g.ep.Close()
	limit := time.After(n.cfg.Limits.CloseTimeout)
	for {
		switch tcp.EndpointState(g.ep.State()) {
		case tcp.StateClose, tcp.StateError, tcp.StateTimeWait:
			return
		}
		select {
		case <-gone:
		case <-limit:
			g.ep.Abort()
			return
		case <-n.ctx.Done():
			g.ep.Abort()
			return
		}
	}
}

func closeQuietly(c io.Closer) { _ = c.Close() }
