package egress_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

func TestAlwaysDenied(t *testing.T) {
	t.Parallel()
	cases := map[string]string{ // "" means not on the list
		"0.0.0.0": egress.RuleUnspecified, "0.1.2.3": egress.RuleUnspecified,
		"9.255.255.255": "", "10.0.0.0": egress.RulePrivate, "10.255.255.255": egress.RulePrivate, "11.0.0.0": "",
		"100.63.255.255": "", "100.64.0.0": egress.RuleCGNAT, "100.127.255.255": egress.RuleCGNAT, "100.128.0.0": "",
		"100.100.100.200": egress.RuleMetadata, "168.63.129.16": egress.RuleMetadata, "168.63.129.15": "",
		"126.255.255.255": "", "127.0.0.1": egress.RuleLoopback, "127.255.255.255": egress.RuleLoopback, "128.0.0.0": "",
		"169.253.255.255": "", "169.254.0.1": egress.RuleLinkLocal, "169.254.169.254": egress.RuleMetadata,
		"169.254.170.2": egress.RuleMetadata, "169.255.0.0": "",
		"172.15.255.255": "", "172.16.0.0": egress.RulePrivate, "172.31.255.255": egress.RulePrivate, "172.32.0.0": "",
		"192.0.0.192": egress.RuleMetadata, "192.0.0.8": egress.RuleReserved, "192.0.1.0": "", "192.0.2.1": egress.RuleDocumentation,
		"192.88.99.1": egress.RuleTransition, "192.167.255.255": "", "192.168.1.1": egress.RulePrivate, "192.169.0.0": "",
		"198.17.255.255": "", "198.18.0.1": egress.RuleBenchmark, "198.19.255.255": egress.RuleBenchmark, "198.20.0.0": "",
		"198.51.100.7": egress.RuleDocumentation, "203.0.113.7": egress.RuleDocumentation,
		"223.255.255.255": "", "224.0.0.1": egress.RuleMulticast, "239.255.255.250": egress.RuleMulticast,
		"240.0.0.1": egress.RuleReserved, "255.255.255.254": egress.RuleReserved, "255.255.255.255": egress.RuleBroadcast,
		"8.8.8.8": "", "1.1.1.1": "", "140.82.112.3": "",

		"::": egress.RuleUnspecified, "::1": egress.RuleLoopback, "::2": egress.RuleUnspecified, "::8.8.8.8": egress.RuleTransition,
		"::127.0.0.1": egress.RuleLoopback, "::ffff:127.0.0.1": egress.RuleLoopback, "::ffff:8.8.8.8": "",
		"::ffff:0:10.0.0.1": egress.RulePrivate, "::ffff:0:8.8.8.8": egress.RuleTransition,
		"64:ff9b::192.168.1.1": egress.RulePrivate, "64:ff9b::169.254.169.254": egress.RuleMetadata, "64:ff9b::8.8.8.8": "",
		"64:ff9b:1::10.0.0.1": egress.RuleTransition, "64:ff9b:1:a00:0:100::": egress.RuleTransition, "64:ff9b:1::808:808": egress.RuleTransition,
		"100::1": egress.RuleReserved, "2001:0:a00:1::": egress.RulePrivate, "2001:0:808:808:0:0:80ff:fffe": egress.RuleLoopback,
		"2001:0:808:808:0:0:f7f7:f7f7": egress.RuleTransition, "2001:2::1": egress.RuleBenchmark, "2001:20::1": egress.RuleReserved,
		"2001:db8::1": egress.RuleDocumentation, "2001:200::1": "", "2002:7f00:1::": egress.RuleLoopback,
		"2002:c0a8:101::1": egress.RulePrivate, "2002:808:808::1": egress.RuleTransition,
		"2606:4700::1111": "", "2606:4700::5efe:10.0.0.1": egress.RulePrivate, "2606:4700::200:5efe:192.168.0.1": egress.RulePrivate,
		"2606:4700::5efe:8.8.8.8": "", "3fff::1": egress.RuleDocumentation, "3fff:1000::1": "", "4000::1": egress.RuleReserved,
		"5f00::1": egress.RuleReserved, "fc00::1": egress.RuleULA, "fd00::1": egress.RuleULA, "fd00:ec2::254": egress.RuleMetadata,
		"fd7a:115c:a1e0::1": egress.RuleTailnet, "fe80::1": egress.RuleLinkLocal, "febf::1": egress.RuleLinkLocal,
		"fec0::1": egress.RuleSiteLocal, "ff02::1": egress.RuleMulticast, "fe00::1": egress.RuleReserved,
		"fe80::1%eth0": egress.RuleInvalid,
	}
	for s, want := range cases {
		rule, denied := egress.AlwaysDenied(netip.MustParseAddr(s))
		if rule != want || denied != (want != "") {
			t.Errorf("AlwaysDenied(%s) = %q, %v; want %q", s, rule, denied, want)
		}
	}
	if rule, denied := egress.AlwaysDenied(netip.Addr{}); !denied || rule != egress.RuleInvalid {
		t.Errorf("the zero address: %q, %v", rule, denied)
	}
}

// embeddings is every way to write an IPv4 address as an IPv6 one that the
// list knows, made here by hand so that it does not share code with it.
func embeddings(v4 netip.Addr) map[string]netip.Addr {
	b := v4.As4()
	at := func(prefix string, off int, xor byte) netip.Addr {
		a := netip.MustParseAddr(prefix).As16()
		for i, x := range b {
			a[off+i] = x ^ xor
		}
		return netip.AddrFrom16(a)
	}
	local48 := netip.MustParseAddr("64:ff9b:1::").As16()
	local48[6], local48[7], local48[9], local48[10] = b[0], b[1], b[2], b[3]
	return map[string]netip.Addr{
		"mapped": at("::ffff:0:0", 12, 0), "compatible": at("::", 12, 0), "siit": at("::ffff:0:0:0", 12, 0),
		"nat64": at("64:ff9b::", 12, 0), "nat64-local-96": at("64:ff9b:1::", 12, 0), "nat64-local-48": netip.AddrFrom16(local48),
		"6to4": at("2002::1", 2, 0), "teredo-server": at("2001::f7f7:f7f7", 4, 0), "teredo-client": at("2001:0:808:808::", 12, 0xff),
		"isatap": at("2606:4700::5efe:0:0", 12, 0), "isatap-u": at("2606:4700::200:5efe:0:0", 12, 0),
	}
}

// plainlyPrivate is the standard library's opinion, as an independent floor.
func plainlyPrivate(a netip.Addr) bool {
	a = a.Unmap()
	return a.IsPrivate() || a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsMulticast() || a.IsUnspecified() || !a.IsGlobalUnicast()
}

func genV4(t *rapid.T) netip.Addr {
	near := []string{"0.0.0.0", "10.0.0.0", "100.64.0.0", "127.0.0.0", "169.254.0.0", "172.16.0.0", "192.168.0.0", "224.0.0.0", "255.255.0.0", "8.8.0.0"}
	b := netip.MustParseAddr(rapid.SampledFrom(near).Draw(t, "near")).As4()
	if rapid.Bool().Draw(t, "anywhere") {
		b[0], b[1] = rapid.Byte().Draw(t, "a"), rapid.Byte().Draw(t, "b")
	}
	b[2], b[3] = rapid.Byte().Draw(t, "c"), rapid.Byte().Draw(t, "d")
	return netip.AddrFrom4(b)
}

func TestNoEmbeddingHidesAnAddress(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		v4 := genV4(t)
		_, denied4 := egress.AlwaysDenied(v4)
		if plainlyPrivate(v4) && !denied4 {
			t.Fatalf("%s is let through", v4)
		}
		for kind, a := range embeddings(v4) {
			_, denied := egress.AlwaysDenied(a)
			if denied4 && !denied {
				t.Fatalf("%s hides %s as %s", kind, v4, a)
			}
			if !denied4 && denied && (kind == "mapped" || kind == "nat64") {
				t.Fatalf("%s of public %s is denied", kind, v4)
			}
		}
	})
}

func TestOnlyGlobalUnicastPasses(t *testing.T) {
	t.Parallel()
	global := netip.MustParsePrefix("2000::/3")
	nat64 := netip.MustParsePrefix("64:ff9b::/96")
	rapid.Check(t, func(t *rapid.T) {
		a := netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "a")))
		_, denied := egress.AlwaysDenied(a)
		if a.Is4In6() {
			return
		}
		if !denied && (!global.Contains(a) && !nat64.Contains(a) || plainlyPrivate(a)) {
			t.Fatalf("%s is let through", a)
		}
	})
}

func TestDecide(t *testing.T) {
	t.Parallel()
	nat, off := newPolicy(t, agentlab.NetworkNAT), newPolicy(t, agentlab.NetworkOff)
	public, private := netip.MustParseAddrPort("8.8.8.8:443"), netip.MustParseAddrPort("192.168.1.1:443")
	cases := []struct {
		name string
		p    *egress.Policy
		f    egress.Flow
		want egress.Verdict
	}{
		{"nat tcp", nat, egress.Flow{Proto: egress.TCP, Dst: public}, egress.Verdict{Allow: true, Rule: egress.RuleNAT}},
		{"nat udp", nat, egress.Flow{Proto: egress.UDP, Dst: public}, egress.Verdict{Allow: true, Rule: egress.RuleNAT}},
		{"nat dns", nat, egress.Flow{Proto: egress.DNS, Names: []string{"example.com."}}, egress.Verdict{Allow: true, Rule: egress.RuleNAT}},
		{"nat private", nat, egress.Flow{Proto: egress.TCP, Dst: private}, egress.Verdict{Rule: egress.RulePrivate}},
		{"a name does not help", nat, egress.Flow{Proto: egress.TCP, Dst: private, Names: []string{"github.com."}}, egress.Verdict{Rule: egress.RulePrivate}},
		{"nat sctp", nat, egress.Flow{Proto: "sctp", Dst: public}, egress.Verdict{Rule: egress.RuleProtocol}},
		{"nat no address", nat, egress.Flow{Proto: egress.TCP}, egress.Verdict{Rule: egress.RuleInvalid}},
		{"off tcp", off, egress.Flow{Proto: egress.TCP, Dst: public}, egress.Verdict{Rule: egress.RuleOff}},
		{"off dns", off, egress.Flow{Proto: egress.DNS, Names: []string{"example.com."}}, egress.Verdict{Rule: egress.RuleOff}},
		{"off private", off, egress.Flow{Proto: egress.UDP, Dst: private}, egress.Verdict{Rule: egress.RulePrivate}},
	}
	for _, c := range cases {
		if got := c.p.Decide(c.f); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

func TestNewRefusesUnknownModes(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"", "NAT", "host"} {
		_, err := egress.New(agentlab.Network{Mode: mode})
		if agentlab.CodeOf(err) != agentlab.CodeInvalid || agentlab.HintOf(err) == "" {
			t.Errorf("mode %q: %v", mode, err)
		}
	}
}

func TestFilterAnswer(t *testing.T) {
	t.Parallel()
	var in []netip.Addr
	for _, s := range []string{"8.8.8.8", "127.0.0.1", "::ffff:10.0.0.1", "1.1.1.1", "2606:4700::1"} {
		in = append(in, netip.MustParseAddr(s))
	}
	keep, withheld := egress.FilterAnswer(in)
	if !slices.Equal(keep, []netip.Addr{in[0], in[3], in[4]}) || !slices.Equal(withheld, []netip.Addr{in[1], in[2]}) {
		t.Errorf("keep %v, withheld %v", keep, withheld)
	}
}

func FuzzDecide(f *testing.F) {
	f.Add([]byte{127, 0, 0, 1}, uint16(80), "tcp", "localhost.")
	f.Add([]byte{8, 8, 8, 8}, uint16(443), "tcp", "x.B.example")
	f.Add([]byte{8, 8, 8, 8}, uint16(80), "tcp", "no.b.example.")
	f.Add([]byte{0x20, 0x02, 10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}, uint16(443), "udp", "")
	nat, off := newPolicy(f, agentlab.NetworkNAT), newPolicy(f, agentlab.NetworkOff)
	list := compile(f, agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rulesOf("a.example", "*.b.example", "c.example:22"), Deny: rulesOf("no.b.example")})
	f.Fuzz(func(t *testing.T, raw []byte, port uint16, proto, name string) {
		a, _ := netip.AddrFromSlice(raw)
		flow := egress.Flow{Proto: egress.Proto(proto), Dst: netip.AddrPortFrom(a, port), Names: []string{name}}
		v := nat.Decide(flow)
		if v.Rule == "" {
			t.Fatal("a verdict without a rule")
		}
		if v.Allow && flow.Proto != egress.DNS && plainlyPrivate(a) {
			t.Fatalf("%v is allowed by %s", flow, v.Rule)
		}
		if off.Decide(flow).Allow {
			t.Fatalf("%v is allowed in mode off", flow)
		}
		// An allow list of names: the name that the guest shows is one that we
		// told it, and one of the list.
		flow.Names = []string{"a.example.", "x.b.example.", "no.b.example.", "other.example."}[port%4:]
		if flow.Proto != egress.TCP || !list.DecideName(flow, name).Allow || port == 22 {
			return
		}
		shown := strings.ToLower(strings.TrimRight(name, ".")) + "."
		if !slices.Contains(flow.Names, shown) || shown != "a.example." && shown != "x.b.example." {
			t.Fatalf("%v is allowed by showing %q", flow, name)
		}
	})
}

func newPolicy(t testing.TB, mode string) *egress.Policy {
	t.Helper()
	p, err := egress.New(agentlab.Network{Mode: mode})
	if err != nil {
		t.Fatal(err)
	}
	return p
}
