//go:build linux

package nft

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
	"github.com/agentlab-vm/agentlab/internal/egress/probe/probetest"
)

// extra is what a bridge has to show beside the table: it tells what is
// wrong, "" when nothing is.
type extra struct {
	id  string
	run func(w *world, m *Manager, s [2]Sandbox) string
}

func (p *peer) reaches(kind, target string) bool {
	p.t.Helper()
	return p.reachesWithin(kind, target, 600)
}

// mustReach is reaches for a target that must be reached: on a busy machine
// that may need a retransmission.
func (p *peer) mustReach(kind, target string) bool {
	p.t.Helper()
	return p.reachesWithin(kind, target, 10_000)
}

func (p *peer) reachesWithin(kind, target string, millis int) bool {
	p.t.Helper()
	return p.probe(guestapi.Probe{ID: "x", Kind: kind, Target: target, TimeoutMS: millis})[0].Reached
}

func want(ok bool, format string, args ...any) string {
	if ok {
		return ""
	}
	return fmt.Sprintf(format, args...)
}

func faults(list ...string) string {
	return strings.Join(slices.DeleteFunc(list, func(s string) bool { return s == "" }), "; ")
}

// extras hold under a policy of mode nat with a denied name.
var extras = []extra{
	{"inbound-lan", func(w *world, _ *Manager, s [2]Sandbox) string {
		// The sandbox could not answer in any case, so it matters what arrives.
		w.guests[0].ask("forget", nil)
		closed := faults(want(!w.lan.reaches("tcp", "10.77.0.2:8080"), "a LAN host opened a connection to a sandbox"),
			want(!w.lan.reaches("tcp", "[fd77:a91a:4d00::2]:8080"), "a LAN host opened an IPv6 connection to a sandbox"))
		w.lan.reaches("udp", "10.77.0.2:4607")
		w.lan.reaches("udp", "[fd77:a91a:4d00::2]:4607")
		var at probe.Outside
		w.guests[0].ask("report", &at)
		return faults(closed, want(!slices.ContainsFunc(at.Flows, func(f probe.Trace) bool {
			return (f.Addr == s[0].IPv4 || f.Addr == s[0].IPv6) && (f.Port == 8080 || f.Port == 4607)
		}), "what a LAN host sent arrived in a sandbox: %v", at.Flows))
	}},
	{"inbound-tailnet", func(w *world, _ *Manager, _ [2]Sandbox) string {
		return faults(want(w.tailnet.mustReach("tcp", "10.77.0.2:22"), "a tailnet host does not reach a sandbox"),
			want(w.tailnet.mustReach("tcp", "[fd77:a91a:4d00::2]:22"), "a tailnet host does not reach a sandbox by IPv6"))
	}},
	{"outbound-tailscale", func(w *world, _ *Manager, _ [2]Sandbox) string {
		w.guests[0].reaches("http", "185.20.20.20:80") // through the proxy
		to := netip.MustParseAddr("185.20.20.20")
		return faults(want(!w.guests[0].reaches("tcp", "185.20.20.20:8080"), "a public address that the host routes into the tailnet was reached"),
			want(!slices.ContainsFunc(w.outside().Flows, func(f probe.Trace) bool { return f.Addr == to }), "something for it arrived outside"))
	}},
	{"lan-public", func(w *world, _ *Manager, _ [2]Sandbox) string {
		return faults(want(!w.guests[0].reaches("tcp", "[2a10:50c0:1::50]:8080"), "a LAN host with a public IPv6 address was reached"),
			want(!w.guests[0].reaches("tcp", "[2a10:50c0:1::50]:443"), "it was reached through the proxy"))
	}},
	{"nat64-host", func(w *world, _ *Manager, _ [2]Sandbox) string {
		return w.neverOut("64:ff9b::193.9.9.9", "2620:4f:8000:1::5efe:193.9.9.9")
	}},
	{"nat64-lan", func(w *world, _ *Manager, _ [2]Sandbox) string {
		return w.neverOut("64:ff9b::193.9.8.50", "2620:4f:8000:1::5efe:193.9.8.50")
	}},
	{"quic-denied-names", func(w *world, _ *Manager, _ [2]Sandbox) string {
		return want(!w.guests[0].reaches("udp", "192.31.196.40:443"), "UDP 443 passed where names must be read")
	}},
	{"stolen-mac", func(w *world, _ *Manager, s [2]Sandbox) string {
		return w.sends("a packet with the neighbour's card and address", 4601, ethernet(s[1].MAC, 0x0800, udpPacket(s[1].IPv4, 4601)))
	}},
	{"stolen-ipv6", func(w *world, _ *Manager, s [2]Sandbox) string {
		return w.sends("an IPv6 packet with the neighbour's address", 4605, ethernet(s[0].MAC, 0x86dd, udpPacket6(s[1].IPv6, 4605)))
	}},
	{"sitelocal", func(w *world, _ *Manager, _ [2]Sandbox) string {
		to := netip.MustParseAddr("fec0::1")
		w.guests[0].reaches("udp", "[fec0::1]:4000") // an answer would not find back
		return want(!slices.ContainsFunc(w.outside().Flows, func(f probe.Trace) bool { return f.Addr == to }), "a packet to a site-local address arrived outside")
	}},
	{"invalid", func(w *world, _ *Manager, s [2]Sandbox) string {
		return w.sends("a TCP packet of no connection", 4602, ethernet(s[0].MAC, 0x0800, tcpPacket(s[0].IPv4, 4602, 0x03)))
	}},
	{"arp", func(w *world, _ *Manager, s [2]Sandbox) string {
		stranger := netip.MustParseAddr("10.77.9.9")
		_ = exec.Command("ip", "neigh", "del", stranger.String(), "dev", "vmbr1").Run()
		w.guests[0].raw(ethernet(s[0].MAC, 0x0806, arpRequest(s[0], stranger)))
		w.guests[0].reaches("dns", "site.probe.example.com") // it is after the frame
		out, _ := exec.Command("ip", "neigh", "show", stranger.String()).Output()
		return want(len(out) == 0, "the host believes that %s is a sandbox's: %s", stranger, out)
	}},
	{"limit-flows", func(w *world, m *Manager, s [2]Sandbox) string {
		s[0].Policy = testPolicy(w.t, agentlab.Network{Mode: agentlab.NetworkNAT, Limits: agentlab.NetworkLimits{Flows: 5}})
		return w.under(m, s[0], func() string {
			return want(w.guests[0].opens("192.31.196.41:9000", 30) <= 10, "more flows than the limit were opened")
		})
	}},
	{"limit-bandwidth", func(w *world, m *Manager, s [2]Sandbox) string {
		s[0].Policy = testPolicy(w.t, agentlab.Network{Mode: agentlab.NetworkNAT, Limits: agentlab.NetworkLimits{BandwidthMbps: 1}})
		return w.under(m, s[0], func() string {
			w.internet.ask("forget", nil)
			var burst []guestapi.Probe
			big := make([]byte, 1400)
			for i := range 200 {
				p := udpPacketWith(s[0].IPv4, 4604, big)
				burst = append(burst, guestapi.Probe{ID: fmt.Sprint(i), Kind: "raw", Frame: ethernet(s[0].MAC, 0x0800, p)})
			}
			w.guests[0].probe(burst...)
			n := w.arrivals(4604)
			return want(n < 150, "%d of 200 packets passed a limit of 1 Mbit/s", n)
		})
	}},
	{"limit-host", func(w *world, _ *Manager, _ [2]Sandbox) string {
		return want(w.guests[0].opens("10.77.0.1:8844", maxHostFlows+300) <= maxHostFlows+100, "many more connections to the host than the limit were opened")
	}},
}

// neverOut tells what of the first sandbox's packets to the addresses arrived
// anywhere. The internet is a NAT64 too: it answers them.
func (w *world) neverOut(addrs ...string) string {
	w.t.Helper()
	var list []string
	for _, a := range addrs {
		to := netip.MustParseAddr(a)
		w.guests[0].reaches("udp", netip.AddrPortFrom(to, 4000).String())
		w.guests[0].reaches("http", netip.AddrPortFrom(to, 80).String()) // through the proxy
		list = append(list, want(!slices.ContainsFunc(w.outside().Flows, func(f probe.Trace) bool { return f.Addr == to }), "a packet to %s arrived outside", a))
	}
	return faults(list...)
}

// under runs f while a sandbox has another policy.
func (w *world) under(m *Manager, s Sandbox, f func() string) string {
	w.t.Helper()
	before := m.members[s.VMID].Sandbox
	if err := m.Set(context.Background(), s); err != nil {
		w.t.Fatal(err)
	}
	w.tampered(m)
	defer func() {
		if err := m.Set(context.Background(), before); err != nil {
			w.t.Fatal(err)
		}
		w.tampered(m)
	}()
	return f()
}

// tampered loads everything again, so that rules that were taken out are not
// there.
func (w *world) tampered(m *Manager) {
	w.t.Helper()
	if m.tamper == nil {
		return
	}
	if err := m.Apply(context.Background()); err != nil {
		w.t.Fatal(err)
	}
}

// opens counts how many connections can be held open at the same time.
func (p *peer) opens(target string, n int) int {
	p.t.Helper()
	var list []guestapi.Probe
	for i := range n {
		list = append(list, guestapi.Probe{ID: fmt.Sprint(i), Target: target})
	}
	var res []guestapi.ProbeResult
	p.ask("hold", &res, list...)
	open := 0
	for _, r := range res {
		if r.Connected {
			open++
		}
	}
	p.ask("drop", nil)
	return open
}

func (p *peer) raw(frame []byte) {
	p.t.Helper()
	if r := p.probe(guestapi.Probe{ID: "raw", Kind: "raw", Frame: frame})[0]; r.Error != "" {
		p.t.Fatalf("the frame was not sent: %s", r.Error)
	}
}

// sends sends a frame to the internet and tells when it arrives there. What
// is sent after it, and answered, has passed it on the way.
func (w *world) sends(what string, port uint16, frame []byte) string {
	w.t.Helper()
	w.guests[0].raw(frame)
	if !w.guests[0].mustReach("udp", "192.31.196.40:4000") {
		return "the way out is closed"
	}
	return want(w.arrivals(port) == 0, "%s arrived outside", what)
}

// arrivals counts the packets for a port that came to the internet.
func (w *world) arrivals(port uint16) int {
	w.t.Helper()
	var out probe.Outside
	w.internet.ask("report", &out)
	n := 0
	for _, f := range out.Flows {
		if f.Port == port {
			n++
		}
	}
	return n
}

// surroundings are what the extras need beside the world.
func (w *world) surroundings() {
	w.sh("ip route add 185.20.20.0/24 via 100.101.102.103")
	w.sh("ip addr add 193.9.9.9/32 dev vmbr0; ip addr add 193.9.8.1/24 dev vmbr0") // public addresses of the host and of its LAN
	w.lan.sh("ip route add 10.77.0.0/16 via 192.168.1.2; ip -6 route add fd77:a91a:4d00::/64 via 2a10:50c0:1::2")
	w.lan.sh("ip -6 rule add to fd77:a91a:4d00::/64 lookup main priority 100; ip -6 rule add from all iif lo lookup main priority 101")
	// What keeps sandboxes apart must not be that bridged packets happen to
	// pass the rules for routed ones.
	for _, f := range []string{"iptables", "ip6tables", "arptables"} {
		if err := os.WriteFile("/proc/sys/net/bridge/bridge-nf-call-"+f, []byte("0"), 0o644); err != nil && !os.IsNotExist(err) {
			w.t.Fatal(err)
		}
	}
}

// TestExtras runs what only a bridge has to show.
func TestExtras(t *testing.T) {
	w := newWorld(t)
	w.surroundings()
	w.controller()
	m := w.manager(Options{})
	s := w.tenants(m, probetest.Reference()[0].Network)
	for _, x := range slices.Concat(extras, attacks) {
		t.Run(x.id, func(t *testing.T) {
			if fault := x.run(w, m, s); fault != "" {
				t.Error(fault)
			}
		})
	}
}

var zeroMAC = make([]byte, 6) // the prober puts the gateway's in its place

func ethernet(src []byte, etherType uint16, payload []byte) []byte {
	out := append(slices.Clone(zeroMAC), src...)
	return append(binary.BigEndian.AppendUint16(out, etherType), payload...)
}

var outsideAddr = netip.MustParseAddr("192.31.196.40")

func ipv4Packet(src netip.Addr, proto byte, body []byte) []byte {
	b := make([]byte, 20, 20+len(body))
	b[0], b[8], b[9] = 0x45, 64, proto
	binary.BigEndian.PutUint16(b[2:], uint16(20+len(body)))
	s, d := src.As4(), outsideAddr.As4()
	copy(b[12:], s[:])
	copy(b[16:], d[:])
	binary.BigEndian.PutUint16(b[10:], checksum(0, b))
	return append(b, body...)
}

func checksum(sum uint32, b []byte) uint16 {
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

func udpPacket(src netip.Addr, port uint16) []byte { return udpPacketWith(src, port, []byte("x")) }

func udpPacketWith(src netip.Addr, port uint16, data []byte) []byte {
	u := make([]byte, 8, 8+len(data)) // without a checksum, which IPv4 allows
	binary.BigEndian.PutUint16(u, 40000)
	binary.BigEndian.PutUint16(u[2:], port)
	binary.BigEndian.PutUint16(u[4:], uint16(8+len(data)))
	return ipv4Packet(src, 17, append(u, data...))
}

func udpPacket6(src netip.Addr, port uint16) []byte {
	dst := netip.MustParseAddr("2620:4f:8000::28")
	u := []byte{156, 64, byte(port >> 8), byte(port), 0, 9, 0, 0, 'x'}
	pseudo := append(src.AsSlice(), dst.AsSlice()...)
	pseudo = append(pseudo, 0, 0, 0, 9, 0, 0, 0, 17)
	binary.BigEndian.PutUint16(u[6:], checksum(0, append(pseudo, u...)))
	head := append([]byte{0x60, 0, 0, 0, 0, 9, 17, 64}, src.AsSlice()...)
	return append(append(head, dst.AsSlice()...), u...)
}

func tcpPacket(src netip.Addr, port uint16, flags byte) []byte {
	h := make([]byte, 20)
	binary.BigEndian.PutUint16(h, 40001)
	binary.BigEndian.PutUint16(h[2:], port)
	h[12], h[13], h[15] = 0x50, flags, 0xff
	pseudo := append(src.AsSlice(), outsideAddr.AsSlice()...)
	pseudo = append(pseudo, 0, 6, 0, 20)
	binary.BigEndian.PutUint16(h[16:], checksum(0, append(pseudo, h...)))
	return ipv4Packet(src, 6, h)
}

// arpRequest asks for the gateway and says, on the side, who has an address.
func arpRequest(s Sandbox, claimed netip.Addr) []byte {
	b := []byte{0, 1, 8, 0, 6, 4, 0, 1}
	b = append(b, s.MAC...)
	b = append(b, claimed.AsSlice()...)
	b = append(b, zeroMAC...)
	return append(b, 10, 77, 0, 1)
}
