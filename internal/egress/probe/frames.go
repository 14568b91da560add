package probe

import (
	"encoding/binary"
	"net/netip"
)

// Ethernet frames for AF_PACKET. The prober sets the MAC addresses: a
// destination of zeros becomes the gateway's, a source of zeros the guest's
// own.

const (
	etherIPv4 = 0x0800
	etherARP  = 0x0806
	etherIPv6 = 0x86dd
	etherVLAN = 0x8100

	protoIPIP   = 4
	protoTCP    = 6
	protoUDP    = 17
	proto6in4   = 41
	protoGRE    = 47
	protoICMPv6 = 58
	protoSCTP   = 132

	framePort = 40000 // the source port of frames
)

var (
	strangeMAC   = []byte{0x02, 0x66, 0x66, 0x66, 0x66, 0x66}
	broadcastMAC = []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	noMAC        = make([]byte, 6)
)

func ether(dst, src []byte, kind uint16, payload []byte) []byte {
	f := append(append([]byte{}, dst...), src...)
	f = binary.BigEndian.AppendUint16(f, kind)
	return append(f, payload...)
}

// frame returns an ordinary frame to the gateway.
func frame(packet []byte) []byte {
	kind := uint16(etherIPv4)
	if packet[0]>>4 == 6 {
		kind = etherIPv6
	}
	return ether(noMAC, noMAC, kind, packet)
}

func sum(b []byte, start uint32) uint16 {
	for ; len(b) > 1; b = b[2:] {
		start += uint32(b[0])<<8 | uint32(b[1])
	}
	if len(b) == 1 {
		start += uint32(b[0]) << 8
	}
	for start > 0xffff {
		start = start>>16 + start&0xffff
	}
	return ^uint16(start)
}

// pseudo returns the sum of the pseudo-header of TCP, UDP and ICMPv6.
func pseudo(src, dst netip.Addr, proto byte, size int) uint32 {
	all := append(append(append([]byte{}, src.AsSlice()...), dst.AsSlice()...), 0, proto)
	return uint32(^sum(all, uint32(size)))
}

// ipv4 returns a packet. flags is the word of flags and fragment offset; the
// length of options is a multiple of four bytes.
func ipv4(src, dst netip.Addr, proto byte, id, flags uint16, options, payload []byte) []byte {
	head := 20 + len(options)
	b := make([]byte, head, head+len(payload))
	b[0], b[8], b[9] = 0x40|byte(head/4), 64, proto
	binary.BigEndian.PutUint16(b[2:], uint16(cap(b)))
	binary.BigEndian.PutUint16(b[4:], id)
	binary.BigEndian.PutUint16(b[6:], flags)
	s, d := src.As4(), dst.As4()
	copy(b[12:], s[:])
	copy(b[16:], d[:])
	copy(b[20:], options)
	binary.BigEndian.PutUint16(b[10:], sum(b, 0))
	return append(b, payload...)
}

func ipv6(src, dst netip.Addr, next byte, payload []byte) []byte {
	b := make([]byte, 40, 40+len(payload))
	b[0], b[6], b[7] = 0x60, next, 64
	binary.BigEndian.PutUint16(b[4:], uint16(len(payload)))
	s, d := src.As16(), dst.As16()
	copy(b[8:], s[:])
	copy(b[24:], d[:])
	return append(b, payload...)
}

// packet returns an IPv4 or IPv6 packet, depending on dst.
func packet(src, dst netip.Addr, proto byte, payload []byte) []byte {
	if dst.Is4() {
		return ipv4(src, dst, proto, 1, 0, nil, payload)
	}
	return ipv6(src, dst, proto, payload)
}

func udp(src, dst netip.Addr, port uint16, payload []byte) []byte {
	b := make([]byte, 8, 8+len(payload))
	binary.BigEndian.PutUint16(b, framePort)
	binary.BigEndian.PutUint16(b[2:], port)
	binary.BigEndian.PutUint16(b[4:], uint16(cap(b)))
	b = append(b, payload...)
	binary.BigEndian.PutUint16(b[6:], sum(b, pseudo(src, dst, protoUDP, len(b))))
	return b
}

// syn returns a TCP connection request.
func syn(src, dst netip.Addr, port uint16) []byte {
	b := make([]byte, 20)
	binary.BigEndian.PutUint16(b, framePort)
	binary.BigEndian.PutUint16(b[2:], port)
	binary.BigEndian.PutUint32(b[4:], 1)
	b[12], b[13] = 5<<4, 0x02
	binary.BigEndian.PutUint16(b[14:], 65535)
	binary.BigEndian.PutUint16(b[16:], sum(b, pseudo(src, dst, protoTCP, len(b))))
	return b
}

// fragments splits an IPv4 payload after the given number of bytes, a multiple
// of eight.
func fragments(src, dst netip.Addr, proto byte, payload []byte, at int) [][]byte {
	const more = 0x2000
	return [][]byte{
		frame(ipv4(src, dst, proto, 7, more, nil, payload[:at])),
		frame(ipv4(src, dst, proto, 7, uint16(at/8), nil, payload[at:])),
	}
}

// extended returns a function that adds one IPv6 extension header before a
// payload.
func extended(kind, next byte, body [7]byte) func([]byte) (byte, []byte) {
	return func(payload []byte) (byte, []byte) {
		return kind, append(append([]byte{next}, body[:]...), payload...)
	}
}

// arpReply returns an ARP reply that ip is at mac.
func arpReply(ip netip.Addr, mac []byte) []byte {
	a := ip.As4()
	b := []byte{0, 1, 8, 0, 6, 4, 0, 2}
	b = append(append(b, mac...), a[:]...)
	b = append(append(b, broadcastMAC...), a[:]...)
	return ether(broadcastMAC, mac, etherARP, b)
}

// advertisement returns an unsolicited NDP neighbour advertisement that ip is
// at mac.
func advertisement(src, ip netip.Addr, mac []byte) []byte {
	dst := netip.MustParseAddr("ff02::1")
	b := make([]byte, 8, 32)
	b[0], b[4] = 136, 0x20 // override
	a := ip.As16()
	b = append(append(b, a[:]...), 2, 1)
	b = append(b, mac...)
	binary.BigEndian.PutUint16(b[2:], sum(b, pseudo(src, dst, protoICMPv6, len(b))))
	p := ipv6(src, dst, protoICMPv6, b)
	p[7] = 255
	return ether([]byte{0x33, 0x33, 0, 0, 0, 1}, mac, etherIPv6, p)
}
