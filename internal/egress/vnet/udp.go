package vnet

import (
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

// handleUDP handles the first datagram of every flow, in the goroutine that
// reads the link, so it must not wait. If it returns false, the stack answers
// "port unreachable".
func (n *Network) handleUDP(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	dst := fromStack(id.LocalAddress, id.LocalPort)
	if n.isGateway(dst.Addr()) {
		n.deny(egress.UDP, dst, egress.RuleGateway)
		return false
	}
	flow, err := n.gate.Begin(egress.UDP, dst)
	if err != nil {
		return false
	}
	wq := new(waiter.Queue)
	ep, terr := udp.NewForwarderRequest(n.stack, id, pkt).CreateEndpoint(wq)
	if terr != nil {
		flow.End()
		return false
	}
	guest := gonet.NewUDPConn(wq, ep)
	if !n.spawn(func() { n.serveUDP(flow, guest) }) {
		flow.End()
		closeQuietly(guest)
	}
	return true
}

func (n *Network) serveUDP(flow *gate.Flow, guest *gonet.UDPConn) {
	defer flow.End()
	defer closeQuietly(guest)
	if outside, err := flow.Dial(); err == nil {
		flow.RelayUDP(guest, outside, n.cfg.Limits.UDPIdle)
	}
}

// deny records a denial without a decision of the policy.
func (n *Network) deny(proto egress.Proto, dst netip.AddrPort, rule string) {
	r := agentlab.EgressRecord{Proto: string(proto), Port: int(dst.Port()), Rule: rule}
	if dst.Addr().IsValid() {
		r.Addr = dst.Addr().Unmap().String()
	}
	n.gate.Record(r)
}
