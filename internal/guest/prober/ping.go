package prober

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"net"
	"net/netip"
	"time"
)

const echoID = 0xa91a

// ping sends an ICMP echo and waits for its reply. It needs root.
func (p *prober) ping(ctx context.Context, a *attempt) error {
	target, err := netip.ParseAddr(a.host)
	if err != nil {
		return err
	}
	network, request, reply := "ip4:icmp", byte(8), byte(0)
	if target.Is6() {
		network, request, reply = "ip6:ipv6-icmp", 128, 129
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, a.host)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	// The reply to an earlier probe of the same address may still arrive.
	var seq [2]byte
	_, _ = rand.Read(seq[:]) // never fails
	m := append([]byte{request, 0, 0, 0, echoID >> 8, echoID & 0xff, seq[0], seq[1]}, probeText...)
	if target.Is4() { // the kernel does it for IPv6
		binary.BigEndian.PutUint16(m[2:], checksum(m))
	}
	if _, err := conn.Write(m); err != nil {
		return err
	}
	buf := make([]byte, 2048)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return err
		}
		b := buf[:n]
		if target.Is4() && n >= 20 && b[0]>>4 == 4 { // the kernel gives the IPv4 header too
			b = b[min(n, int(b[0]&0x0f)*4):]
		}
		if len(b) >= 8 && b[0] == reply && binary.BigEndian.Uint16(b[4:]) == echoID && b[6] == seq[0] && b[7] == seq[1] {
			return a.received([]byte("echo reply"))
		}
	}
}

func checksum(b []byte) uint16 {
	var s uint32
	for ; len(b) > 1; b = b[2:] {
		s += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		s += uint32(b[0]) << 8
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return ^uint16(s)
}
