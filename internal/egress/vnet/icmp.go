package vnet

import (
	"encoding/binary"
	"net"
	"net/netip"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

const (
	icmpHeader = 8
	ttl        = 64

	// Codes of "destination unreachable".
	code4Host, code4Prohibited    = 1, 13
	code6Address, code6Prohibited = 3, 1

	// quoted is how much of a packet an ICMP error contains: the IP header
	// and the part that identifies the flow.
	quoted4, quoted6 = ipv4Header + 8, ipv6Header + 64

	// icmpErrors limits the ICMP errors per second that the guest gets.
	icmpErrors = 200
)

// echo is an echo request of the guest.
type echo struct {
	dst     netip.Addr
	id, seq uint16
	data    []byte
	packet  []byte // its beginning, for ICMP errors
}

// parseEcho parses an echo request in a complete IP packet whose transport
// header begins at the offset at; it returns nil for other packets.
func parseEcho(dst netip.Addr, packet []byte, at int) *echo {
	p := packet[at:]
	kind := byte(header.ICMPv4Echo)
	if dst.Is6() {
		kind = byte(header.ICMPv6EchoRequest)
	}
	if len(p) < icmpHeader || p[0] != kind || p[1] != 0 {
		return nil
	}
	return &echo{
		dst: dst, id: binary.BigEndian.Uint16(p[4:]), seq: binary.BigEndian.Uint16(p[6:]),
		data:   append([]byte(nil), p[icmpHeader:]...),
		packet: append([]byte(nil), packet[:min(len(packet), quoted6)]...),
	}
}

// handleEcho decides on an echo request and starts its answer. The goroutine
// that reads the link calls it, so it does not wait.
func (n *Network) handleEcho(e *echo) {
	flow, err := n.gate.Begin(egress.ICMP, netip.AddrPortFrom(e.dst, 0))
	if err != nil {
		n.unreachable(e.dst, e.packet, true)
		return
	}
	if !n.spawn(func() { n.ping(flow, e) }) {
		flow.End()
	}
}

func (n *Network) ping(flow *gate.Flow, e *echo) {
	data, err := flow.Ping(e.data)
	switch {
	case err == nil && len(data) == len(e.data):
		n.echoReply(e, data)
	case gate.IsDenied(err):
		n.unreachable(e.dst, e.packet, true)
	case err != nil && !gate.IsTimeout(err):
		n.unreachable(e.dst, e.packet, false)
	}
}

func (n *Network) echoReply(e *echo, data []byte) {
	b := make([]byte, icmpHeader, icmpHeader+len(data))
	b[0] = byte(header.ICMPv4EchoReply)
	if e.dst.Is6() {
		b[0] = byte(header.ICMPv6EchoReply)
	}
	binary.BigEndian.PutUint16(b[4:], e.id)
	binary.BigEndian.PutUint16(b[6:], e.seq)
	n.sendICMP(e.dst, n.guestOf(e.dst), append(b, data...), ttl, n.card())
}

// unreachable sends the guest an ICMP error for a packet to dst that is not
// allowed or has no route. The error comes from the gateway and contains the
// beginning of the packet.
func (n *Network) unreachable(dst netip.Addr, packet []byte, prohibited bool) {
	if !n.errorLimit.Allow() {
		return
	}
	b := make([]byte, icmpHeader)
	from, most := n.cfg.Gateway, quoted4
	if dst.Is6() {
		from, most = n.cfg.Gateway6, quoted6
		b[0], b[1] = byte(header.ICMPv6DstUnreachable), code6Address
	} else {
		b[0], b[1] = byte(header.ICMPv4DstUnreachable), code4Host
	}
	switch {
	case prohibited && dst.Is6():
		b[1] = code6Prohibited
	case prohibited:
		b[1] = code4Prohibited
	}
	n.sendICMP(from, n.guestOf(dst), append(b, packet[:min(len(packet), most)]...), ttl, n.card())
}

// sendICMP completes an ICMP message with checksum and IP header and queues
// it for the link.
func (n *Network) sendICMP(src, dst netip.Addr, message []byte, hops byte, card [6]byte) {
	message[2], message[3] = 0, 0
	var packet []byte
	proto := header.IPv4ProtocolNumber
	if dst.Is6() {
		proto = header.IPv6ProtocolNumber
		sum := header.PseudoHeaderChecksum(header.ICMPv6ProtocolNumber, toStack(src), toStack(dst), uint16(len(message)))
		binary.BigEndian.PutUint16(message[2:], ^checksum.Checksum(message, sum))
		ip := make(header.IPv6, ipv6Header, ipv6Header+len(message))
		ip.Encode(&header.IPv6Fields{
			PayloadLength: uint16(len(message)), TransportProtocol: header.ICMPv6ProtocolNumber, HopLimit: hops,
			SrcAddr: toStack(src), DstAddr: toStack(dst),
		})
		packet = append(ip, message...)
	} else {
		binary.BigEndian.PutUint16(message[2:], ^checksum.Checksum(message, 0))
		ip := make(header.IPv4, ipv4Header, ipv4Header+len(message))
		ip.Encode(&header.IPv4Fields{
			TotalLength: uint16(ipv4Header + len(message)), TTL: hops, Protocol: protoICMP,
			SrcAddr: toStack(src), DstAddr: toStack(dst),
		})
		ip.SetChecksum(^ip.CalculateChecksum())
		packet = append(ip, message...)
	}
	if err := n.stack.WritePacketToRemote(nicID, tcpip.LinkAddress(card[:]), proto, buffer.MakeWithData(packet)); err != nil {
		n.log.Debug("an ICMP message is lost", "err", err.String())
	}
}

func (n *Network) guestOf(family netip.Addr) netip.Addr {
	if family.Is6() {
		return n.cfg.Guest6
	}
	return n.cfg.Guest
}

// card returns the guest's MAC address, if it is already known.
func (n *Network) card() [6]byte {
	if c := n.guestCard.Load(); c != nil {
		return *c
	}
	return [6]byte(net.HardwareAddr(broadcastMAC))
}

// advertise answers a neighbour solicitation for the gateway's address. The
// stack's own answer is not used, because it would store an entry for each
// sender.
func (n *Network) advertise(to netip.Addr, card [6]byte) {
	b := make([]byte, 32)
	b[0] = byte(header.ICMPv6NeighborAdvert)
	b[4] = 0xe0 // router, solicited, override
	gw := n.cfg.Gateway6.As16()
	copy(b[8:], gw[:])
	b[24], b[25] = 2, 1 // target link-layer address
	copy(b[26:], n.cfg.MAC)
	n.sendICMP(n.cfg.Gateway6, to, b, 255, card)
}
