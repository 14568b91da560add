package vnet

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

// maxDatagram is the largest UDP payload that IPv4 carries.
const maxDatagram = 65507

var datagrams = sync.Pool{New: func() any { return new([maxDatagram + 1]byte) }}

// handleUDP sees the first datagram of every flow, in the goroutine that
// reads the link, so it must not wait for anything. False makes the stack
// answer "port unreachable".
func (n *Network) handleUDP(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	d := Decision{Proto: egress.UDP, Addr: fromStack(id.LocalAddress, id.LocalPort)}
	if d.Addr.Addr() == n.cfg.Gateway {
		d.Rule = egress.RuleGateway
		n.audit.record(d)
		return false
	}
	d.Name = n.names.lookup(d.Addr.Addr())
	verdict := n.cfg.Policy.Decide(egress.Flow{Proto: egress.UDP, Dst: d.Addr})
	d.Allow, d.Rule = verdict.Allow, verdict.Rule
	if d.Allow && !n.udp.take() {
		d.Allow, d.Rule = false, egress.RuleLimit
	}
	if !d.Allow {
		n.audit.record(d)
		return false
	}
	wq := new(waiter.Queue)
	ep, err := udp.NewForwarderRequest(n.stack, id, pkt).CreateEndpoint(wq)
	if err != nil {
		n.udp.give()
		return false
	}
	guest := gonet.NewUDPConn(wq, ep)
	if !n.spawn(func() {
		defer n.udp.give()
		defer closeQuietly(guest)
		n.relayUDP(guest, d)
	}) {
		n.udp.give()
		closeQuietly(guest)
	}
	return true
}

// relayUDP carries datagrams both ways until none came for Limits.UDPIdle.
func (n *Network) relayUDP(guest *gonet.UDPConn, d Decision) {
	outside, err := n.dial("udp", &d)
	if err != nil {
		return
	}
	stop := context.AfterFunc(n.ctx, func() {
		closeQuietly(guest)
		closeQuietly(outside)
	})
	defer stop()
	f := &udpFlow{idle: n.cfg.Limits.UDPIdle, start: time.Now()}
	if !n.spawn(func() {
		// The guest's side has no idle clock of its own: it ends when the
		// other direction closes it.
		f.copy(outside, guest, func() bool { return true })
		closeQuietly(outside)
	}) {
		closeQuietly(outside)
		return
	}
	f.arm(outside)
	f.copy(guest, outside, func() bool { return f.arm(outside) })
	closeQuietly(outside)
}

// udpFlow is the idle clock that both directions of a flow share.
type udpFlow struct {
	idle  time.Duration
	start time.Time
	last  atomic.Int64 // of the last datagram, in nanoseconds since start
}

func (f *udpFlow) touch() { f.last.Store(int64(time.Since(f.start))) }

// arm sets the deadline at which the flow has been idle for long enough and
// reports whether that lies ahead.
func (f *udpFlow) arm(c net.Conn) bool {
	deadline := f.start.Add(time.Duration(f.last.Load()) + f.idle)
	return time.Until(deadline) > 0 && c.SetReadDeadline(deadline) == nil
}

// copy carries one direction. On a read timeout goOn tells whether the flow
// is to live on.
func (f *udpFlow) copy(dst, src net.Conn, goOn func() bool) {
	buf := datagrams.Get().(*[maxDatagram + 1]byte) //nolint:forcetypeassert // only this type is put in
	defer datagrams.Put(buf)
	for {
		size, err := src.Read(buf[:])
		switch {
		case err == nil:
			f.touch()
			// A datagram that cannot be sent is lost, as on a wire; a closed
			// destination shows at the next read.
			_, _ = dst.Write(buf[:size])
		case isTimeout(err):
			if !goOn() {
				return
			}
		case errors.Is(err, syscall.ECONNREFUSED):
			// An earlier datagram found no listener; the next one may.
		default:
			return
		}
	}
}

func isTimeout(err error) bool {
	t, ok := errors.AsType[net.Error](err)
	return ok && t.Timeout()
}
