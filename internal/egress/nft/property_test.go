//go:build linux

package nft

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// parsed is an element of addresses and a verdict, read back from its text.
type parsed struct {
	lo, hi netip.Addr
	rule   string
}

func parseRange(t interface{ Fatalf(string, ...any) }, key string) (lo, hi netip.Addr) {
	a, b, ranged := strings.Cut(key, "-")
	if !ranged {
		b = a
	}
	lo, err := netip.ParseAddr(a)
	hi, err2 := netip.ParseAddr(b)
	if err != nil || err2 != nil || hi.Less(lo) {
		t.Fatalf("%q is not a range of addresses", key)
	}
	return lo, hi
}

// TestAlwaysDeniedMatchesPolicy: the ranges in the kernel, with the rules for
// addresses that carry others, deny exactly what egress.AlwaysDenied does.
func TestAlwaysDeniedMatchesPolicy(t *testing.T) {
	b := newBuilder(State{Config: testConfig()})
	lists := map[string][]parsed{}
	for _, f := range families {
		for _, d := range b.alwaysDenied(f) {
			lo, hi := parseRange(t, d.key)
			lists[f.v] = append(lists[f.v], parsed{lo, hi, d.rule})
		}
		for i := 1; i < len(lists[f.v]); i++ {
			if !lists[f.v][i-1].hi.Less(lists[f.v][i].lo) {
				t.Fatalf("%v and %v overlap", lists[f.v][i-1], lists[f.v][i])
			}
		}
	}
	denied := func(a netip.Addr) bool {
		v := "6"
		if a.Is4() {
			v = "4"
		}
		if slices.ContainsFunc(lists[v], func(p parsed) bool { return !a.Less(p.lo) && !p.hi.Less(a) }) {
			return true
		}
		return a.Is6() && slices.ContainsFunc(egress.MaskedDenials(), func(d egress.MaskedDenial) bool { return masked(a, d.Mask) == d.Value })
	}
	var edges []netip.Addr
	for _, l := range lists {
		for _, p := range l {
			edges = append(edges, p.lo, p.hi, p.lo.Prev(), p.hi.Next())
		}
	}
	edges = slices.DeleteFunc(edges, func(a netip.Addr) bool { return !a.IsValid() || a.Is4In6() })
	check := func(t interface{ Errorf(string, ...any) }, a netip.Addr) {
		if _, want := egress.AlwaysDenied(a); denied(a) != want {
			t.Errorf("%s: denied in the kernel %v, by the policy %v", a, denied(a), want)
		}
	}
	for _, a := range edges {
		check(t, a)
	}
	rapid.Check(t, func(t *rapid.T) {
		raw := rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "bytes")
		a := netip.AddrFrom16([16]byte(raw))
		switch rapid.IntRange(0, 3).Draw(t, "kind") {
		case 0:
			a = netip.AddrFrom4([4]byte(raw[:4]))
		case 1: // ISATAP under a public prefix
			copy(raw, []byte{0x26, 0x06, 0x47, 0})
			copy(raw[8:], []byte{0, 0, 0x5e, 0xfe})
			a = netip.AddrFrom16([16]byte(raw))
		case 2: // NAT64
			copy(raw, netip.MustParseAddr("64:ff9b::").AsSlice()[:12])
			a = netip.AddrFrom16([16]byte(raw))
		}
		if !a.Is4In6() { // an IPv4-mapped address never is on a wire
			check(t, a)
		}
	})
}

func masked(a, mask netip.Addr) netip.Addr {
	x, m := a.As16(), mask.As16()
	for i := range x {
		x[i] &= m[i]
	}
	return netip.AddrFrom16(x)
}

// TestPartition: the parts of address rules do not overlap and cover what the
// rules do, port by port.
func TestPartition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var rules []egress.Rule
		for range rapid.IntRange(1, 8).Draw(t, "rules") {
			bits := rapid.IntRange(20, 32).Draw(t, "bits")
			base := netip.AddrFrom4([4]byte{9, 1, rapid.Byte().Draw(t, "c") & 0x30, rapid.Byte().Draw(t, "d") & 0xf0})
			lo := rapid.Uint16Range(1, 100).Draw(t, "lo")
			rules = append(rules, egress.Rule{
				Prefix: netip.PrefixFrom(base, bits).Masked(), Proto: rapid.SampledFrom([]egress.Proto{"", egress.TCP, egress.UDP, egress.ICMP}).Draw(t, "proto"),
				Ports: []egress.PortRange{{Lo: lo, Hi: lo + rapid.Uint16Range(0, 50).Draw(t, "more")}},
			})
		}
		parts := partition(rules)
		for i := 1; i < len(parts); i++ {
			if !parts[i-1].addrs.hi.Less(parts[i].addrs.lo) {
				t.Fatalf("%v and %v overlap", parts[i-1].addrs, parts[i].addrs)
			}
		}
		for range 50 {
			a := netip.AddrFrom4([4]byte{9, 1, rapid.Byte().Draw(t, "c") & 0x3f, rapid.Byte().Draw(t, "d")})
			port := rapid.Uint16Range(1, 160).Draw(t, "port")
			want, got := false, false
			for _, r := range rules {
				want = want || r.Prefix.Contains(a) && (r.Proto == "" || r.Proto == egress.TCP && inPorts(r.Ports, port))
			}
			for _, p := range parts {
				got = got || !a.Less(p.addrs.lo) && !p.addrs.hi.Less(a) && len(p.cover.tcp) > 0 && inPorts(p.cover.tcp, port)
			}
			if want != got {
				t.Fatalf("%s:%d: rules say %v, parts %v (%v)", a, port, want, got, rules)
			}
		}
	})
}

// TestSegmentsMatchPolicy: what is put into sets for a name that was
// told is, for every port, what the policy decides.
func TestSegmentsMatchPolicy(t *testing.T) {
	texts := []string{
		"a.example.com", "a.example.com:22", "a.example.com:8000-8010", "a.example.com:443/udp", "*.example.com:1000-2000/tcp", "b.example.com",
		"9.9.9.0/24", "9.9.9.9:443", "9.9.9.9/icmp", "9.9.8.0/24:1-100/udp",
	}
	rapid.Check(t, func(t *rapid.T) {
		n := agentlab.Network{Mode: rapid.SampledFrom([]string{agentlab.NetworkAllowlist, agentlab.NetworkNAT}).Draw(t, "mode")}
		draw := func(label string) []agentlab.NetworkRule {
			return rulesOf(rapid.SliceOfN(rapid.SampledFrom(texts), 0, 4).Draw(t, label)...)
		}
		if n.Mode == agentlab.NetworkAllowlist {
			n.Allow = draw("allow")
		}
		n.Deny = draw("deny")
		if rapid.Bool().Draw(t, "ports") {
			n.Ports = []string{"80", "443/udp", "1000-1500", "icmp"}
		}
		if rapid.Bool().Draw(t, "layer") {
			n.Layers = []agentlab.Network{{Mode: agentlab.NetworkAllowlist, Allow: draw("layer rules")}}
		}
		p, err := egress.New(n)
		if err != nil {
			t.Fatal(err)
		}
		addr, names := netip.MustParseAddr("9.9.9.9"), []string{"a.example.com."}
		list, _ := planOf(Sandbox{Policy: p}).decisions(addr, names)
		for range 40 {
			proto := rapid.SampledFrom([]egress.Proto{egress.TCP, egress.UDP}).Draw(t, "proto")
			port := rapid.SampledFrom([]uint16{1, 22, 53, 79, 80, 81, 99, 100, 101, 443, 999, 1000, 1500, 1501, 2000, 2001, 7999, 8000, 8010, 8011, 65535}).Draw(t, "port")
			flow := egress.Flow{Proto: proto, Dst: netip.AddrPortFrom(addr, port)}
			plain := p.Decide(flow)
			flow.Names = names
			v := p.Decide(flow)
			got := unchanged
			for _, d := range list {
				if d.proto == proto && d.ports.Contains(port) {
					got = d.what
				}
			}
			want := unchanged
			switch {
			case v.Allow && v.NeedName:
				want = showName
			case v.Allow && !plain.Allow:
				want = allowed
			case !v.Allow && plain.Allow:
				want = forbidden
			}
			if got != want {
				t.Fatalf("%s %d: in the sets %d, by the policy %d (%+v)", proto, port, got, want, n)
			}
		}
	})
}

// FuzzNoInjection: whatever stands in a policy or in a configuration, what is
// rendered holds no word of it outside of the place for it.
func FuzzNoInjection(f *testing.F) {
	f.Add("github.com", "vmbr1", "tap101i0", "deny")
	f.Add("1.2.3.0/24", "vmbr1\"; flush ruleset; #", "a\nflush ruleset", "x\" accept comment \"")
	f.Add("*.a.b:1-2/udp", "", "}", "\n}\nflush ruleset")
	f.Fuzz(func(t *testing.T, text, bridge, port, comment string) {
		if q := quote(comment); strings.ContainsAny(q[1:len(q)-1], "\"\n\\;{}#$") || len(q) > maxQuoted+2 {
			t.Fatalf("quote(%q) = %s", comment, q)
		}
		p, err := egress.New(agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rulesOf(text)})
		if err != nil {
			p = testPolicy(t, agentlab.Network{Mode: agentlab.NetworkNAT})
		}
		c := testConfig()
		c.Bridge = bridge
		s := testSandbox(2, p)
		s.Port = port
		name := strings.TrimPrefix(strings.ToLower(text), "*.")
		out, err := Render(State{Config: c, Sandboxes: []Sandbox{s}, Ports: []string{port}, Learned: []Learned{{s, mustAddr("9.9.9.9"), []string{name + "."}, 1 << 40}}})
		if err != nil {
			return
		}
		for line := range strings.Lines(out) {
			line = strings.TrimSpace(line)
			if strings.HasPrefix(line, "#") {
				continue
			}
			if strings.Count(line, `"`)%2 != 0 || strings.Contains(line, "flush") || strings.Contains(line, ";") && !strings.HasSuffix(line, "policy accept;") {
				t.Fatalf("line %q", line)
			}
		}
		if strings.Count(out, "{") != strings.Count(out, "}") {
			t.Fatal("braces do not match")
		}
	})
}

// FuzzLogMessages: whatever the kernel's log socket gives is read without a
// fault.
func FuzzLogMessages(f *testing.F) {
	f.Add(logRequest(77, attribute(attrPrefix, []byte("deny policy\x00"))))
	f.Add(append([]byte{40, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 77}, attribute(attrPayload, udpPacket(mustAddr("10.77.0.2"), 53))...))
	f.Fuzz(func(t *testing.T, b []byte) {
		for msg := range messages(b) {
			src, flow, ok := packetFlow(msg.packet)
			if ok && (!src.IsValid() || !flow.Dst.Addr().IsValid() || flow.Proto == "") {
				t.Fatalf("%v %v", src, flow)
			}
		}
		packetFlow(b)
	})
}

func TestSandboxesCannotShareAnAddress(t *testing.T) {
	p := testPolicy(t, agentlab.Network{Mode: agentlab.NetworkNAT})
	a := testSandbox(2, p)
	a.Port = "tap1"
	for name, change := range map[string]func(*Sandbox){
		"mac": func(s *Sandbox) { s.MAC = a.MAC }, "ipv4": func(s *Sandbox) { s.IPv4 = a.IPv4 },
		"ipv6": func(s *Sandbox) { s.IPv6 = a.IPv6 }, "port": func(s *Sandbox) { s.Port = a.Port },
		"group mac": func(s *Sandbox) { s.MAC = []byte{1, 0, 0x5e, 0, 0, 1} }, "gateway": func(s *Sandbox) { s.IPv4 = testConfig().Gateway4 },
		"elsewhere": func(s *Sandbox) { s.IPv4 = mustAddr("10.78.0.2") }, "no policy": func(s *Sandbox) { s.Policy = nil },
	} {
		b := testSandbox(3, p)
		b.Port = "tap2"
		change(&b)
		if _, err := Render(State{Config: testConfig(), Sandboxes: []Sandbox{a, b}}); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}
