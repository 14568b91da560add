package vnet_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
)

// probes are targets that no guest may reach in any mode, with the rule that
// must say so.
var probes = []struct{ target, rule string }{
	{"0.0.0.0:80", egress.RuleUnspecified},
	{"0.1.2.3:80", egress.RuleUnspecified},
	{"10.0.0.1:22", egress.RulePrivate},
	{"10.77.0.3:80", egress.RulePrivate}, // where a neighbour would be
	{"10.77.0.255:80", egress.RulePrivate},
	{"10.255.255.53:53", egress.RulePrivate}, // a host's name server is not the guest's
	{"100.64.0.1:443", egress.RuleCGNAT},
	{"100.100.100.200:80", egress.RuleMetadata},
	{"127.0.0.1:8844", egress.RuleLoopback},
	{"127.1.2.3:80", egress.RuleLoopback},
	{"168.63.129.16:80", egress.RuleMetadata},
	{"169.254.169.254:80", egress.RuleMetadata},
	{"169.254.170.2:80", egress.RuleMetadata},
	{"169.254.1.1:80", egress.RuleLinkLocal},
	{"172.16.0.1:2375", egress.RulePrivate},
	{"172.31.255.255:80", egress.RulePrivate},
	{"192.0.0.192:80", egress.RuleMetadata},
	{"192.0.2.1:80", egress.RuleDocumentation},
	{"192.168.1.1:80", egress.RulePrivate},
	{"198.18.0.1:80", egress.RuleBenchmark},
	{"224.0.0.251:5353", egress.RuleMulticast},
	{"239.255.255.250:1900", egress.RuleMulticast},
	{"240.0.0.1:80", egress.RuleReserved},
	{"255.255.255.255:67", egress.RuleBroadcast},
	{"10.77.0.1:22", egress.RuleGateway},
	{"10.77.0.1:80", egress.RuleGateway},
	{"10.77.0.1:8843", egress.RuleGateway},
	{"10.77.0.1:8845", egress.RuleGateway},
}

func TestProbesReachNothing(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{agentlab.NetworkNAT, agentlab.NetworkOff} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, func(c *vnet.Config) { c.Policy = policy(t, mode) })
			for i, p := range probes {
				target := netip.MustParseAddrPort(p.target)
				for proto, frame := range map[egress.Proto][]byte{
					egress.TCP: synFrame(target, uint16(2000+i)), egress.UDP: udpFrame(target, []byte("probe")),
				} {
					l.guest.send(t, frame)
					d := l.audit.wait(t, fmt.Sprintf("%s %s", proto, target), func(d decision) bool {
						return d.Proto == proto && d.Addr == target
					})
					if d.Allow || d.Rule != p.rule {
						t.Errorf("%s %s: %+v, want rule %s", proto, target, d, p.rule)
					}
				}
			}
			if dials := l.net.Dials(); len(dials) > 0 {
				t.Errorf("dialled: %v", dials)
			}
			if s := l.Stats(); s.TCPFlows+s.UDPFlows+s.ServiceFlows != 0 {
				t.Errorf("flows were opened: %+v", s)
			}
		})
	}
}

func TestModeOffReachesOnlyTheController(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(c *vnet.Config) { c.Policy = policy(t, agentlab.NetworkOff) })
	echo := at(l.net.Host("echo.test"), 7)
	if _, err := l.guest.tcp(t.Context(), echo); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("tcp: %v", err)
	}
	if _, err := l.guest.udp(t, echo).Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	l.audit.wait(t, "udp", func(d decision) bool { return d.Proto == egress.UDP && d.Rule == egress.RuleOff && !d.Allow })
	if dials := l.net.Dials(); len(dials) > 0 {
		t.Errorf("dialled: %v", dials)
	}
}

// A refusal must be seen by the program that asked, not be waited for.
func TestDenialsAreAnswered(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	lan := netip.MustParseAddrPort("192.168.1.1:80")
	l.guest.send(t, synFrame(lan, 2000))
	l.guest.sees(t, "a reset", func(f []byte) bool { return isTCPReset(f, lan) })
	l.guest.send(t, udpFrame(lan, []byte("x")))
	l.guest.sees(t, "port unreachable", func(f []byte) bool { return isICMP(f, lan.Addr(), header.ICMPv4DstUnreachable) })
}

func TestPing(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	echo := l.net.Host("echo.test")
	silent := l.net.Host("www.test") // refuses, in this internet
	l.net.SetName("echo6.test", echo6)
	l.net.Echo("echo6.test")
	pings := []struct {
		dst   string
		kind  string // of what the guest sees
		allow bool
		rule  string // "" when nothing is recorded
	}{
		{vnet.DefaultGateway.String(), "reply", true, ""},
		{vnet.DefaultGateway6.String(), "reply", true, ""},
		{echo.String(), "reply", true, egress.RuleNAT},
		{echo6.String(), "reply", true, egress.RuleNAT},
		{silent.String(), "unreachable", true, egress.RuleNAT},
		{"2620:4f:8000::77", "unreachable", true, egress.RuleNAT},
		{"192.168.1.1", "unreachable", false, egress.RulePrivate},
		{"169.254.169.254", "unreachable", false, egress.RuleMetadata},
		{"fd12::1", "unreachable", false, egress.RuleULA},
		{"::ffff:10.1.2.3", "unreachable", false, egress.RulePrivate},
	}
	for _, p := range pings {
		a := netip.MustParseAddr(p.dst)
		l.guest.send(t, pingFrame(a))
		l.guest.sees(t, p.kind+" from "+p.dst, func(f []byte) bool { return isAnswerToPing(f, a, p.kind) })
		if p.rule == "" {
			continue
		}
		d := l.audit.wait(t, "ping "+p.dst, func(d decision) bool { return d.Addr.Addr() == a.Unmap() })
		if d.Allow != p.allow || d.Rule != p.rule || d.Proto != egress.ICMP {
			t.Errorf("ping %s: %+v", p.dst, d)
		}
	}
	eventually(t, "all pings are over", func() bool { return l.Stats().Pings == 0 })
}

// isAnswerToPing reports whether a frame is the echo reply from a, or says of
// a ping to a that it cannot be delivered.
func isAnswerToPing(f []byte, a netip.Addr, kind string) bool {
	at, reply, unreachable := 34, byte(0), byte(3)
	from := func(at int) netip.Addr { return netip.AddrFrom4([4]byte(f[at : at+4])) }
	src, quoted := 26, 34+8+16
	if a.Is6() {
		at, reply, unreachable = 54, 129, 1
		from = func(at int) netip.Addr { return netip.AddrFrom16([16]byte(f[at : at+16])) }
		src, quoted = 22, 54+8+24
	}
	if len(f) < at+8 || (f[12] == 0x86) != a.Is6() {
		return false
	}
	switch kind {
	case "reply":
		return f[at] == reply && from(src) == a && f[len(f)-1] == 'g'
	default:
		return f[at] == unreachable && len(f) >= quoted+len(a.AsSlice()) && from(quoted) == a
	}
}
