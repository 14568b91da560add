package probe

import (
	"net/netip"
	"strconv"
)

func itoa(n uint16) string { return strconv.Itoa(int(n)) }

var payload = []byte("AGENTLAB-PROBE\r\n\r\n")

// frames adds the rows that need whole Ethernet frames, which a guest's kernel
// would not send but a hostile root user can.
func (t *table) frames() {
	if !t.env.Guest4.IsValid() {
		return
	}
	t.framesTo("loopback-frame", "loopback addresses on the wire reach nothing of the host", ruleLoopback, "127.0.0.1", "127.1.2.3")
	t.framesTo("unspecified-frame", "0.0.0.0/8 on the wire reaches nothing", ruleUnspecified, "0.0.0.0", "0.1.2.3")
	t.framesTo("reserved-frame", "240.0.0.0/4 on the wire reaches nothing", ruleReserved, "240.0.0.1")
	t.framesTo("neighbour-frame", "a frame for another sandbox reaches nothing", rulePrivate, t.neighbour().String())
	t.framesTo("loopback6-frame", "the IPv6 loopback address on the wire reaches nothing", ruleLoopback, "::1")
	t.framesTo("mapped-frame", "an IPv4-mapped IPv6 address on the wire hides nothing", rulePrivate, "::ffff:10.1.2.3")
	t.framesTo("compatible-frame", "an IPv4-compatible IPv6 address on the wire hides nothing", rulePrivate, "::10.1.2.3")
	t.framesTo("linklocal6-frame", "an IPv6 link-local address reaches nothing", ruleLinkLocal, "fe80::1234")
	t.framesTo("multicast6-frame", "IPv6 multicast goes nowhere", ruleMulticast, "ff02::fb", "ff05::2")
	t.framesTo("unspecified6-frame", "the unspecified IPv6 address reaches nothing", ruleUnspecified, "::")
	t.spoofed()
	t.fragmented()
	t.headers()
	t.claims()
}

func (t *table) neighbour() netip.Addr {
	if t.env.Neighbour4.IsValid() {
		return t.env.Neighbour4
	}
	return t.env.Guest4.Next()
}

// source returns the guest's own address of the family of dst.
func (t *table) source(dst netip.Addr) netip.Addr {
	switch {
	case dst.Is4():
		return t.env.Guest4
	case t.env.Guest6.IsValid():
		return t.env.Guest6
	}
	return netip.MustParseAddr("fe80::2")
}

// framesTo adds a row that sends a TCP and a UDP packet to each address.
func (t *table) framesTo(id, shows, rule string, targets ...string) {
	c := Check{ID: id, Shows: shows, Want: Closed, Rule: rule}
	var attempts []attempt
	for _, s := range targets {
		dst := netip.MustParseAddr(s)
		src := t.source(dst)
		c.IPv6 = dst.Is6()
		attempts = append(attempts,
			raw("tcp "+at(dst, 8844), frame(packet(src, dst, protoTCP, syn(src, dst, 8844))), Trace{Proto: TCP, Addr: dst, Port: 8844}),
			raw("udp "+at(dst, 4001), frame(packet(src, dst, protoUDP, udp(src, dst, 4001, payload))), Trace{Proto: UDP, Addr: dst, Port: 4001}))
	}
	t.add(c, attempts...)
}

// outside returns a public address that the policy allows, if there is one, so
// that only the fault in the frame can be the reason for a denial. Each row
// uses a separate port.
func (t *table) outside() netip.Addr {
	if a := t.tgt.Datagram.Addr(); a.IsValid() {
		return a
	}
	return t.tgt.StrangerAddr
}

// spoofed adds packets with the source of another machine.
func (t *table) spoofed() {
	dst := t.outside()
	if !dst.IsValid() {
		return
	}
	send := func(id, shows string, port uint16, wrap func(p []byte) []byte, sources ...netip.Addr) {
		var attempts []attempt
		for i, src := range sources {
			if !src.IsValid() {
				continue
			}
			p := port + uint16(i)
			attempts = append(attempts,
				raw("udp from "+src.String(), wrap(packet(src, dst, protoUDP, udp(src, dst, p, payload))), Trace{Proto: UDP, Addr: dst, Port: p}),
				raw("tcp from "+src.String(), wrap(packet(src, dst, protoTCP, syn(src, dst, p))), Trace{Proto: TCP, Addr: dst, Port: p}))
		}
		t.add(Check{ID: id, Shows: shows, Want: Closed}, attempts...)
	}
	send("spoof-source", "a packet from an address that is not the guest's goes nowhere", 4100, frame,
		t.neighbour(), t.env.Gateway4, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.168.1.77"), netip.MustParseAddr("0.0.0.0"))
	group := func(p []byte) []byte { return ether(noMAC, []byte{0x01, 0, 0x5e, 0, 0, 1}, etherIPv4, p) }
	send("spoof-group", "a frame from a group card goes nowhere", 4140, group, t.env.Guest4)
	if t.env.Cards {
		other := func(p []byte) []byte { return ether(noMAC, strangeMAC, etherIPv4, p) }
		send("spoof-card", "a frame from a card that is not the guest's goes nowhere", 4145, other, t.env.Guest4)
	}
	vlan := func(p []byte) []byte {
		return ether(noMAC, noMAC, etherVLAN, append([]byte{0, 42, etherIPv4 >> 8, etherIPv4 & 0xff}, p...))
	}
	send("vlan", "a frame with a VLAN tag goes nowhere", 4150, vlan, t.env.Guest4)
	if t.tgt.Stranger6.IsValid() {
		dst = t.tgt.Stranger6
		send("spoof-source6", "an IPv6 packet from an address that is not the guest's goes nowhere", 4160, frame,
			netip.MustParseAddr("fd12:3456::77"), netip.MustParseAddr("fe80::77"), netip.MustParseAddr("2620:4f:8000::77"))
	}
}

// fragmented adds fragmented packets to forbidden addresses, which pass a
// filter that checks only first fragments or only ports.
func (t *table) fragmented() {
	src, lan := t.env.Guest4, netip.MustParseAddr("10.1.2.5")
	var attempts []attempt
	add := func(what string, proto byte, tr Trace, body []byte, cut int) {
		for _, f := range fragments(src, lan, proto, body, cut) {
			attempts = append(attempts, raw(what, f, tr))
		}
	}
	add("udp in two pieces", protoUDP, Trace{Proto: UDP, Addr: lan, Port: 4200}, udp(src, lan, 4200, payload), 16)
	add("udp, its header alone", protoUDP, Trace{Proto: UDP, Addr: lan, Port: 4201}, udp(src, lan, 4201, payload), 8)
	add("tcp, its ports alone", protoTCP, Trace{Proto: TCP, Addr: lan, Port: 4202}, syn(src, lan, 4202), 8)
	t.add(Check{ID: "fragments", Shows: "a packet in fragments does not reach a forbidden address", Want: Closed}, attempts...)

	// The second fragment overlaps the first and has another port, which
	// only the overlapping part contains.
	if gw := t.env.Gateway4; gw.IsValid() {
		body := udp(src, gw, 53, payload)
		over := udp(src, gw, 4204, payload)
		one := frame(ipv4(src, gw, protoUDP, 9, 0x2000, nil, body[:16]))
		two := frame(ipv4(src, gw, protoUDP, 9, 0, nil, over))
		tr := Trace{Proto: UDP, Addr: gw, Port: 4204}
		t.add(Check{ID: "fragments-overlap", Shows: "overlapping fragments do not smuggle a port", Want: Closed},
			raw("udp over itself", one, tr), raw("udp over itself", two, tr))
	}
}

// headers adds packets with headers that request another route.
func (t *table) headers() {
	src, lan := t.env.Guest4, netip.MustParseAddr("10.1.2.6")
	if dst := t.outside(); dst.IsValid() {
		h := lan.As4()
		for i, kind := range []struct {
			name string
			code byte
		}{{"loose", 131}, {"strict", 137}} {
			port := 4300 + uint16(i)
			opt := append([]byte{kind.code, 7, 4}, append(h[:], 0)...)
			t.add(Check{ID: "source-route-" + kind.name, Shows: "a " + kind.name + " source route is not followed", Want: Closed},
				raw("udp by way of "+lan.String(), frame(ipv4(src, dst, protoUDP, 3, 0, opt, udp(src, dst, port, payload))), Trace{Proto: UDP, Addr: dst, Port: port}))
		}
		inner := ipv4(src, lan, protoUDP, 4, 0, nil, udp(src, lan, 4310, payload))
		var attempts []attempt
		for _, proto := range []byte{protoIPIP, protoGRE, proto6in4, protoSCTP, 50, 89, 112} {
			name := "ip-" + strconv.Itoa(int(proto))
			attempts = append(attempts, raw(name, frame(ipv4(src, dst, proto, 5, 0, nil, inner)), Trace{Proto: name, Addr: dst}))
		}
		t.add(Check{ID: "protocols", Shows: "only TCP, UDP and ICMP are carried: no tunnel, no other protocol", Want: Closed, Rule: ruleProtocol}, attempts...)
	}
	if dst := t.tgt.Stranger6; dst.IsValid() {
		src := t.source(dst)
		var attempts []attempt
		for i, h := range []struct {
			name string
			kind byte
			body [7]byte
		}{
			{"hop-by-hop", 0, [7]byte{0, 1, 4}}, {"routing", 43, [7]byte{0, 0, 1}}, {"fragment", 44, [7]byte{0, 0, 0, 0, 0, 0, 9}}, {"destination options", 60, [7]byte{0, 1, 4}},
		} {
			port := 4320 + uint16(i)
			next, body := extended(h.kind, protoUDP, h.body)(udp(src, dst, port, payload))
			attempts = append(attempts, raw(h.name, frame(ipv6(src, dst, next, body)), Trace{Proto: UDP, Addr: dst, Port: port}))
		}
		t.add(Check{ID: "extension-headers", Shows: "IPv6 extension headers carry nothing past the filter", Want: Closed}, attempts...)
	}
}

// claims adds false ARP and neighbour messages about others on the guest's
// link. The other rows of the same run show that they have no effect.
func (t *table) claims() {
	if gw := t.env.Gateway4; gw.IsValid() {
		t.add(Check{ID: "arp-gateway", Shows: "claiming to be the gateway redirects no other sandbox's traffic", Want: Closed},
			raw("arp for the gateway", arpReply(gw, strangeMAC), Trace{Proto: "arp"}), raw("arp for a neighbour", arpReply(t.neighbour(), strangeMAC), Trace{Proto: "arp"}))
	}
	if gw := t.env.Gateway6; gw.IsValid() {
		t.add(Check{ID: "ndp-gateway", Shows: "claiming to be the IPv6 gateway redirects no other sandbox's traffic", Want: Closed},
			raw("advertisement for the gateway", advertisement(t.source(gw), gw, strangeMAC), Trace{Proto: "ndp"}))
	}
}
