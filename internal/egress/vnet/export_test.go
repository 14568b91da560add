package vnet

import (
	"io"
	"net"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

// Card is a network card on the other end of a link, for a guest made of the
// same stack.
type Card struct{ *linkEndpoint }

func NewCard(link io.ReadWriteCloser, mtu int, mac net.HardwareAddr) Card {
	return Card{newLinkEndpoint(link, mtu, tcpip.LinkAddress(mac), new(counters))}
}

func (c Card) Endpoint() stack.LinkEndpoint { return c.linkEndpoint }

// Receive feeds the card until the link ends; see sees every frame first.
func (c Card) Receive(see func([]byte)) error {
	return c.receive(func(f []byte) bool { see(f); return true })
}

func (c Card) Shut() { c.shut() }

// CheckFrame runs the frame filter of a network with the default addresses.
func CheckFrame(frame []byte) (pass bool, rule string, dst netip.AddrPort) {
	f := &frameFilter{guest: DefaultGuest, gateway: DefaultGateway, guest6: DefaultGuest6, gateway6: DefaultGateway6, mac: DefaultMAC}
	v := f.check(frame)
	return v.pass, v.rule, v.dst
}

// AnswerDNS answers a question as the network's DNS server does.
func (n *Network) AnswerDNS(wire []byte) []byte { return n.gate.Answer(n.ctx, wire, true) }

var MaxFrame = maxFrame

// Stats is a snapshot of what a Network carries.
type Stats struct {
	FramesIn      uint64 // from the guest, whole
	FramesOut     uint64 // to the guest
	FramesDropped uint64 // from the guest, refused before the stack
	TCPFlows      int    // open or opening, to the outside
	ServiceFlows  int
	UDPFlows      int
	Pings         int // echo requests to the outside
}

// Stats returns what the Network carries now.
func (n *Network) Stats() Stats {
	return Stats{
		FramesIn:      n.stats.framesIn.Load(),
		FramesOut:     n.stats.framesOut.Load(),
		FramesDropped: n.stats.framesDropped.Load(),
		TCPFlows:      n.gate.Flows(egress.TCP),
		ServiceFlows:  len(n.service),
		UDPFlows:      n.gate.Flows(egress.UDP),
		Pings:         n.gate.Flows(egress.ICMP),
	}
}
