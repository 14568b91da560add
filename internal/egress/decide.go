package egress

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// Decide returns whether a flow may be opened. It does not cover the
// controller's own services: an enforcer always serves those itself.
func (p *Policy) Decide(f Flow) Verdict {
	if t := p.opens(f); t != nil {
		return p.decidePrivate(t, f)
	}
	if rule, denied := always(f); denied {
		return Verdict{Rule: rule}
	}
	return p.each(func(q *Policy) Verdict { return q.own(f) })
}

// DecideName returns whether a TCP flow that Decide allowed with NeedName may
// continue with the host name that the guest sent. name is the TLS server name
// or the HTTP Host without port, "" if the guest's first bytes have neither. f
// is the same as for Decide.
func (p *Policy) DecideName(f Flow, name string) Verdict {
	if t := p.opens(f); t != nil {
		return p.namePrivate(t, f, name)
	}
	if rule, denied := always(f); denied {
		return Verdict{Rule: rule}
	}
	v := p.each(func(q *Policy) Verdict { return q.named(f, name) })
	v.NeedName = false
	return v
}

// each calls ask with the policy and its layers. The first denial decides; if
// all allow, the verdict has the policy's own rule.
func (p *Policy) each(ask func(*Policy) Verdict) Verdict {
	v := ask(p)
	if !v.Allow {
		return v
	}
	for _, l := range p.layers {
		lv := ask(l)
		if rule := RuleLayerPrefix + lv.Rule; !lv.Allow && !Dropped(rule) {
			return Verdict{Rule: rule}
		}
		v.NeedName = v.NeedName || lv.NeedName
	}
	return v
}

// always returns the part of the decision that no policy changes.
func always(f Flow) (rule string, denied bool) {
	if f.Host {
		return RuleGateway, true
	}
	switch f.Proto {
	case TCP, UDP, ICMP:
		if rule, denied := AlwaysDenied(f.Dst.Addr()); denied {
			return rule, true
		}
		return foreignDNS(f.Proto, f.Dst.Port())
	case DNS:
		if len(f.Names) != 1 {
			return RuleInvalid, true
		}
		return privateName(f.Names[0])
	}
	return RuleProtocol, true
}

// privateZones are zones that are not on the internet: names in them that the
// host's name servers resolve are of the host's own networks (RFC 6761, RFC
// 6762 appendix G, RFC 8375, and names that ICANN reserved for private use).
var privateZones = map[string]bool{
	"localhost": true, "local": true, "internal": true, "intranet": true, "private": true, "corp": true, "home": true, "lan": true,
}

func privateName(name string) (rule string, denied bool) {
	name = strings.TrimSuffix(name, ".")
	last := strings.LastIndexByte(name, '.')
	private := privateZones[name[last+1:]] || name == "home.arpa" || strings.HasSuffix(name, ".home.arpa")
	if private && !Dropped(RulePrivate) {
		return RulePrivate, true
	}
	return "", false
}

func foreignDNS(proto Proto, port uint16) (rule string, denied bool) {
	if proto != ICMP && port == DNSPort && !Dropped(RuleForeignDNS) {
		return RuleForeignDNS, true
	}
	return "", false
}

// own returns the decision of this policy without its layers.
func (p *Policy) own(f Flow) Verdict {
	if r := p.denies(f); r != nil {
		return Verdict{Rule: r.Name}
	}
	switch p.network.Mode {
	case agentlab.NetworkNAT:
		return p.ownNAT(f)
	case agentlab.NetworkAllowlist:
		return p.ownAllowlist(f)
	}
	return deny(RuleOff)
}

// deny returns the verdict of a deny rule. A test can disable the rule.
func deny(rule string) Verdict { return Verdict{Allow: Dropped(rule), Rule: rule} }

func (p *Policy) ownNAT(f Flow) Verdict {
	if f.Proto == DNS {
		return Verdict{Allow: true, Rule: RuleNAT}
	}
	if len(p.ports) > 0 && !slices.ContainsFunc(p.ports, func(s PortSpec) bool { return s.covers(f) }) && !Dropped(RulePorts) {
		return Verdict{Rule: RulePorts}
	}
	return p.withDeniedNames(f, Verdict{Allow: true, Rule: RuleNAT})
}

func (s PortSpec) covers(f Flow) bool {
	return s.Proto == f.Proto && (s.Proto == ICMP || s.Range.Contains(f.Dst.Port()))
}

// withDeniedNames adds the name check of deny rules to a flow that is allowed
// by its address.
func (p *Policy) withDeniedNames(f Flow, v Verdict) Verdict {
	if !p.deniesNames(f.Proto, f.Dst.Port()) {
		return v
	}
	if f.Proto == UDP {
		return deny(RuleNameUnread)
	}
	v.NeedName = true
	return v
}

// deniesNames reports whether the host name of a flow is read only because it
// may be denied. That is done on ports where names are usual.
func (p *Policy) deniesNames(proto Proto, port uint16) bool {
	if proto != TCP && proto != UDP {
		return false
	}
	return port == portHTTP && p.denyHTTP || port == portHTTPS && p.denyHTTPS
}

func (p *Policy) ownAllowlist(f Flow) Verdict {
	if f.Proto == DNS {
		if r := p.first(&p.allow, f.Names, func(*Rule) bool { return true }); r != nil {
			return Verdict{Allow: true, Rule: r.Name}
		}
		return deny(RuleAllowlist)
	}
	port := f.Dst.Port()
	covers := func(r *Rule) bool { return r.covers(f.Proto, port) }
	if r := p.byAddr(&p.allow, f, covers); r != nil {
		return p.withDeniedNames(f, Verdict{Allow: true, Rule: r.Name})
	}
	if r := p.first(&p.allow, f.Names, func(r *Rule) bool { return covers(r) && !r.NeedsName(port) }); r != nil {
		return Verdict{Allow: true, Rule: r.Name}
	}
	if r := p.first(&p.allow, f.Names, covers); r != nil {
		return Verdict{Allow: true, NeedName: true, Rule: r.Name}
	}
	return deny(RuleAllowlist)
}

// denies returns the deny rule that matches a flow, or nil. A rule with a port
// does not prevent the resolution of a name.
func (p *Policy) denies(f Flow) *Rule {
	fits := func(r *Rule) bool { return r.covers(f.Proto, f.Dst.Port()) }
	if f.Proto == DNS {
		return p.first(&p.deny, f.Names, func(r *Rule) bool { return !r.Explicit })
	}
	if r := p.byAddr(&p.deny, f, fits); r != nil {
		return r
	}
	for _, inner := range embedded(f.Dst.Addr().Unmap()) { // e.g. through NAT64
		in := f
		in.Dst = netip.AddrPortFrom(inner, f.Dst.Port())
		if r := p.byAddr(&p.deny, in, fits); r != nil {
			return r
		}
	}
	return p.first(&p.deny, f.Names, fits)
}

// byAddr returns the first rule for the flow's address that fits.
func (p *Policy) byAddr(t *ruleTable, f Flow, fits func(*Rule) bool) *Rule {
	best := -1
	t.byAddr(f.Dst.Addr(), func(i int) bool {
		if (best < 0 || i < best) && fits(&p.rules[i]) {
			best = i
		}
		return true
	})
	return p.at(best)
}

// first returns the first rule for one of the names that fits.
func (p *Policy) first(t *ruleTable, names []string, fits func(*Rule) bool) *Rule {
	best := -1
	for _, n := range names {
		t.byName(n, func(i int) bool {
			if (best < 0 || i < best) && fits(&p.rules[i]) {
				best = i
			}
			return true
		})
	}
	return p.at(best)
}

func (p *Policy) at(i int) *Rule {
	if i < 0 {
		return nil
	}
	return &p.rules[i]
}

// named decides like own for a flow whose name is known, or that has none.
func (p *Policy) named(f Flow, shown string) Verdict {
	v := p.own(f)
	if !v.Allow || !v.NeedName {
		return v
	}
	name, port := canonical(shown), f.Dst.Port()
	if name != "" {
		if r := p.first(&p.deny, []string{name}, func(r *Rule) bool { return r.covers(f.Proto, port) }); r != nil {
			return Verdict{Rule: r.Name}
		}
	}
	covers := func(r *Rule) bool { return r.covers(f.Proto, port) }
	byAddress := p.network.Mode == agentlab.NetworkNAT || p.byAddr(&p.allow, f, covers) != nil
	switch {
	case byAddress && shown != "" && !plainHost(shown):
		return deny(RuleNameMismatch) // a server may interpret it as a denied name
	case byAddress:
		return v // the name is only checked against denied names
	case shown == "":
		return deny(RuleNameMissing)
	case name == "" || !slices.Contains(f.Names, name):
		return deny(RuleNameMismatch)
	}
	if r := p.first(&p.allow, []string{name}, covers); r != nil {
		return Verdict{Allow: true, Rule: r.Name}
	}
	return deny(RuleNameMismatch)
}

// plainHost reports whether a text has only characters of host names and
// addresses.
func plainHost(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune(".-_:[]", r)
	})
}
