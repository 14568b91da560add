package vnet

import (
	"bytes"
	"encoding/binary"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

const (
	ipv6Header = 40
	typeIPv6   = 0x86dd
	protoICMP6 = 58

	hopByHop = 0
	ndpHops  = 255

	neighborSolicit = 24 // bytes of a message without options
)

// checkIPv6 decides on an IPv6 packet. TCP, UDP or ICMP must directly follow
// the header: every extension header is rejected, including fragments, because
// normal packets fit the link.
func (f *frameFilter) checkIPv6(dstMAC, srcMAC, p []byte) frameVerdict {
	if len(p) < ipv6Header || p[0]>>4 != 6 {
		return frameVerdict{}
	}
	size := int(binary.BigEndian.Uint16(p[4:6]))
	if size == 0 || ipv6Header+size > len(p) {
		return frameVerdict{}
	}
	p = p[:ipv6Header+size]
	src, dst := netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40]))
	if p[6] == protoICMP6 && size >= icmpHeader && isLinkOnly(p[ipv6Header]) {
		return f.checkNDP(dstMAC, srcMAC, src, dst, p)
	}
	if p[6] == hopByHop && dst.IsLinkLocalMulticast() {
		return frameVerdict{} // multicast listener reports, which every kernel sends
	}
	if src != f.guest6 && !egress.Dropped(frameSource) || dst == f.guest6 {
		return frameVerdict{}
	}
	v := frameVerdict{dst: netip.AddrPortFrom(dst, 0)}
	switch p[6] {
	case protoTCP, protoUDP:
		v.proto = egress.TCP
		if p[6] == protoUDP {
			v.proto = egress.UDP
		}
		if size >= 4 {
			v.dst = netip.AddrPortFrom(dst, binary.BigEndian.Uint16(p[ipv6Header+2:]))
		}
	case protoICMP6:
		v.proto = egress.ICMP
	default:
		v.proto, v.rule, v.pass = protoName(p[6]), egress.RuleProtocol, egress.Dropped(frameExtension)
		return v
	}
	if dst == f.gateway6 {
		v.pass = f.addressedToUs(dstMAC) && (v.proto != egress.ICMP || parseEcho(dst, p, ipv6Header) != nil)
		return v
	}
	return f.outbound6(v, dstMAC, p)
}

func (f *frameFilter) outbound6(v frameVerdict, dstMAC, p []byte) frameVerdict {
	dst := v.dst.Addr()
	// The operator may allow a private address: the gate decides on TCP.
	opened := v.proto == egress.TCP && egress.Openable(dst) && !dst.Is4In6()
	if rule, denied := egress.AlwaysDenied(dst); denied && !opened {
		v.rule = rule
		if !dst.IsMulticast() {
			v.refuse = p
		}
		return v
	}
	if !f.addressedToUs(dstMAC) {
		return v
	}
	if v.proto != egress.ICMP {
		v.pass = true
		return v
	}
	if v.echo = parseEcho(dst, p, ipv6Header); v.echo == nil || !sum6(p) {
		v.echo, v.rule = nil, egress.RuleProtocol
	}
	return v
}

// isLinkOnly reports whether an ICMPv6 message is about the link itself.
func isLinkOnly(kind byte) bool {
	switch kind {
	case 130, 131, 132, 143: // multicast listeners
		return true
	}
	return kind >= 133 && kind <= 137 // neighbour discovery
}

// checkNDP handles only the request for the gateway's MAC. Other messages
// about the link are dropped without a record.
func (f *frameFilter) checkNDP(dstMAC, srcMAC []byte, src, dst netip.Addr, p []byte) frameVerdict {
	m := p[ipv6Header:]
	fits := header.ICMPv6Type(m[0]) == header.ICMPv6NeighborSolicit && m[1] == 0 && len(m) >= neighborSolicit && p[7] == ndpHops
	if !fits || netip.AddrFrom16([16]byte(m[8:24])) != f.gateway6 || (src != f.guest6 && !isLinkLocal(src)) || !sum6(p) {
		return frameVerdict{}
	}
	gw := f.gateway6.As16()
	group := netip.AddrFrom16([16]byte{0xff, 2, 11: 1, 12: 0xff, 13: gw[13], 14: gw[14], 15: gw[15]})
	groupMAC := []byte{0x33, 0x33, 0xff, gw[13], gw[14], gw[15]}
	if dst == f.gateway6 && bytes.Equal(dstMAC, f.mac) || dst == group && bytes.Equal(dstMAC, groupMAC) {
		return frameVerdict{asks: src, card: [6]byte(srcMAC)}
	}
	return frameVerdict{}
}

// isLinkLocal returns false for IPv4-mapped addresses.
func isLinkLocal(a netip.Addr) bool { return a.Is6() && !a.Is4In6() && a.IsLinkLocalUnicast() }

// sum6 checks the ICMPv6 checksum of a whole packet.
func sum6(p []byte) bool {
	src, dst := netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40]))
	m := p[ipv6Header:]
	pseudo := header.PseudoHeaderChecksum(header.ICMPv6ProtocolNumber, toStack(src), toStack(dst), uint16(len(m)))
	return checksum.Checksum(m, pseudo) == 0xffff
}
