package egress_test

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

func rulesOf(texts ...string) []agentlab.NetworkRule {
	var out []agentlab.NetworkRule
	for _, t := range texts {
		out = append(out, agentlab.NetworkRule{Rule: t})
	}
	return out
}

func compile(t testing.TB, n agentlab.Network) *egress.Policy {
	t.Helper()
	p, err := egress.New(n)
	if err != nil {
		t.Fatalf("%+v: %v", n, err)
	}
	return p
}

func flow(proto egress.Proto, dst string, names ...string) egress.Flow {
	f := egress.Flow{Proto: proto, Names: names}
	if dst != "" {
		f.Dst = netip.MustParseAddrPort(dst)
	}
	return f
}

type decision struct {
	name  string
	f     egress.Flow
	allow bool
	need  bool
	rule  string
}

func checkDecisions(t *testing.T, p *egress.Policy, cases []decision) {
	t.Helper()
	for _, c := range cases {
		if got, want := p.Decide(c.f), (egress.Verdict{Allow: c.allow, NeedName: c.need, Rule: c.rule}); got != want {
			t.Errorf("%s: %+v, want %+v", c.name, got, want)
		}
	}
}

func TestAllowlist(t *testing.T) {
	t.Parallel()
	p := compile(t, agentlab.Network{
		Mode:  agentlab.NetworkAllowlist,
		Allow: rulesOf("github.com", "*.npmjs.org", "db.example:5432", "quic.example:443/udp", "8.8.4.0/24", "9.9.9.9:853", "1.1.1.1/icmp"),
		Deny:  rulesOf("evil.npmjs.org", "8.8.4.66"),
	})
	checkDecisions(t, p, []decision{
		{"dns exact", flow(egress.DNS, "", "github.com."), true, false, "allow:github.com"},
		{"dns below a wildcard", flow(egress.DNS, "", "a.b.npmjs.org."), true, false, "allow:*.npmjs.org"},
		{"dns apex of a wildcard", flow(egress.DNS, "", "npmjs.org."), false, false, egress.RuleAllowlist},
		{"dns denied below a wildcard", flow(egress.DNS, "", "evil.npmjs.org."), false, false, "deny:evil.npmjs.org"},
		{"dns tunnel", flow(egress.DNS, "", "ab12.tunnel.example."), false, false, egress.RuleAllowlist},
		{"dns suffix without a dot", flow(egress.DNS, "", "evilgithub.com."), false, false, egress.RuleAllowlist},
		{"dns of a rule with a port", flow(egress.DNS, "", "db.example."), true, false, "allow:db.example:5432"},
		{"learned name, https", flow(egress.TCP, "140.82.1.1:443", "github.com."), true, true, "allow:github.com"},
		{"learned name, ssh", flow(egress.TCP, "140.82.1.1:22", "github.com."), true, false, "allow:github.com"},
		{"learned name, other port", flow(egress.TCP, "140.82.1.1:8080", "github.com."), false, false, egress.RuleAllowlist},
		{"learned name, quic", flow(egress.UDP, "140.82.1.1:443", "github.com."), false, false, egress.RuleAllowlist},
		{"learned name, ping", flow(egress.ICMP, "140.82.1.1:0", "github.com."), false, false, egress.RuleAllowlist},
		{"explicit port", flow(egress.TCP, "5.5.5.5:5432", "db.example."), true, false, "allow:db.example:5432"},
		{"explicit port only", flow(egress.TCP, "5.5.5.5:443", "db.example."), false, false, egress.RuleAllowlist},
		{"explicit udp", flow(egress.UDP, "5.5.5.5:443", "quic.example."), true, false, "allow:quic.example:443/udp"},
		{"raw ip of a name", flow(egress.TCP, "140.82.1.1:443"), false, false, egress.RuleAllowlist},
		{"range", flow(egress.TCP, "8.8.4.4:443"), true, true, "allow:8.8.4.0/24"}, // for the denied name
		{"range, ssh", flow(egress.TCP, "8.8.4.4:22"), true, false, "allow:8.8.4.0/24"},
		{"mapped spelling of a range", flow(egress.TCP, "[::ffff:8.8.4.4]:22"), true, false, "allow:8.8.4.0/24"},
		{"denied in a range", flow(egress.TCP, "8.8.4.66:443"), false, false, "deny:8.8.4.66"},
		{"dns to another server", flow(egress.UDP, "8.8.4.4:53"), false, false, egress.RuleForeignDNS},
		{"dns over tcp to another server", flow(egress.TCP, "8.8.4.4:53"), false, false, egress.RuleForeignDNS},
		{"dot by its rule", flow(egress.TCP, "9.9.9.9:853"), true, false, "allow:9.9.9.9:853"},
		{"ping by its rule", flow(egress.ICMP, "1.1.1.1:0"), true, false, "allow:1.1.1.1/icmp"},
		{"private whatever the name", flow(egress.TCP, "10.0.0.1:443", "github.com."), false, false, egress.RulePrivate},
		{"dns without a name", flow(egress.DNS, ""), false, false, egress.RuleInvalid},
	})
	tls := flow(egress.TCP, "140.82.1.1:443", "cdn.example.", "github.com.", "a.npmjs.org.", "evil.npmjs.org.")
	if v := p.Decide(tls); v.Rule != "deny:evil.npmjs.org" {
		t.Errorf("an address that a denied name was learned for: %+v", v)
	}
	tls.Names = tls.Names[:3]
	for name, want := range map[string]egress.Verdict{
		"github.com": {Allow: true, Rule: "allow:github.com"}, "GITHUB.com.": {Allow: true, Rule: "allow:github.com"},
		"a.npmjs.org": {Allow: true, Rule: "allow:*.npmjs.org"}, "": {Rule: egress.RuleNameMissing},
		"cdn.example":    {Rule: egress.RuleNameMismatch}, // learned under an earlier policy
		"evil.npmjs.org": {Rule: "deny:evil.npmjs.org"}, "b.npmjs.org": {Rule: egress.RuleNameMismatch},
		"140.82.1.1": {Rule: egress.RuleNameMismatch}, "github.com\x00": {Rule: egress.RuleNameMismatch},
	} {
		if got := p.DecideName(tls, name); got != want {
			t.Errorf("name %q: %+v, want %+v", name, got, want)
		}
	}
}

func TestNATWithDenyAndPorts(t *testing.T) {
	t.Parallel()
	p := compile(t, agentlab.Network{Mode: agentlab.NetworkNAT, Deny: rulesOf("*.tracker.example", "9.9.9.0/24:443", "irc.example:6667"), Ports: []string{"80", "443", "443/udp", "6667"}})
	checkDecisions(t, p, []decision{
		{"web", flow(egress.TCP, "8.8.8.8:443"), true, true, egress.RuleNAT},
		{"port not listed", flow(egress.TCP, "8.8.8.8:25"), false, false, egress.RulePorts},
		{"ping not listed", flow(egress.ICMP, "8.8.8.8:0"), false, false, egress.RulePorts},
		{"quic where names are denied", flow(egress.UDP, "8.8.8.8:443"), false, false, egress.RuleNameUnread},
		{"no name needed elsewhere", flow(egress.TCP, "8.8.8.8:6667"), true, false, egress.RuleNAT},
		{"dns of a denied name", flow(egress.DNS, "", "x.tracker.example."), false, false, "deny:*.tracker.example"},
		{"dns of a name denied on a port", flow(egress.DNS, "", "irc.example."), true, false, egress.RuleNAT},
		{"that port", flow(egress.TCP, "8.8.8.8:6667", "irc.example."), false, false, "deny:irc.example:6667"},
		{"that name on another port", flow(egress.TCP, "8.8.8.8:80", "irc.example."), true, true, egress.RuleNAT},
		{"denied range", flow(egress.TCP, "9.9.9.9:443"), false, false, "deny:9.9.9.0/24:443"},
	})
	f := flow(egress.TCP, "8.8.8.8:443")
	for name, want := range map[string]egress.Verdict{
		"": {Allow: true, Rule: egress.RuleNAT}, "8.8.8.8": {Allow: true, Rule: egress.RuleNAT}, "good.example": {Allow: true, Rule: egress.RuleNAT},
		"A.Tracker.Example": {Rule: "deny:*.tracker.example"}, "a.tracker.example..": {Rule: "deny:*.tracker.example"},
		"a.tracker.example\x00": {Rule: egress.RuleNameMismatch}, "tracker.example": {Allow: true, Rule: egress.RuleNAT},
	} {
		if got := p.DecideName(f, name); got != want {
			t.Errorf("name %q: %+v, want %+v", name, got, want)
		}
	}
}

func TestLayers(t *testing.T) {
	t.Parallel()
	p := compile(t, agentlab.Network{
		Mode: agentlab.NetworkNAT, Limits: agentlab.NetworkLimits{Flows: 100},
		Layers: []agentlab.Network{
			{Mode: agentlab.NetworkAllowlist, Allow: rulesOf("github.com"), Limits: agentlab.NetworkLimits{Flows: 50, DNSPerSecond: 5}},
			{Mode: agentlab.NetworkNAT, Deny: rulesOf("8.8.8.8")},
		},
	})
	checkDecisions(t, p, []decision{
		{"allowed by all", flow(egress.TCP, "8.8.4.4:443", "github.com."), true, true, egress.RuleNAT},
		{"denied by the second layer", flow(egress.TCP, "8.8.8.8:443", "github.com."), false, false, "layer.deny:8.8.8.8"},
		{"denied by the first layer", flow(egress.TCP, "8.8.4.4:443"), false, false, "layer." + egress.RuleAllowlist},
		{"dns", flow(egress.DNS, "", "gitlab.com."), false, false, "layer." + egress.RuleAllowlist},
	})
	f := flow(egress.TCP, "8.8.4.4:443", "github.com.", "other.example.")
	if v := p.DecideName(f, "other.example"); v != (egress.Verdict{Rule: "layer." + egress.RuleNameMismatch}) {
		t.Errorf("a name that the layer does not allow: %+v", v)
	}
	if got, want := p.Limits(), (agentlab.NetworkLimits{Flows: 50, DNSPerSecond: 5}); got != want {
		t.Errorf("limits %+v, want %+v", got, want)
	}
}

func TestNewRejectsUnusedOptions(t *testing.T) {
	t.Parallel()
	for name, n := range map[string]agentlab.Network{
		"allow in nat":        {Mode: agentlab.NetworkNAT, Allow: rulesOf("a.example")},
		"deny in off":         {Mode: agentlab.NetworkOff, Deny: rulesOf("a.example")},
		"ports in off":        {Mode: agentlab.NetworkOff, Ports: []string{"443"}},
		"a bad port":          {Mode: agentlab.NetworkNAT, Ports: []string{"https"}},
		"allowing the LAN":    {Mode: agentlab.NetworkAllowlist, Allow: rulesOf("192.168.0.0/16")},
		"allowing a tailnet":  {Mode: agentlab.NetworkAllowlist, Allow: rulesOf("fd7a:115c:a1e0::/48")},
		"a negative limit":    {Mode: agentlab.NetworkNAT, Limits: agentlab.NetworkLimits{Flows: -1}},
		"a bad layer":         {Mode: agentlab.NetworkNAT, Layers: []agentlab.Network{{Mode: "x"}}},
		"too many layers":     {Mode: agentlab.NetworkNAT, Layers: slices.Repeat([]agentlab.Network{{Mode: agentlab.NetworkNAT}}, egress.MaxLayers+1)},
		"a bad rule":          {Mode: agentlab.NetworkAllowlist, Allow: rulesOf("http://x")},
		"an unexpanded named": {Mode: agentlab.NetworkAllowlist, Allow: rulesOf("preset:github")},
	} {
		_, err := egress.New(n)
		var e *agentlab.Error
		if !errors.As(err, &e) || e.Code != agentlab.CodeInvalid || e.Field == "" {
			t.Errorf("%s: %#v", name, err)
		}
	}
}

func genNetwork(t *rapid.T, label string) agentlab.Network {
	n := agentlab.Network{Mode: rapid.SampledFrom([]string{agentlab.NetworkNAT, agentlab.NetworkAllowlist, agentlab.NetworkOff}).Draw(t, label+"mode")}
	rules := rapid.SliceOfN(rapid.Custom(genRule), 0, 6)
	if n.Mode == agentlab.NetworkAllowlist {
		n.Allow = rulesOf(rules.Draw(t, label+"allow")...)
	}
	if n.Mode != agentlab.NetworkOff {
		n.Deny = rulesOf(rules.Draw(t, label+"deny")...)
		n.Ports = rapid.SliceOfN(rapid.SampledFrom([]string{"80", "443", "443/udp", "icmp", "8000-8010", "22"}), 0, 3).Draw(t, label+"ports")
	}
	return n
}

func genFlow(t *rapid.T) egress.Flow {
	f := egress.Flow{Proto: rapid.SampledFrom([]egress.Proto{egress.TCP, egress.UDP, egress.ICMP, egress.DNS}).Draw(t, "proto")}
	name := rapid.SampledFrom([]string{"a.example.", "b.example.", "x.a.example.", "y.x.a.example.", "other.test."})
	addr := rapid.OneOf(rapid.SampledFrom([]string{"8.8.8.8", "8.8.1.1", "9.1.2.3", "2606:4700::1", "2606:4701::1", "10.0.0.1", "::1"}),
		rapid.Custom(func(t *rapid.T) string { return genV4(t).String() })).Draw(t, "dst")
	f.Dst = netip.AddrPortFrom(netip.MustParseAddr(addr), rapid.SampledFrom([]uint16{22, 53, 80, 443, 853, 5432, 8000, 8010, 8011}).Draw(t, "port"))
	f.Names = rapid.SliceOfN(name, 0, 3).Draw(t, "names")
	if f.Proto == egress.DNS {
		f.Names = []string{name.Draw(t, "question")}
	}
	return f
}

// TestALayerNeverWidens: what a policy with a layer allows, the policy alone
// and the layer alone allow too, whatever both say.
func TestALayerNeverWidens(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		base, layer := genNetwork(t, "base "), genNetwork(t, "layer ")
		both := base
		both.Layers = []agentlab.Network{layer}
		p, alone, l := mustCompile(t, both), mustCompile(t, base), mustCompile(t, layer)
		f := genFlow(t)
		shown := rapid.SampledFrom([]string{"", "a.example", "x.a.example", "other.test", "8.8.8.8"}).Draw(t, "shown")
		v, va, vl := p.Decide(f), alone.Decide(f), l.Decide(f)
		if v.Allow != (va.Allow && vl.Allow) || v.Allow && v.NeedName != (va.NeedName || vl.NeedName) {
			t.Fatalf("together %+v, alone %+v, layer %+v", v, va, vl)
		}
		n, na, nl := p.DecideName(f, shown), alone.DecideName(f, shown), l.DecideName(f, shown)
		if n.Allow != (na.Allow && nl.Allow) || n.Allow && !v.Allow {
			t.Fatalf("named %q: together %+v, alone %+v, layer %+v", shown, n, na, nl)
		}
		if v.Rule == "" || n.Rule == "" {
			t.Fatal("a verdict without a rule")
		}
	})
}

func mustCompile(t *rapid.T, n agentlab.Network) *egress.Policy {
	p, err := egress.New(n)
	if err != nil {
		t.Fatalf("%+v: %v", n, err)
	}
	return p
}

// TestAllowlistIsKept decides a second time by a plain reading of the rules.
func TestAllowlistIsKept(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := genNetwork(t, "")
		p, f := mustCompile(t, n), genFlow(t)
		v := p.Decide(f)
		if !v.Allow || n.Mode == agentlab.NetworkNAT {
			return
		}
		if n.Mode == agentlab.NetworkOff {
			t.Fatalf("%+v is allowed in mode off", f)
		}
		for _, r := range p.Rules() {
			if !r.Allow || f.Proto != egress.DNS && r.Proto != f.Proto {
				continue
			}
			if f.Proto == egress.DNS && nameFits(r, f.Names[0]) {
				return
			}
			portFits := f.Proto == egress.ICMP || slices.ContainsFunc(r.Ports, func(p egress.PortRange) bool { return p.Contains(f.Dst.Port()) })
			if portFits && (r.Prefix.IsValid() && r.Prefix.Contains(f.Dst.Addr()) || slices.ContainsFunc(f.Names, func(n string) bool { return nameFits(r, n) })) {
				return
			}
		}
		t.Fatalf("%+v is allowed as %s and no rule of %+v says so", f, v.Rule, n)
	})
}

func nameFits(r egress.Rule, name string) bool {
	if r.Domain == "" {
		return false
	}
	if !r.Wildcard {
		return name == r.Domain+"."
	}
	rest := len(name) - len(r.Domain) - 1
	return rest > 1 && name[rest:] == r.Domain+"." && name[rest-1] == '.'
}

// Names of private zones are denied by the policy itself, so that 'policy
// check' says so too.
func TestPrivateZones(t *testing.T) {
	t.Parallel()
	p, err := egress.New(agentlab.Network{Mode: agentlab.NetworkNAT})
	if err != nil {
		t.Fatal(err)
	}
	for name, denied := range map[string]bool{
		"nas.lan.": true, "lan.": true, "a.b.internal.": true, "x.home.arpa.": true, "home.arpa.": true, "printer.local.": true,
		"xhome.arpa.": false, "1.8.8.8.in-addr.arpa.": false, "lan.example.": false, "milan.": false, "example.com.": false, ".": false,
	} {
		if v := p.Decide(egress.Flow{Proto: egress.DNS, Names: []string{name}}); v.Allow == denied || denied && v.Rule != egress.RulePrivate {
			t.Errorf("%s: %+v", name, v)
		}
	}
	target, err := egress.ParseTarget("nas.lan:443")
	if err != nil {
		t.Fatal(err)
	}
	if e := p.Explain(target); e.Allow || e.Rule != egress.RulePrivate {
		t.Errorf("%+v", e)
	}
}
