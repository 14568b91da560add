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

func tcpFrom(src netip.Addr, dst netip.AddrPort, sport uint16, flags header.TCPFlags) []byte {
	seg := make(header.TCP, header.TCPMinimumSize)
	seg.Encode(&header.TCPFields{SrcPort: sport, DstPort: dst.Port(), SeqNum: 1000, DataOffset: header.TCPMinimumSize, Flags: flags, WindowSize: 65535})
	sum := header.PseudoHeaderChecksum(header.TCPProtocolNumber, tcpip.AddrFrom4(src.As4()), tcpip.AddrFrom4(dst.Addr().As4()), uint16(len(seg)))
	seg.SetChecksum(^seg.CalculateChecksum(sum))
	return ipFrame(6, src, dst.Addr(), seg)
}

func synFrame(dst netip.AddrPort, sport uint16) []byte {
	return tcpFrom(vnet.DefaultGuest, dst, sport, header.TCPFlagSyn)
}

func udpFrame(dst netip.AddrPort, data []byte) []byte {
	b := make(header.UDP, header.UDPMinimumSize)
	b.Encode(&header.UDPFields{SrcPort: 4000, DstPort: dst.Port(), Length: uint16(header.UDPMinimumSize + len(data))})
	sum := header.PseudoHeaderChecksum(header.UDPProtocolNumber, tcpip.AddrFrom4(vnet.DefaultGuest.As4()), tcpip.AddrFrom4(dst.Addr().As4()), uint16(len(b)+len(data)))
	b.SetChecksum(^b.CalculateChecksum(checksum.Checksum(data, sum)))
	return ipFrame(17, vnet.DefaultGuest, dst.Addr(), append(b, data...))
}

func pingFrame(dst netip.Addr) []byte {
	p := make(header.ICMPv4, header.ICMPv4MinimumSize)
	p.SetType(header.ICMPv4Echo)
	p.SetIdent(7)
	p.SetChecksum(header.ICMPv4Checksum(p, 0))
	return ipFrame(1, vnet.DefaultGuest, dst, p)
}

func arpFrame(srcMAC []byte, op uint16, senderMAC []byte, sender, target netip.Addr) []byte {
	b := append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, srcMAC...)
	b = append(b, 0x08, 0x06, 0, 1, 8, 0, 6, 4)
	b = binary.BigEndian.AppendUint16(b, op)
	b = append(append(b, senderMAC...), sender.AsSlice()...)
	return append(append(b, make([]byte, 6)...), target.AsSlice()...)
}

// isTCPReset tells whether a frame is a reset from an address and port.
func isTCPReset(f []byte, from netip.AddrPort) bool {
	return len(f) >= 54 && f[23] == 6 && netip.AddrFrom4([4]byte(f[26:30])) == from.Addr() &&
		binary.BigEndian.Uint16(f[34:36]) == from.Port() && f[47]&byte(header.TCPFlagRst) != 0
}

func isICMP(f []byte, from netip.Addr, kind header.ICMPv4Type) bool {
	return len(f) >= 42 && f[23] == 1 && netip.AddrFrom4([4]byte(f[26:30])) == from && f[34] == byte(kind)
}
