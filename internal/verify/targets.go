package verify

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
)

// The default targets on the real internet: a name for examples (RFC 2606) and
// a public DNS service, which answers on 53, 443 and 853.
const (
	publicSite     = "example.com"
	publicResolver = "9.9.9.9"
	resolver6      = "2620:fe::fe"
)

// strangers are names of which a reasonable allow list lacks at least one.
var strangers = []string{"example.org", "example.net", "example.com"}

// Targets selects the targets outside of a sandbox with that policy. A target
// that cannot be selected is omitted with its rows.
func Targets(n agentlab.Network, site string) (probe.Targets, error) {
	p, err := egress.New(n)
	if err != nil {
		return probe.Targets{}, err
	}
	t := probe.Targets{
		Resolver: netip.MustParseAddr(publicResolver), Resolver6: netip.MustParseAddr(resolver6), Question: publicSite,
	}
	if err := chooseSite(p, &t, site); err != nil {
		return probe.Targets{}, err
	}
	stranger := netip.MustParseAddr(publicResolver)
	switch n.Mode {
	case agentlab.NetworkAllowlist:
		chooseStrangers(p, &t, stranger)
	case agentlab.NetworkNAT:
		chooseDenied(p, &t)
		if len(n.Layers) == 0 && !opensAny(p, stranger, 22, 25, 8443) {
			t.StrangerAddr, t.OtherPort = stranger, 8443
		}
	default:
		t.Stranger, t.StrangerAddr = publicSite, stranger
	}
	return t, nil
}

// named reports whether the policy allows a name with TLS or HTTP.
func named(p *egress.Policy, name string, port uint16) bool {
	names := []string{strings.ToLower(name) + "."}
	addr := netip.AddrPortFrom(netip.MustParseAddr("192.31.196.1"), port) // any address without a rule
	if !p.Decide(egress.Flow{Proto: egress.DNS, Names: names}).Allow {
		return false
	}
	f := egress.Flow{Proto: egress.TCP, Dst: addr, Names: names}
	v := p.Decide(f)
	if v.Allow && v.NeedName {
		v = p.DecideName(f, name)
	}
	return v.Allow
}

// chooseSite selects a name that must be reached: the caller's, otherwise the
// first that the policy's own rules allow, otherwise the public one.
func chooseSite(p *egress.Policy, t *probe.Targets, site string) error {
	if site != "" {
		if r, err := egress.ParseRule(site, true); err != nil || r.Domain == "" || r.Wildcard || r.Explicit {
			return agentlab.Errorf(agentlab.CodeInvalid, "%q is not a host name", site).WithField("site").WithHint("use a public name, such as %s", publicSite)
		}
		if !named(p, site, 443) {
			return agentlab.Errorf(agentlab.CodeInvalid, "the policy does not allow %s on port 443", site).WithField("site").
				WithHint("run 'agentlab policy check %s:443', or use another name", site)
		}
		t.Site = site
	}
	candidates := []string{publicSite}
	if p.Mode() == agentlab.NetworkAllowlist {
		candidates = nil
		for _, r := range p.Rules() {
			if r.Allow && r.Domain != "" && !r.Wildcard {
				candidates = append(candidates, r.Domain)
			}
		}
	}
	for _, name := range candidates {
		if t.Site == "" && named(p, name, 443) {
			t.Site = name
		}
	}
	// Many hosts serve only TLS, so their behaviour on port 80 proves
	// nothing.
	t.NoHTTP = t.Site == "" || t.Site != publicSite || !named(p, t.Site, 80)
	return nil
}

// chooseStrangers selects targets that are not in an allow list.
func chooseStrangers(p *egress.Policy, t *probe.Targets, addr netip.Addr) {
	for _, name := range strangers {
		if t.Stranger == "" && !p.Decide(egress.Flow{Proto: egress.DNS, Names: []string{name + "."}}).Allow {
			t.Stranger, t.Twin = name, name
		}
	}
	allowed := func(r egress.Rule) bool { return r.Allow && r.Prefix.IsValid() && r.Prefix.Contains(addr) }
	denied := func(r egress.Rule) bool { return !r.Allow && r.Prefix.IsValid() && r.Prefix.Contains(addr) }
	if !slices.ContainsFunc(p.Rules(), allowed) && !slices.ContainsFunc(p.Rules(), denied) {
		t.StrangerAddr = addr
	}
	chooseDenied(p, t)
	f := egress.Flow{Proto: egress.TCP, Names: []string{t.Site + "."}, Dst: netip.AddrPortFrom(netip.MustParseAddr("192.31.196.1"), 8443)}
	if t.Site != "" && p.Decide(f).Rule == egress.RuleAllowlist {
		t.OtherPort = 8443
	}
}

// chooseDenied selects a name and an address that the policy's own deny rules
// deny on all ports.
func chooseDenied(p *egress.Policy, t *probe.Targets) {
	for _, r := range p.Rules() {
		if r.Allow || r.Explicit || r.Wildcard {
			continue
		}
		if r.Domain != "" && t.Denied == "" {
			t.Denied, t.DeniedRule = r.Domain, r.String()
		}
		if !r.Prefix.IsValid() || t.DeniedAddr.IsValid() || !r.Prefix.Addr().Is4() {
			continue
		}
		if _, always := egress.AlwaysDenied(r.Prefix.Addr()); !always {
			t.DeniedAddr, t.DeniedAddrRule = r.Prefix.Addr(), r.String()
		}
	}
}

// opensAny reports whether the policy allows one of these TCP ports of an
// address.
func opensAny(p *egress.Policy, a netip.Addr, ports ...uint16) bool {
	return slices.ContainsFunc(ports, func(port uint16) bool {
		return len(p.Ports()) > 0 && p.Decide(egress.Flow{Proto: egress.TCP, Dst: netip.AddrPortFrom(a, port)}).Rule != egress.RulePorts
	})
}
