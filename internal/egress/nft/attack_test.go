//go:build linux

package nft

import (
	"context"
	"encoding/binary"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
)

// What hostile guests tried, and what a bridge does by itself.

// TestDeniedRangeInsideIPv6: a deny rule about IPv4 holds for the spellings of
// these addresses in IPv6, and so does the host's network.
func TestDeniedRangeInsideIPv6(t *testing.T) {
	w := newWorld(t)
	w.sh("ip addr add 193.5.5.2/24 dev vmbr0")
	m := w.manager(Options{})
	w.tenants(m, agentlab.Network{Mode: agentlab.NetworkNAT, Deny: rulesOf("192.31.196.0/24", "192.31.197.7:4000/udp")})
	for target, open := range map[string]bool{
		"192.31.196.40:4000":                       false,
		"[64:ff9b::c01f:c428]:4000":                false, // NAT64
		"[2620:4f:8000::5efe:c01f:c428]:4000":      false, // ISATAP
		"[2620:4f:8000:0:200:5efe:c01f:c428]:4000": false,
		"[64:ff9b::c01f:c507]:4000":                false,
		"[64:ff9b::c01f:c507]:4001":                true,
		"[2620:4f:8000::5efe:c01f:c507]:4000":      false,
		"[2620:4f:8000::5efe:c01f:c507]:4001":      true,
		"193.5.5.9:4000":                           false, // the host is on it
		"[64:ff9b::c105:509]:4000":                 false,
		"[2620:4f:8000::5efe:c105:509]:4000":       false,
		"[64:ff9b::c105:609]:4000":                 true,
		"[2620:4f:8000::5efe:c105:609]:4000":       true,
	} {
		to := netip.MustParseAddrPort(target)
		arrived := func() bool {
			w.guests[0].reaches("udp", target)
			return slices.ContainsFunc(w.outside().Flows, func(f probe.Trace) bool { return f.Addr == to.Addr() && f.Port == to.Port() })
		}
		got := arrived()
		for i := 0; open && !got && i < 5; i++ { // a datagram may be lost on a busy host
			got = arrived()
		}
		if got != open {
			t.Errorf("%s: something arrived outside: %v, want %v", target, got, open)
		}
	}
}

// TestOnNet: the proxy knows the host's networks in every spelling too.
func TestOnNet(t *testing.T) {
	p := netip.MustParsePrefix("193.5.5.0/24")
	for a, want := range map[string]bool{
		"193.5.5.9": true, "193.5.6.9": false, "64:ff9b::c105:509": true, "64:ff9b::c105:609": false,
		"2620::5efe:c105:509": true, "2620::200:5efe:c105:509": true, "2620::c105:509": false,
	} {
		if contains(p, mustAddr(a)) != want {
			t.Errorf("%s: %v", a, !want)
		}
	}
}

// neighbourSolicitation is one for an address that no router should pass on.
func neighbourSolicitation(src, dst netip.Addr, hops byte) []byte {
	body := append([]byte{135, 0, 0, 0, 0, 0, 0, 0}, dst.AsSlice()...)
	pseudo := slices.Concat(src.AsSlice(), dst.AsSlice(), []byte{0, 0, 0, 24, 0, 0, 0, 58})
	binary.BigEndian.PutUint16(body[2:], checksum(0, append(pseudo, body...)))
	return slices.Concat([]byte{0x60, 0, 0, 0, 0, 24, 58, hops}, src.AsSlice(), dst.AsSlice(), body)
}

// sourceRouted is a packet to the host that asks it to go on to an address.
func sourceRouted(src, via, to netip.Addr, port uint16) []byte {
	u := make([]byte, 8, 9)
	binary.BigEndian.PutUint16(u, 40000)
	binary.BigEndian.PutUint16(u[2:], port)
	binary.BigEndian.PutUint16(u[4:], 9)
	b := ipv4Packet(src, 17, append(u, 'x'))
	head := slices.Concat(b[:20], []byte{131, 7, 4}, to.AsSlice(), []byte{0})
	copy(head[16:], via.AsSlice())
	head[0] = 0x47
	binary.BigEndian.PutUint16(head[2:], uint16(28+9))
	head[10], head[11] = 0, 0
	binary.BigEndian.PutUint16(head[10:], checksum(0, head))
	return append(head, b[20:]...)
}

// attacks are further extras.
var attacks = []extra{
	{"neighbour-discovery-routed", func(w *world, _ *Manager, s [2]Sandbox) string {
		w.forget()
		for _, to := range []string{"fd00:1234::1", "2620:4f:8000::28"} {
			w.guests[0].raw(ethernet(s[0].MAC, 0x86dd, neighbourSolicitation(s[0].IPv6, mustAddr(to), 64)))
		}
		w.guests[0].reaches("udp", "192.31.196.40:4000")
		return want(!slices.ContainsFunc(w.outside().Flows, func(f probe.Trace) bool { return f.Proto == "ip-58" }), "neighbour discovery was passed on")
	}},
	{"source-route", func(w *world, _ *Manager, s [2]Sandbox) string {
		w.sh("sysctl -qw net.ipv4.conf.all.accept_source_route=1 net.ipv4.conf.vmbr1.accept_source_route=1 net.ipv4.conf.all.rp_filter=0")
		w.forget()
		w.guests[0].raw(ethernet(s[0].MAC, 0x0800, sourceRouted(s[0].IPv4, mustAddr("10.77.0.1"), mustAddr("192.168.1.50"), 4606)))
		w.guests[0].reaches("udp", "192.31.196.40:4000")
		return want(!slices.ContainsFunc(w.outside().Flows, func(f probe.Trace) bool { return f.Port == 4606 }), "the host sent a packet on to its LAN as the sender wished")
	}},
	{"other-redirect", func(w *world, _ *Manager, _ [2]Sandbox) string {
		w.nft("add table ip others; add chain ip others c { type nat hook prerouting priority -110; }; add rule ip others c tcp dport 9090 dnat to 192.168.1.50:8080")
		defer w.nft("delete table ip others")
		return faults(want(!w.guests[0].reaches("tcp", "10.77.0.1:9090"), "a LAN host was reached through a port that the host forwards"),
			want(!w.guests[0].reaches("tcp", "192.31.196.20:9090"), "a LAN host was reached in the place of another"))
	}},
	{"flood", func(w *world, _ *Manager, s [2]Sandbox) string {
		w.sh("bridge fdb del %s dev %s master 2>/dev/null || true", s[0].MAC, taps[0])
		w.forget()
		w.sh("bridge link set dev %s learning off; bridge fdb del %s dev %s master 2>/dev/null || true", taps[0], s[0].MAC, taps[0])
		defer w.sh("bridge link set dev %s learning on", taps[0])
		// Answers are sent before the bridge has heard of their receiver again.
		w.guests[0].reaches("udp", "192.31.196.40:4000")
		var at probe.Outside
		w.guests[1].ask("report", &at)
		return want(!slices.ContainsFunc(at.Flows, func(f probe.Trace) bool { return f.Addr == s[0].IPv4 }), "the neighbour saw what was sent to the sandbox: %v", at.Flows)
	}},
	{"strange-port", func(w *world, _ *Manager, s [2]Sandbox) string {
		if w.stranger == nil {
			w.stranger = w.peer("guest", "tap103i0", "vmbr1")
			w.stranger.sh("ip link set eth0 address %s; ip addr add %s/16 dev eth0; ip route add default via 10.77.0.1", s[1].MAC, s[1].IPv4)
		}
		for m := w.current; ; { // the manager sees it by itself
			m.mu.Lock()
			seen := slices.Contains(m.ports, "tap103i0")
			m.mu.Unlock()
			if seen {
				break
			}
			runtime.Gosched()
		}
		card, err := netlink.LinkByName("vmbr1") // an answer to ARP would not find back either
		if err != nil {
			return err.Error()
		}
		w.stranger.sh("ip neigh replace 10.77.0.1 lladdr %s dev eth0", card.Attrs().HardwareAddr)
		to := mustAddr("192.31.196.77")
		w.stranger.reaches("udp", "192.31.196.77:4000") // no answer would find back
		return want(!slices.ContainsFunc(w.outside().Flows, func(f probe.Trace) bool { return f.Addr == to }), "what a port of no sandbox sent arrived outside")
	}},
}

func (w *world) nft(text string) {
	w.t.Helper()
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		w.t.Fatalf("%s: %s", text, out)
	}
}

// TestRemoveLeavesNothingOpen: without rules the host is not open to who was
// on the bridge.
func TestRemoveLeavesNothingOpen(t *testing.T) {
	w := newWorld(t)
	w.surroundings()
	w.controller()
	m, err := New(context.Background(), Options{Config: testConfig(), Resolver: testResolver{}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Apply(context.Background()); err != nil {
		t.Fatal(err)
	}
	w.tenants(m, agentlab.Network{Mode: agentlab.NetworkNAT})
	if err := m.Remove(context.Background()); err != nil {
		t.Fatal(err)
	}
	for _, target := range []string{"10.77.0.1:80", "192.168.1.2:80", "192.168.1.50:8080", "10.77.0.3:8080"} {
		if w.guests[0].reaches("tcp", target) {
			t.Errorf("%s is open without rules", target)
		}
	}
	if err := m.Apply(context.Background()); err != nil {
		t.Fatal(err)
	}
	for !w.guests[0].mustReach("tcp", "192.31.196.20:8080") { // once the bridge is up again, or the test's time is over
		continue
	}
}

// TestOnlyAgentLabAnswersDNS: another name server of the host does not answer
// sandboxes while ours does not.
func TestOnlyAgentLabAnswersDNS(t *testing.T) {
	w := newWorld(t)
	m, err := New(context.Background(), Options{Config: testConfig(), Resolver: testResolver{}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Apply(context.Background()); err != nil {
		t.Fatal(err)
	}
	w.tenants(m, agentlab.Network{Mode: agentlab.NetworkNAT})
	srv := &dns.Server{Addr: "0.0.0.0:53", Net: "udp", Handler: dns.HandlerFunc(func(rw dns.ResponseWriter, q *dns.Msg) {
		a, _ := testResolver{}.Exchange(context.Background(), q)
		_ = rw.WriteMsg(a)
	})}
	up := make(chan struct{})
	srv.NotifyStartedFunc = func() { close(up) }
	go func() { _ = srv.ListenAndServe() }()
	<-up
	defer srv.Shutdown()
	if w.guests[0].reaches("dns", "site.probe.example.com") {
		t.Error("another program of the host answered DNS")
	}
	if err := m.serve(context.Background(), true); err != nil {
		t.Fatal(err)
	}
	if !w.guests[0].mustReach("dns", "site.probe.example.com") {
		t.Error("nothing is answered when it may be: this test shows nothing")
	}
}

// TestForgottenFlowsEnd: who gets a sandbox's address next does not get what
// was sent to the one before.
func TestForgottenFlowsEnd(t *testing.T) {
	w := newWorld(t)
	m := w.manager(Options{})
	s := w.tenants(m, agentlab.Network{Mode: agentlab.NetworkNAT})
	if !w.guests[0].hold("x", "192.31.196.20:8080") || !w.guests[0].hold("y", "[2620:4f:8000::28]:8080") {
		t.Fatal("not reached")
	}
	if err := m.Forget(context.Background(), s[0].VMID); err != nil {
		t.Fatal(err)
	}
	w.noFlows(s[0])
}

// TestFlowsOfADeadProcessEnd: the same when the process died before it ended
// them.
func TestFlowsOfADeadProcessEnd(t *testing.T) {
	w := newWorld(t)
	ctx := context.Background()
	first, err := New(ctx, Options{Config: testConfig(), Resolver: testResolver{}})
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Apply(ctx); err != nil {
		t.Fatal(err)
	}
	s := w.tenants(first, agentlab.Network{Mode: agentlab.NetworkNAT})
	if !w.guests[0].hold("x", "192.31.196.20:8080") || !w.guests[0].hold("y", "[2620:4f:8000::28]:8080") {
		t.Fatal("not reached")
	}
	first.Close()
	second := w.manager(Options{})
	if err := second.Restore(ctx, s[1:]); err != nil {
		t.Fatal(err)
	}
	if err := second.Set(ctx, s[0]); err != nil { // another one, with the same address
		t.Fatal(err)
	}
	w.noFlows(s[0])
}

// noFlows expects that the kernel knows no flow of a sandbox.
func (w *world) noFlows(s Sandbox) {
	t := w.t
	t.Helper()
	for _, f := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, f)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range flows {
			if a, _ := netip.AddrFromSlice(x.Forward.SrcIP); a.Unmap() == s.IPv4 || a == s.IPv6 {
				t.Errorf("goes on: %s", x)
			}
		}
	}
}

// TestDNSAnswersAreBounded checks that the stored names of a guest are bounded, for
// any number of requested names, and that a name that is not stored is closed.
func TestDNSAnswersAreBounded(t *testing.T) {
	x := &member{answers: map[netip.Addr]map[string]time.Time{}}
	now := time.Unix(1e9, 0)
	one := mustAddr("9.9.9.9")
	for i := range 10_000 {
		x.addAnswer(one, strings.Repeat("a", i%200)+string(rune('a'+i%26))+time.Duration(i).String()+".example.com.", now.Add(time.Hour), now)
	}
	if n := x.count(); n > maxNamesPer || n != x.pairs {
		t.Errorf("%d names of one address, counted as %d", n, x.pairs)
	}
	open := map[netip.Addr]bool{one: true}
	a := mustAddr("8.0.0.0")
	for i := range 3 * maxAnswers {
		a = a.Next()
		open[a] = true
		for _, gone := range x.addAnswer(a, "b.example.com.", now.Add(time.Duration(i)*time.Second), now) {
			delete(open, gone)
		}
	}
	if n := x.count(); n > maxAnswers || n != x.pairs || len(open) != len(x.answers) || !open[a] {
		t.Errorf("%d pairs, counted as %d; %d addresses are told, %d open", n, x.pairs, len(x.answers), len(open))
	}
}

// TestPlansAreDistinguished: a repository writes a layer of its policy. It must
// not find one whose chains have the name of another policy's: that takes the
// square root of all names.
func TestPlansAreDistinguished(t *testing.T) {
	p := planOf(testSandbox(2, testPolicy(t, agentlab.Network{Mode: agentlab.NetworkNAT})))
	if len(p.id) < 32 {
		t.Errorf("the name of a plan has %d bits", len(p.id)*4)
	}
	if !policyObjects.MatchString(p.chain(0)) {
		t.Error("chains of policies are not known as such")
	}
}

// TestNeighboursArePinnedAgain: the entries are back after the bridge was down.
func TestNeighboursArePinnedAgain(t *testing.T) {
	w := newWorld(t)
	m := w.manager(Options{})
	w.tenants(m, agentlab.Network{Mode: agentlab.NetworkNAT})
	w.sh("ip link set vmbr1 down; ip link set vmbr1 up")
	if err := m.reconcile(context.Background(), false); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("ip", "neigh", "show", "dev", "vmbr1", "nud", "permanent").Output()
	if err != nil || !strings.Contains(string(out), "10.77.0.2") || !strings.Contains(string(out), "fd77:a91a:4d00::3") {
		t.Errorf("%s %v", out, err)
	}
}

// TestFlushIsSeenAtOnce: rules that another program flushed are back, although
// nobody looks for them.
func TestFlushIsSeenAtOnce(t *testing.T) {
	w := newWorld(t)
	m := w.manager(Options{every: time.Hour})
	w.tenants(m, agentlab.Network{Mode: agentlab.NetworkNAT})
	w.nft("flush ruleset")
	for have := []string(nil); len(have) != len(ours); {
		var err error
		if have, err = m.kernel.tables(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestTwoProcessesApply: another process that loads the rules knows no
// sandboxes; they are let in again at once.
func TestTwoProcessesApply(t *testing.T) {
	w := newWorld(t)
	m := w.manager(Options{every: time.Hour})
	w.tenants(m, agentlab.Network{Mode: agentlab.NetworkNAT})
	other, err := New(context.Background(), Options{Config: testConfig()})
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Apply(context.Background()); err != nil {
		t.Fatal(err)
	}
	for !w.guests[0].mustReach("tcp", "192.31.196.20:8080") { // or the test's time is over
		continue
	}
}
