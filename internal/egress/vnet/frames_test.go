package vnet_test

import (
	"encoding/binary"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
)

// ipFrame is an Ethernet frame with an IPv4 packet from the guest.
func ipFrame(proto byte, src, dst netip.Addr, payload []byte) []byte {
	b := make([]byte, 0, 34+len(payload))
	b = append(b, vnet.DefaultMAC...)
	b = append(b, guestMAC...)
	b = append(b, 0x08, 0x00)
	ip := make(header.IPv4, header.IPv4MinimumSize)
	ip.Encode(&header.IPv4Fields{
		TotalLength: uint16(header.IPv4MinimumSize + len(payload)), TTL: 64, Protocol: proto,
		SrcAddr: tcpip.AddrFrom4(src.As4()), DstAddr: tcpip.AddrFrom4(dst.As4()),
	})
	ip.SetChecksum(^ip.CalculateChecksum())
	return append(append(b, ip...), payload...)
}

// anyFrame is ipFrame or ip6Frame.
func anyFrame(proto byte, src, dst netip.Addr, payload []byte) []byte {
	if dst.Is6() {
		return ip6Frame(proto, src, dst, payload)
	}
	return ipFrame(proto, src, dst, payload)
}

func guestFor(dst netip.Addr) netip.Addr {
	if dst.Is6() {
		return vnet.DefaultGuest6
	}
	return vnet.DefaultGuest
}

func tcpFrom(src netip.Addr, dst netip.AddrPort, sport uint16, flags header.TCPFlags) []byte {
	seg := make(header.TCP, header.TCPMinimumSize)
	seg.Encode(&header.TCPFields{SrcPort: sport, DstPort: dst.Port(), SeqNum: 1000, DataOffset: header.TCPMinimumSize, Flags: flags, WindowSize: 65535})
	sum := header.PseudoHeaderChecksum(header.TCPProtocolNumber, tcpip.AddrFromSlice(src.AsSlice()), tcpip.AddrFromSlice(dst.Addr().AsSlice()), uint16(len(seg)))
	seg.SetChecksum(^seg.CalculateChecksum(sum))
	return anyFrame(6, src, dst.Addr(), seg)
}

func synFrame(dst netip.AddrPort, sport uint16) []byte {
	return tcpFrom(guestFor(dst.Addr()), dst, sport, header.TCPFlagSyn)
}

func udpFrame(dst netip.AddrPort, data []byte) []byte {
	b := make(header.UDP, header.UDPMinimumSize)
	b.Encode(&header.UDPFields{SrcPort: 4000, DstPort: dst.Port(), Length: uint16(header.UDPMinimumSize + len(data))})
	sum := header.PseudoHeaderChecksum(header.UDPProtocolNumber, tcpip.AddrFromSlice(guestFor(dst.Addr()).AsSlice()), tcpip.AddrFromSlice(dst.Addr().AsSlice()), uint16(len(b)+len(data)))
	b.SetChecksum(^b.CalculateChecksum(checksum.Checksum(data, sum)))
	return anyFrame(17, guestFor(dst.Addr()), dst.Addr(), append(b, data...))
}

func pingFrame(dst netip.Addr) []byte {
	const data = "ping"
	if dst.Is6() {
		return ping6Frame(vnet.DefaultGuest6, dst, data)
	}
	p := make(header.ICMPv4, header.ICMPv4MinimumSize, header.ICMPv4MinimumSize+len(data))
	p.SetType(header.ICMPv4Echo)
	p.SetIdent(7)
	p = append(p, data...)
	p.SetChecksum(^checksum.Checksum(p, 0))
	return ipFrame(1, vnet.DefaultGuest, dst, p)
}

func ping6Frame(src, dst netip.Addr, data string) []byte {
	return icmp6Frame(src, dst, 64, append([]byte{128, 0, 0, 0, 0, 7, 0, 1}, data...))
}

// icmp6Frame completes an ICMPv6 message.
func icmp6Frame(src, dst netip.Addr, hops byte, message []byte) []byte {
	sum := header.PseudoHeaderChecksum(header.ICMPv6ProtocolNumber, tcpip.AddrFrom16(src.As16()), tcpip.AddrFrom16(dst.As16()), uint16(len(message)))
	binary.BigEndian.PutUint16(message[2:], ^checksum.Checksum(message, sum))
	f := ip6Frame(58, src, dst, message)
	f[14+7] = hops
	return f
}

// ip6Frame is an Ethernet frame with an IPv6 packet.
func ip6Frame(next byte, src, dst netip.Addr, payload []byte) []byte {
	b := make([]byte, 0, 54+len(payload))
	b = append(b, vnet.DefaultMAC...)
	b = append(b, guestMAC...)
	b = append(b, 0x86, 0xdd, 0x60, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(len(payload)))
	b = append(b, next, 64)
	s, d := src.As16(), dst.As16()
	return append(append(append(b, s[:]...), d[:]...), payload...)
}

func arpFrame(srcMAC []byte, op uint16, senderMAC []byte, sender, target netip.Addr) []byte {
	b := append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, srcMAC...)
	b = append(b, 0x08, 0x06, 0, 1, 8, 0, 6, 4)
	b = binary.BigEndian.AppendUint16(b, op)
	b = append(append(b, senderMAC...), sender.AsSlice()...)
	return append(append(b, make([]byte, 6)...), target.AsSlice()...)
}

// isTCPReset reports whether a frame is a reset from an address and port.
func isTCPReset(f []byte, from netip.AddrPort) bool {
	return len(f) >= 54 && f[23] == 6 && netip.AddrFrom4([4]byte(f[26:30])) == from.Addr() &&
		binary.BigEndian.Uint16(f[34:36]) == from.Port() && f[47]&byte(header.TCPFlagRst) != 0
}

func isICMP(f []byte, from netip.Addr, kind header.ICMPv4Type) bool {
	return len(f) >= 42 && f[23] == 1 && netip.AddrFrom4([4]byte(f[26:30])) == from && f[34] == byte(kind)
}
