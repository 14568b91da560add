package vnet_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/miekg/dns"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
)

func gateway6(port uint16) netip.AddrPort { return at(vnet.DefaultGateway6, port) }

func TestIPv6CarriesTCPAndUDP(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(c *vnet.Config) {
		c.Services = map[uint16]func(net.Conn){8844: func(c net.Conn) { _, _ = io.WriteString(c, "controller") }}
	})
	l.net.SetName("echo6.test", echo6)
	l.net.Echo("echo6.test")
	payload := bytes.Repeat([]byte("six"), 1<<20)
	c := l.guest.mustTCP(t, at(echo6, 7)) // neighbour discovery included
	go func() {
		_, _ = c.Write(payload)
		_ = c.CloseWrite()
	}()
	if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, payload) {
		t.Errorf("%d bytes came back, %v", len(got), err)
	}
	u := l.guest.udp(t, at(echo6, 7))
	if _, err := u.Write([]byte("datagram")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 100)
	if n, err := u.Read(buf); err != nil || string(buf[:n]) != "datagram" {
		t.Errorf("%q came back, %v", buf[:n], err)
	}
	if text, err := io.ReadAll(l.guest.mustTCP(t, gateway6(8844))); err != nil || string(text) != "controller" {
		t.Errorf("the controller says %q, %v", text, err)
	}
	q := l.guest.udp(t, gateway6(53))
	wire, _ := new(dns.Msg).SetQuestion("echo6.test.", dns.TypeAAAA).Pack()
	if _, err := q.Write(wire); err != nil {
		t.Fatal(err)
	}
	reply := new(dns.Msg)
	n, err := q.Read(buf)
	if err != nil || reply.Unpack(buf[:n]) != nil || len(reply.Answer) != 1 {
		t.Errorf("the gateway's DNS: %v, %v", reply, err)
	}
	d := l.audit.wait(t, "the flow", func(d decision) bool { return d.Proto == egress.TCP && d.Addr == at(echo6, 7) })
	if !d.Allow || d.Rule != egress.RuleNAT {
		t.Errorf("recorded as %+v", d)
	}
}

// probes6 are IPv6 targets that no guest may reach in any mode.
var probes6 = []struct{ target, rule string }{
	{"[::1]:8844", egress.RuleLoopback},
	{"[::]:80", egress.RuleUnspecified},
	{"[::ffff:127.0.0.1]:80", egress.RuleLoopback},
	{"[::ffff:10.0.0.1]:80", egress.RulePrivate},
	{"[::ffff:169.254.169.254]:80", egress.RuleMetadata},
	{"[::10.0.0.1]:80", egress.RulePrivate},
	{"[64:ff9b::10.0.0.1]:80", egress.RulePrivate},
	{"[2002:a00:1::1]:80", egress.RulePrivate},
	{"[fd77::3]:80", egress.RuleULA}, // where a neighbour would be
	{"[fd12:3456::1]:22", egress.RuleULA},
	{"[fd7a:115c:a1e0::1]:443", egress.RuleTailnet},
	{"[fd00:ec2::254]:80", egress.RuleMetadata},
	{"[fe80::1]:80", egress.RuleLinkLocal},
	{"[fec0::1]:80", egress.RuleSiteLocal},
	{"[ff02::1]:5353", egress.RuleMulticast},
	{"[ff0e::1]:80", egress.RuleMulticast},
	{"[2001:db8::1]:80", egress.RuleDocumentation},
	{"[2001:4860:4860::8888]:53", egress.RuleForeignDNS},
	{"[fd77::1]:22", egress.RuleGateway},
}

func TestIPv6ProbesReachNothing(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{agentlab.NetworkNAT, agentlab.NetworkAllowlist, agentlab.NetworkOff} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, func(c *vnet.Config) { c.Policy = policy(t, mode) })
			for i, p := range probes6 {
				target := netip.MustParseAddrPort(p.target)
				plain := at(target.Addr().Unmap(), target.Port())
				for proto, frame := range map[egress.Proto][]byte{
					egress.TCP: synFrame(target, uint16(2000+i)), egress.UDP: udpFrame(target, []byte("probe")),
				} {
					l.guest.send(t, frame)
					d := l.audit.wait(t, fmt.Sprintf("%s %s", proto, target), func(d decision) bool {
						return d.Proto == proto && d.Addr == plain
					})
					if d.Allow || d.Rule != p.rule {
						t.Errorf("%s %s: %+v, want rule %s", proto, target, d, p.rule)
					}
				}
			}
			if dials := l.net.Dials(); len(dials) > 0 {
				t.Errorf("dialled: %v", dials)
			}
			if s := l.Stats(); s.TCPFlows+s.UDPFlows+s.ServiceFlows+s.Pings != 0 {
				t.Errorf("flows were opened: %+v", s)
			}
		})
	}
}

// solicit asks for the card of target.
func solicit(src, dst, target netip.Addr, hops byte) []byte {
	m := make([]byte, 24, 32)
	m[0] = byte(header.ICMPv6NeighborSolicit)
	a := target.As16()
	copy(m[8:], a[:])
	m = append(m, 1, 1)
	m = append(m, guestMAC...)
	return icmp6Frame(src, dst, hops, m)
}

func TestNeighborDiscovery(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	own := netip.MustParseAddr("fe80::5054:ff:fe12:3456")
	for _, src := range []netip.Addr{vnet.DefaultGuest6, own} {
		l.guest.send(t, solicit(src, vnet.DefaultGateway6, vnet.DefaultGateway6, 255))
		l.guest.sees(t, "an advertisement to "+src.String(), func(f []byte) bool {
			return len(f) == 86 && f[54] == byte(header.ICMPv6NeighborAdvert) && bytes.Equal(f[:6], guestMAC) &&
				netip.AddrFrom16([16]byte(f[38:54])) == src && bytes.Equal(f[80:86], vnet.DefaultMAC)
		})
	}
}

// dropped6 are IPv6 frames that go nowhere, with the rule that is recorded.
func dropped6() map[string]struct {
	frame []byte
	rule  string
} {
	type drop = struct {
		frame []byte
		rule  string
	}
	far := netip.MustParseAddrPort("[2620:4f:8000::7]:443")
	syn := synFrame(far, 4000)
	ext := func(next byte) []byte { // an extension header before the segment
		body := append([]byte{6, 0, 1, 4, 0, 0, 0, 0}, syn[54:]...)
		return ip6Frame(next, vnet.DefaultGuest6, far.Addr(), body)
	}
	spoofed := func(src string) []byte { return tcpFrom(netip.MustParseAddr(src), far, 1, header.TCPFlagSyn) }
	short := bytes.Clone(syn)
	binary.BigEndian.PutUint16(short[18:], uint16(len(syn))) // longer than the frame
	jumbo := bytes.Clone(syn)
	binary.BigEndian.PutUint16(jumbo[18:], 0)
	version := bytes.Clone(syn)
	version[14] = 0x45
	advert := make([]byte, 24)
	advert[0] = byte(header.ICMPv6NeighborAdvert)
	redirect := make([]byte, 40)
	redirect[0] = byte(header.ICMPv6RedirectMsg)
	lan, other := netip.MustParseAddr("fe80::1"), netip.MustParseAddr("fd77::3")
	return map[string]drop{
		"a spoofed public source":        {spoofed("2620:4f:8000::9"), ""},
		"a spoofed neighbour":            {spoofed("fd77::3"), ""},
		"the gateway's own address":      {spoofed("fd77::1"), ""},
		"a link-local source":            {spoofed("fe80::1"), ""},
		"a mapped source":                {spoofed("::ffff:10.77.0.2"), ""},
		"hop-by-hop options":             {ext(0), egress.RuleProtocol},
		"a routing header":               {ext(43), egress.RuleProtocol},
		"a fragment":                     {ext(44), egress.RuleProtocol},
		"destination options":            {ext(60), egress.RuleProtocol},
		"IPsec":                          {ext(51), egress.RuleProtocol},
		"no next header":                 {ext(59), egress.RuleProtocol},
		"IPv4 in IPv6":                   {ext(4), egress.RuleProtocol},
		"a length beyond the frame":      {short, ""},
		"a jumbogram":                    {jumbo, ""},
		"another version":                {version, ""},
		"a cut header":                   {syn[:50], ""},
		"an advertisement":               {icmp6Frame(vnet.DefaultGuest6, vnet.DefaultGateway6, 255, advert), ""},
		"a redirect":                     {icmp6Frame(vnet.DefaultGuest6, vnet.DefaultGateway6, 255, redirect), ""},
		"a router's advertisement":       {icmp6Frame(lan, netip.MustParseAddr("ff02::1"), 255, append([]byte{134, 0, 0, 0}, make([]byte, 12)...)), ""},
		"a question from far":            {solicit(vnet.DefaultGuest6, vnet.DefaultGateway6, vnet.DefaultGateway6, 64), ""},
		"a question for a neighbour":     {solicit(vnet.DefaultGuest6, vnet.DefaultGateway6, other, 255), ""},
		"a question in another's name":   {solicit(other, vnet.DefaultGateway6, vnet.DefaultGateway6, 255), ""},
		"a multicast listener's report":  {icmp6Frame(lan, netip.MustParseAddr("ff02::16"), 1, append([]byte{143, 0, 0, 0}, make([]byte, 4)...)), ""},
		"an ICMP error for the internet": {icmp6Frame(vnet.DefaultGuest6, far.Addr(), 64, append([]byte{1, 4, 0, 0}, make([]byte, 40)...)), egress.RuleProtocol},
		"an ICMP error for the gateway":  {icmp6Frame(vnet.DefaultGuest6, vnet.DefaultGateway6, 64, append([]byte{1, 4, 0, 0}, make([]byte, 40)...)), ""},
	}
}

func TestIPv6FramesAreDropped(t *testing.T) {
	t.Parallel()
	for name, d := range dropped6() {
		pass, rule, _ := vnet.CheckFrame(d.frame)
		if pass || rule != d.rule {
			t.Errorf("%s: pass %v, rule %q, want %q", name, pass, rule, d.rule)
		}
	}
	l := newLab(t)
	for _, d := range dropped6() {
		l.guest.send(t, d.frame)
	}
	l.guest.send(t, pingFrame(vnet.DefaultGateway6))
	l.guest.sees(t, "an echo reply", func(f []byte) bool { return isAnswerToPing(f, vnet.DefaultGateway6, "reply") })
	if dials := l.net.Dials(); len(dials) > 0 {
		t.Errorf("dialled: %v", dials)
	}
}

func TestNoIPv6(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(c *vnet.Config) { c.NoIPv6 = true })
	l.net.SetName("six.test", echo6)
	before := l.Stats().FramesDropped
	l.guest.send(t, synFrame(at(echo6, 7), 1))
	l.guest.send(t, pingFrame(vnet.DefaultGateway6))
	eventually(t, "the frames are dropped", func() bool { return l.Stats().FramesDropped >= before+2 })
	if m := l.ask(t, "six.test.", dns.TypeAAAA); m.Rcode != dns.RcodeSuccess || len(m.Answer) != 0 {
		t.Errorf("answered %v", m)
	}
}

// A guest that floods with everything it has does not slow another one: each
// has a Network of its own, and what they share is only this process.
func TestAFloodDoesNotBlockAnotherSandbox(t *testing.T) {
	t.Parallel()
	hostile, honest := newLab(t), newLab(t)
	echo := at(honest.net.Host("echo.test"), 7)
	ping := func() {
		for range 21 {
			c := honest.guest.mustTCP(t, echo)
			var one [1]byte
			_, errW := c.Write(one[:])
			_, errR := io.ReadFull(c, one[:])
			if err := errors.Join(errW, errR); err != nil {
				t.Fatal(err)
			}
			_ = c.Close()
		}
	}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		frames := flood()
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := hostile.guest.link.Write(frames[i%len(frames)]); err != nil {
				return
			}
		}
	}()
	flooded := func() uint64 { s := hostile.Stats(); return s.FramesDropped + s.FramesIn }
	eventually(t, "the flood is on", func() bool { return flooded() > 500 })
	before := flooded()
	ping()
	eventually(t, "the flood goes on", func() bool { return flooded() > before })
	close(stop)
	<-done
}

// flood is every kind of frame that costs us something.
func flood() [][]byte {
	var out [][]byte
	for i := range uint16(512) {
		lan := netip.AddrFrom4([4]byte{192, 168, byte(i >> 8), byte(i)})
		far := netip.AddrFrom4([4]byte{192, 31, 196, byte(i)})
		for _, f := range [][]byte{
			synFrame(at(far, 7), i), synFrame(at(lan, 7), i), udpFrame(at(far, 7+i), nil), udpFrame(at(lan, i), nil),
			pingFrame(far), pingFrame(lan), pingFrame(echo6), synFrame(at(echo6, i), i), udpFrame(at(echo6, i), nil),
			udpFrame(gateway(53), []byte("\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x00\x00\x01\x00\x01")),
			arpFrame(guestMAC, 1, guestMAC, vnet.DefaultGuest, vnet.DefaultGateway),
			solicit(vnet.DefaultGuest6, vnet.DefaultGateway6, vnet.DefaultGateway6, 255),
		} {
			out = append(out, framed(f))
		}
	}
	return out
}
