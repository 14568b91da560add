package vnet_test

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
)

func TestFrameFilter(t *testing.T) {
	t.Parallel()
	guest, gw, public := vnet.DefaultGuest, vnet.DefaultGateway, netip.MustParseAddrPort("8.8.8.8:443")
	good := synFrame(public, 1)
	edit := func(f func(b []byte)) []byte {
		b := append([]byte(nil), good...)
		f(b)
		return b
	}
	other := netip.MustParseAddr("10.77.0.9")
	cases := []struct {
		name  string
		frame []byte
		pass  bool
		rule  string
	}{
		{"a SYN to the internet", good, true, ""},
		{"a datagram to the internet", udpFrame(public, nil), true, ""},
		{"a SYN to the gateway", synFrame(at(gw, 8844), 1), true, ""},
		{"a SYN to the LAN is for the stack to refuse", synFrame(netip.MustParseAddrPort("192.168.0.1:80"), 1), true, ""},
		{"a spoofed source", tcpFrom(other, public, 1, header.TCPFlagSyn), false, ""},
		{"the gateway as source", tcpFrom(gw, public, 1, header.TCPFlagSyn), false, ""},
		{"loopback as source", tcpFrom(netip.MustParseAddr("127.0.0.1"), at(gw, 8844), 1, header.TCPFlagSyn), false, ""},
		{"the guest itself as destination", synFrame(at(guest, 1), 1), false, ""},
		{"loopback as destination", synFrame(netip.MustParseAddrPort("127.0.0.1:1"), 1), false, egress.RuleLoopback},
		{"IPv6", edit(func(b []byte) { b[12], b[13] = 0x86, 0xdd }), false, ""},
		{"a VLAN tag", edit(func(b []byte) { b[12], b[13] = 0x81, 0 }), false, ""},
		{"a group address as sender", edit(func(b []byte) { b[6] |= 1 }), false, ""},
		{"another card's address", edit(func(b []byte) { b[5] ^= 1 }), false, ""},
		{"a multicast card address", edit(func(b []byte) { b[0] |= 1 }), false, ""},
		{"IP version 5", edit(func(b []byte) { b[14] = 0x55 }), false, ""},
		{"IP options", edit(func(b []byte) { b[14] = 0x46 }), false, ""},
		{"a header that is too short", edit(func(b []byte) { b[14] = 0x44 }), false, ""},
		{"a length beyond the frame", edit(func(b []byte) { binary.BigEndian.PutUint16(b[16:], 2000) }), false, ""},
		{"a length below the header", edit(func(b []byte) { binary.BigEndian.PutUint16(b[16:], 19) }), false, ""},
		{"a cut header", good[:30], false, ""},
		{"nothing but an Ethernet header", good[:14], false, ""},
		{"SCTP", ipFrame(132, guest, public.Addr(), make([]byte, 12)), false, egress.RuleProtocol},
		{"IP in IP", ipFrame(4, guest, public.Addr(), make([]byte, 40)), false, egress.RuleProtocol},
		{"ARP for the gateway", arpFrame(guestMAC, 1, guestMAC, guest, gw), true, ""},
		{"ARP for another guest", arpFrame(guestMAC, 1, guestMAC, guest, other), false, ""},
		{"ARP in the gateway's name", arpFrame(guestMAC, 2, guestMAC, gw, gw), false, ""},
		{"ARP in another's name", arpFrame(guestMAC, 2, guestMAC, other, gw), false, ""},
		{"ARP with another's card", arpFrame(guestMAC, 2, vnet.DefaultMAC, guest, gw), false, ""},
		{"ARP with an unknown verb", arpFrame(guestMAC, 9, guestMAC, guest, gw), false, ""},
		{"ARP cut short", arpFrame(guestMAC, 1, guestMAC, guest, gw)[:40], false, ""},
	}
	for _, c := range cases {
		if pass, rule, _ := vnet.CheckFrame(c.frame); pass != c.pass || rule != c.rule {
			t.Errorf("%s: pass %v, rule %q", c.name, pass, rule)
		}
	}
}

func TestLinkThatIsNotFrames(t *testing.T) {
	t.Parallel()
	giant := binary.BigEndian.AppendUint32(nil, uint32(vnet.MaxFrame)+1)
	cases := map[string]struct {
		bytes []byte
		want  error
	}{
		"a giant length":     {append(giant, make([]byte, 100)...), vnet.ErrFrame},
		"text":               {[]byte("GET / HTTP/1.1\r\n\r\n"), vnet.ErrFrame},
		"cut in the length":  {[]byte{0, 0}, vnet.ErrFrame},
		"cut in the frame":   {[]byte{0, 0, 0, 60, 1, 2, 3}, vnet.ErrFrame},
		"cut in an oversize": {[]byte{0, 1, 0, 60, 1, 2, 3}, io.EOF},
		"a clean end":        {nil, io.EOF},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ours, theirs := linkPair(t)
			n, err := vnet.New(vnet.Config{Link: ours, Policy: policy(t, agentlab.NetworkNAT)})
			if err != nil {
				t.Fatal(err)
			}
			_, _ = theirs.Write(c.bytes)
			_ = theirs.Close()
			if err := n.Run(t.Context()); !errors.Is(err, c.want) {
				t.Errorf("Run returns %v, want %v", err, c.want)
			}
		})
	}
}

func TestOddSizesAreSkipped(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, size := range []int{0, 1, 13, vnet.DefaultMTU + 15, vnet.MaxFrame} {
		l.guest.send(t, make([]byte, size))
	}
	l.guest.send(t, pingFrame(vnet.DefaultGateway))
	l.guest.sees(t, "an echo reply", func(f []byte) bool { return isICMP(f, vnet.DefaultGateway, header.ICMPv4EchoReply) })
	if s := l.Stats(); s.FramesDropped != 5 {
		t.Errorf("dropped %d frames of 5", s.FramesDropped)
	}
}

// A guest that scans the whole internet gets its limits and leaves nothing.
func TestSynFlood(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(c *vnet.Config) {
		c.Limits.TCPFlows = 32
		c.Dialer = dialerFunc(func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done() // no host of the internet answers
			return nil, ctx.Err()
		})
	})
	before := runtime.NumGoroutine()
	const packets = 20000
	for i := range packets {
		dst := netip.AddrPortFrom(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i), 1}), 80)
		l.guest.send(t, synFrame(dst, uint16(i)))
	}
	eventually(t, "the flood is read", func() bool { return l.Stats().FramesIn >= packets })
	if s := l.Stats(); s.TCPFlows > 32 {
		t.Errorf("%d flows", s.TCPFlows)
	}
	eventually(t, "the refused ones are gone", func() bool { return runtime.NumGoroutine() < before+200 })
	l.Close()
	if s := l.Stats(); s.TCPFlows != 0 {
		t.Errorf("left over: %+v", s)
	}
}

func TestAuditIsBoundedAndCounts(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(c *vnet.Config) { c.Limits.AuditRate = 1 })
	lan := netip.MustParseAddr("192.168.1.1")
	const packets = 500
	for i := range packets {
		l.guest.send(t, udpFrame(at(lan, uint16(i+1)), nil))
	}
	told := func() int {
		l.audit.mu.Lock()
		defer l.audit.mu.Unlock()
		return len(l.audit.all)
	}
	eventually(t, "the flood is read, and a decision recorded", func() bool { return l.Stats().FramesIn >= packets && told() > 0 })
	l.guest.send(t, udpFrame(at(lan, 9999), nil))
	if n := told(); n > 50 {
		t.Errorf("%d decisions were recorded", n)
	}
	eventually(t, "later decisions tell how many were left out", func() bool {
		l.guest.send(t, udpFrame(at(lan, 9999), nil))
		dropped := 0
		l.audit.find(func(d decision) bool { dropped += d.Dropped; return false })
		return dropped > 400
	})
}

// Fragments are put together before anything is decided, so that a port
// cannot hide in a later one.
func TestFragments(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	lan := netip.MustParseAddrPort("192.168.1.1:80")
	whole := udpFrame(lan, make([]byte, 64))
	fragment := func(from, to, offset int, more bool) []byte {
		b := append([]byte(nil), whole[:34]...)
		b = append(b, whole[34+from:34+to]...)
		ip := header.IPv4(b[14:])
		ip.SetTotalLength(uint16(20 + to - from))
		binary.BigEndian.PutUint16(ip[4:], 77)
		flags := uint16(offset / 8)
		if more {
			flags |= 0x2000
		}
		binary.BigEndian.PutUint16(ip[6:], flags)
		ip.SetChecksum(0)
		ip.SetChecksum(^ip.CalculateChecksum())
		return b
	}
	l.guest.send(t, fragment(0, 8, 0, true))
	l.guest.send(t, fragment(8, 72, 8, false))
	d := l.audit.wait(t, "the datagram", func(d decision) bool { return d.Addr == lan })
	if d.Allow || d.Rule != egress.RulePrivate {
		t.Errorf("recorded as %+v", d)
	}
	// Fragments that never become whole are held within the stack's bound.
	for id := range 3000 {
		f := fragment(0, 8, 0, true)
		ip := header.IPv4(f[14:])
		binary.BigEndian.PutUint16(ip[4:], uint16(id))
		ip.SetChecksum(0)
		ip.SetChecksum(^ip.CalculateChecksum())
		l.guest.send(t, f)
	}
	l.guest.send(t, pingFrame(vnet.DefaultGateway))
	l.guest.sees(t, "an echo reply", func(f []byte) bool { return isICMP(f, vnet.DefaultGateway, header.ICMPv4EchoReply) })
}

func FuzzFrameFilter(f *testing.F) {
	f.Add(synFrame(netip.MustParseAddrPort("8.8.8.8:443"), 1))
	f.Add(udpFrame(gateway(53), []byte("x")))
	f.Add(pingFrame(vnet.DefaultGateway))
	f.Add(arpFrame(guestMAC, 1, guestMAC, vnet.DefaultGuest, vnet.DefaultGateway))
	f.Add(synFrame(at(echo6, 443), 1))
	f.Add(pingFrame(echo6))
	for _, d := range dropped6() {
		f.Add(d.frame)
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		if len(frame) < 14 {
			return
		}
		pass, rule, _ := vnet.CheckFrame(frame)
		if !pass {
			return
		}
		if rule != "" {
			t.Fatalf("passed with rule %s", rule)
		}
		switch kind := binary.BigEndian.Uint16(frame[12:]); kind {
		case 0x0800:
			if src := netip.AddrFrom4([4]byte(frame[26:30])); src != vnet.DefaultGuest {
				t.Fatalf("a packet from %s passed", src)
			}
		case 0x86dd:
			if src := netip.AddrFrom16([16]byte(frame[22:38])); src != vnet.DefaultGuest6 {
				t.Fatalf("a packet from %s passed", src)
			}
			if next := frame[20]; next != 6 && next != 17 && (next != 58 || frame[54] != byte(header.ICMPv6EchoRequest)) {
				t.Fatalf("a packet with next header %d passed", next)
			}
			dst := netip.AddrFrom16([16]byte(frame[38:54]))
			if _, denied := egress.AlwaysDenied(dst); denied && dst != vnet.DefaultGateway6 {
				t.Fatalf("a packet to %s passed", dst)
			}
		case 0x0806:
			if sender := netip.AddrFrom4([4]byte(frame[28:32])); sender != vnet.DefaultGuest {
				t.Fatalf("ARP in the name of %s passed", sender)
			}
		default:
			t.Fatalf("a frame of type %#x passed", kind)
		}
	})
}

// FuzzLink feeds the whole network with what a guest could make of its link:
// it must not crash, and must end when the link does.
func FuzzLink(f *testing.F) {
	f.Add(framed(synFrame(netip.MustParseAddrPort("8.8.8.8:443"), 1)))
	f.Add(append(framed(synFrame(gateway(53), 1)), framed(tcpFrom(vnet.DefaultGuest, gateway(53), 1, header.TCPFlagAck))...))
	f.Add(framed(udpFrame(gateway(53), []byte("\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x00\x00\x01\x00\x01"))))
	f.Add(framed(pingFrame(vnet.DefaultGateway)))
	f.Add(framed(arpFrame(guestMAC, 1, guestMAC, vnet.DefaultGuest, vnet.DefaultGateway)))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Add(framed(synFrame(at(echo6, 443), 1)))
	f.Add(framed(udpFrame(gateway6(53), []byte("\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x00\x00\x1c\x00\x01"))))
	f.Add(append(framed(pingFrame(vnet.DefaultGateway6)), framed(pingFrame(echo6))...))
	f.Add(framed(solicit(vnet.DefaultGuest6, vnet.DefaultGateway6, vnet.DefaultGateway6, 255)))
	f.Fuzz(func(t *testing.T, stream []byte) {
		n, err := vnet.New(vnet.Config{
			Link:   &canned{in: stream},
			Policy: policy(t, agentlab.NetworkNAT),
			Dialer: dialerFunc(func(_ context.Context, _, addr string) (net.Conn, error) {
				if rule, denied := egress.AlwaysDenied(netip.MustParseAddrPort(addr).Addr()); denied && !netip.MustParseAddrPort(addr).Addr().IsLoopback() {
					t.Errorf("%s was dialled in spite of %s", addr, rule)
				}
				return nil, errors.New("no")
			}),
			Resolver: refusing{},
		})
		if err != nil {
			t.Fatal(err)
		}
		runToEnd(t, n)
	})
}

// runToEnd runs a network whose link ends by itself. The fuzzer does not see
// a hang, so that is made a crash.
func runToEnd(t *testing.T, n *vnet.Network) {
	t.Helper()
	hung := time.AfterFunc(patience, func() { panic("the network does not end with its link") })
	defer hung.Stop()
	if err := n.Run(t.Context()); err == nil {
		t.Error("Run returned nil at the end of the link")
	}
}

// canned is a link that holds what the guest sends and takes all we send.
type canned struct{ in []byte }

func (c *canned) Read(p []byte) (int, error) {
	if len(c.in) == 0 {
		return 0, io.EOF
	}
	n := copy(p, c.in)
	c.in = c.in[n:]
	return n, nil
}

func (c *canned) Write(p []byte) (int, error) { return len(p), nil }
func (c *canned) Close() error                { return nil }

// FuzzPackets reads its input as a list of packets and gives each a right
// checksum, so that they get as deep into the stack as a guest's can.
func FuzzPackets(f *testing.F) {
	f.Add([]byte("\x00\x10\x00\x50\x01\x01\x00\x00\x00\x01\x00\x00\x00\x00\x50\x02\xff\xff\x00\x00"))
	f.Add([]byte("\x04\x0c\x22\x8c\x01\x01\x00\x00\x00\x01\x00\x00\x01\x08\x03\x30"))
	f.Add([]byte("\x09\x08\x00\x00\x00\x00\x00\x00\x00\x00"))
	f.Add([]byte("\x84\x10\x00\x50\x01\x01\x00\x00\x00\x01\x00\x00\x00\x00\x50\x02\xff\xff\x00\x00"))
	f.Add([]byte("\x85\x08\x80\x00\x00\x00\x00\x07\x00\x01\x81\x18\x87\x00\x00\x00\x00\x00\x00\x00\xfd\x77\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01"))
	f.Fuzz(func(t *testing.T, in []byte) {
		var stream []byte
		for len(in) > 2 && len(stream) < 64<<10 {
			kind, size := in[0], min(int(in[1]), len(in)-2)
			stream = append(stream, framed(fuzzPacket(kind, in[2:2+size]))...)
			in = in[2+size:]
		}
		n, err := vnet.New(vnet.Config{
			Link:     &canned{in: stream},
			Policy:   policy(t, agentlab.NetworkNAT),
			Dialer:   dialerFunc(firehoseOnce),
			Resolver: refusing{},
			Services: map[uint16]func(net.Conn){8844: func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }},
		})
		if err != nil {
			t.Fatal(err)
		}
		runToEnd(t, n)
		if s := n.Stats(); s.TCPFlows+s.UDPFlows+s.ServiceFlows+s.Pings != 0 {
			t.Errorf("left over: %+v", s)
		}
	})
}

func firehoseOnce(context.Context, string, string) (net.Conn, error) {
	near, far := net.Pipe()
	_ = far.Close()
	return near, nil
}

// fuzzPacket makes a packet whose kind says protocol, target and port, and
// whose body is the transport header and data.
func fuzzPacket(kind byte, body []byte) []byte {
	if kind&0x80 != 0 {
		return fuzzPacket6(kind, body)
	}
	dst := [...]netip.Addr{vnet.DefaultGateway, netip.MustParseAddr("11.1.1.1"), netip.MustParseAddr("192.168.1.1"), vnet.DefaultGateway}[kind>>2&3]
	port := [...]uint16{8844, 53, 80, 443}[kind>>4&3]
	b := append([]byte(nil), body...)
	for len(b) < header.TCPMinimumSize {
		b = append(b, 0)
	}
	binary.BigEndian.PutUint16(b[2:], port)
	sum := func(proto tcpip.TransportProtocolNumber) uint16 {
		pseudo := header.PseudoHeaderChecksum(proto, tcpip.AddrFrom4(vnet.DefaultGuest.As4()), tcpip.AddrFrom4(dst.As4()), uint16(len(b)))
		return ^checksum.Checksum(b, pseudo)
	}
	switch kind & 3 {
	case 0:
		binary.BigEndian.PutUint16(b[16:], 0)
		binary.BigEndian.PutUint16(b[16:], sum(header.TCPProtocolNumber))
		return ipFrame(6, vnet.DefaultGuest, dst, b)
	case 1:
		binary.BigEndian.PutUint16(b[2:], 0)
		binary.BigEndian.PutUint16(b[2:], ^checksum.Checksum(b, 0))
		return ipFrame(1, vnet.DefaultGuest, dst, b)
	case 2:
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)))
		binary.BigEndian.PutUint16(b[6:], 0)
		binary.BigEndian.PutUint16(b[6:], sum(header.UDPProtocolNumber))
		return ipFrame(17, vnet.DefaultGuest, dst, b)
	default:
		frame := ipFrame(body0(body), vnet.DefaultGuest, dst, b)
		binary.BigEndian.PutUint16(frame[20:], binary.BigEndian.Uint16(b)) // fragment flags and offset
		ip := header.IPv4(frame[14:])
		ip.SetChecksum(0)
		ip.SetChecksum(^ip.CalculateChecksum())
		return frame
	}
}

// fuzzPacket6 is fuzzPacket for IPv6.
func fuzzPacket6(kind byte, body []byte) []byte {
	dst := [...]netip.Addr{vnet.DefaultGateway6, echo6, netip.MustParseAddr("fd12::1"), netip.MustParseAddr("ff02::1:ff00:1")}[kind>>2&3]
	port := [...]uint16{8844, 53, 80, 443}[kind>>4&3]
	next := [...]byte{6, 58, 17, body0(body)}[kind&3]
	b := append([]byte(nil), body...)
	for len(b) < header.TCPMinimumSize {
		b = append(b, 0)
	}
	place := map[byte]int{6: 16, 17: 6, 58: 2}[next] // of the checksum
	if next != 58 {
		binary.BigEndian.PutUint16(b[2:], port)
	}
	if next == 17 {
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)))
	}
	if place > 0 {
		binary.BigEndian.PutUint16(b[place:], 0)
		pseudo := header.PseudoHeaderChecksum(tcpip.TransportProtocolNumber(next), tcpip.AddrFrom16(vnet.DefaultGuest6.As16()), tcpip.AddrFrom16(dst.As16()), uint16(len(b)))
		binary.BigEndian.PutUint16(b[place:], ^checksum.Checksum(b, pseudo))
	}
	f := ip6Frame(next, vnet.DefaultGuest6, dst, b)
	f[21] = 255
	return f
}

func body0(b []byte) byte {
	if len(b) == 0 {
		return 6
	}
	return [...]byte{6, 17, 1, b[0]}[b[0]&3]
}
