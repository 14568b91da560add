package vnet

import (
	"io"
	"net"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
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
