package egress

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// Target is the target of a policy check by a user: a host, by name or
// address, with protocol and port.
type Target struct {
	Name  string     // canonical; "" if the target is an address
	Addr  netip.Addr // zero if the target is a name
	Proto Proto
	Port  uint16 // 0 with ICMP
}

// ParseTarget reads "HOST:PORT", "HOST:PORT/udp", "[IPv6]:PORT", "HOST/icmp",
// or a HOST alone, which means port 443. The error is agentlab.CodeInvalid.
func ParseTarget(text string) (Target, error) {
	r, err := parseRule(text)
	bad := func(why string) (Target, error) {
		return Target{}, agentlab.Errorf(agentlab.CodeInvalid, "%s is not a target: %s", quote(text), why).
			WithField("target").WithHint("use HOST:PORT, HOST:PORT/udp, [IPv6]:PORT or HOST/icmp")
	}
	scheme, _, url := strings.Cut(text, "://")
	switch {
	case text == "":
		return bad("it is empty")
	case url:
		return bad(quote(scheme+"://") + " is not part of a target; use only host and port")
	case text == "*":
		return bad("a wildcard matches many names")
	case err != nil:
		return bad(err.Error())
	case r.Wildcard:
		return bad("a wildcard matches many names")
	case r.Domain == "" && !r.Prefix.IsSingleIP():
		return bad("it is a range of addresses")
	case r.Explicit && len(r.Ports) == 1 && r.Ports[0].Lo != r.Ports[0].Hi:
		return bad("it is a range of ports")
	}
	t := Target{Proto: TCP, Port: portHTTPS}
	if r.Explicit {
		t.Proto, t.Port = r.Proto, 0
		if len(r.Ports) == 1 {
			t.Port = r.Ports[0].Lo
		}
	}
	if r.Domain != "" {
		t.Name = r.Domain + "."
	} else {
		t.Addr = r.Prefix.Addr()
	}
	return t, nil
}

// String returns the target in the format of ParseTarget.
func (t Target) String() string {
	host := strings.TrimSuffix(t.Name, ".")
	if host == "" {
		host = t.Addr.String()
		if t.Addr.Is6() && t.Proto != ICMP {
			host = "[" + host + "]"
		}
	}
	if t.Proto == ICMP {
		return host + "/icmp"
	}
	s := host + ":" + strconv.Itoa(int(t.Port))
	if t.Proto == UDP {
		s += "/udp"
	}
	return s
}

// Step is one decision about a target.
type Step struct {
	What   string // "dns", "connect" or "name"
	Allow  bool
	Rule   string // stable name of the matching rule
	Source string // the origin of the rule; "" for the profile itself, or if no configured rule matched
	Means  string // the meaning of the rule, one sentence
}

// Explanation is the decision for a target, with the reasons.
type Explanation struct {
	Target Target
	Allow  bool
	Rule   string // of the last step
	Steps  []Step
	Notes  []string // conditions that are only known at run time
}

// Explain decides like an enforcer for a guest that resolves a name and
// connects, and that sends the name in the flow if required. It resolves
// nothing: the addresses of a name are not known.
func (p *Policy) Explain(t Target) Explanation {
	e := Explanation{Target: t}
	f := Flow{Proto: t.Proto, Dst: netip.AddrPortFrom(t.Addr, t.Port)}
	if t.Name != "" {
		f.Names = []string{t.Name}
		f.Host = t.Name == HostName+"."
		v := p.Decide(Flow{Proto: DNS, Names: f.Names})
		e.step(p, "dns", v)
		if !v.Allow {
			return e
		}
		e.Notes = append(e.Notes, p.resolveNote(f))
	}
	v := p.decideOpen(f)
	e.step(p, "connect", v)
	if !v.Allow || !v.NeedName {
		return e
	}
	if t.Name == "" {
		e.Notes = append(e.Notes, "the connection is allowed unless its host name is denied")
		return e
	}
	e.step(p, "name", p.nameOpen(f, t.Name))
	e.Notes = append(e.Notes, "the connection must name "+strings.TrimSuffix(t.Name, ".")+" in its TLS or HTTP beginning, else it is refused")
	return e
}

// ProxyCarries reports whether an operator's upstream proxy can carry flows of
// that protocol to an address: TCP to IPv4 addresses.
func ProxyCarries(proto Proto, to netip.Addr) bool { return proto == TCP && to.Unmap().Is4() }

// ThroughProxy returns e for a host whose sandboxes use an upstream proxy.
// Private destinations are dialled directly.
func (e Explanation) ThroughProxy() Explanation {
	i := slices.IndexFunc(e.Steps, func(s Step) bool { return s.What == "connect" })
	if i < 0 || !e.Steps[i].Allow || strings.HasPrefix(e.Steps[i].Rule, RulePrivatePrefix) {
		return e
	}
	e.Notes = slices.Clone(e.Notes)
	switch t := e.Target; {
	case t.Name == "" && ProxyCarries(t.Proto, t.Addr):
	case t.Name != "" && t.Proto == TCP:
		e.Notes = append(e.Notes, "the connection goes through the operator's upstream proxy: only IPv4 addresses of the name are reached")
	default:
		e.Allow, e.Rule, e.Notes = false, RuleProxy, nil
		e.Steps = append(slices.Clone(e.Steps[:i]), Step{What: "connect", Rule: RuleProxy, Means: Means(RuleProxy)})
	}
	return e
}

// decideOpen is Decide for a flow whose address may be unknown.
func (p *Policy) decideOpen(f Flow) Verdict {
	if f.Dst.Addr().IsValid() || f.Host || p.opens(f) != nil {
		return p.Decide(f)
	}
	if rule, denied := foreignDNS(f.Proto, f.Dst.Port()); denied {
		return Verdict{Rule: rule}
	}
	if len(f.Names) == 1 && p.OpensName(f.Names[0]) {
		if rule, private := privateName(f.Names[0]); private {
			return Verdict{Rule: rule} // only that port is allowed
		}
	}
	return p.each(func(q *Policy) Verdict { return q.own(f) })
}

// nameOpen is DecideName for a flow whose address may be unknown.
func (p *Policy) nameOpen(f Flow, name string) Verdict {
	if p.opens(f) != nil {
		return p.DecideName(f, name)
	}
	return p.each(func(q *Policy) Verdict { return q.named(f, name) })
}

func (p *Policy) resolveNote(f Flow) string {
	switch t := p.opens(f); {
	case t != nil && t.Host:
		return "the name is the controller's address; the connection goes to that port of the host's loopback address"
	case t != nil:
		return "the name is not resolved here: the connection is made if it resolves to a private address that may be opened (RFC 1918, 100.64.0.0/10, fc00::/7), else the other rules count"
	}
	return "the name is not resolved here: of its addresses only public ones are given to the sandbox, and rules about addresses count for them"
}

func (e *Explanation) step(p *Policy, what string, v Verdict) {
	e.Allow, e.Rule = v.Allow, v.Rule
	e.Steps = append(e.Steps, Step{What: what, Allow: v.Allow, Rule: v.Rule, Source: p.source(v.Rule), Means: p.means(v.Rule)})
}

func (p *Policy) means(rule string) string {
	if t := p.byRule(rule); t != nil {
		return t.means()
	}
	return Means(rule)
}

// source returns the origin of the rule of a verdict.
func (p *Policy) source(rule string) string {
	if t := p.byRule(rule); t != nil {
		return t.Source
	}
	rule, layered := strings.CutPrefix(rule, RuleLayerPrefix)
	list := []*Policy{p}
	if layered {
		list = p.layers
	}
	for _, q := range list {
		for i := range q.rules {
			if q.rules[i].Name == rule {
				return q.rules[i].Source
			}
		}
	}
	return ""
}

var meanings = map[string]string{
	RuleInvalid:       "this address cannot be reached",
	RuleUnspecified:   "the unspecified address is never reached",
	RuleLoopback:      "loopback addresses are never reached from a sandbox",
	RulePrivate:       "private networks (RFC 1918) are never reached from a sandbox, and names in private zones not resolved",
	RuleCGNAT:         "100.64.0.0/10, where tailnets live, is never reached from a sandbox",
	RuleTailnet:       "tailnets are never reached from a sandbox",
	RuleLinkLocal:     "link-local addresses are never reached from a sandbox",
	RuleMetadata:      "cloud metadata services are never reached from a sandbox",
	RuleULA:           "private IPv6 networks are never reached from a sandbox",
	RuleSiteLocal:     "site-local IPv6 addresses are never reached from a sandbox",
	RuleMulticast:     "multicast is never carried out of a sandbox",
	RuleBroadcast:     "broadcast is never carried out of a sandbox",
	RuleDocumentation: "addresses for documentation are never reached",
	RuleBenchmark:     "addresses for benchmarks are never reached",
	RuleTransition:    "addresses of IPv4-in-IPv6 tunnels are never reached, because they may end anywhere",
	RuleReserved:      "the address is not public",
	RuleProtocol:      "only TCP, UDP and ICMP echo are carried out of a sandbox",
	RuleForeignDNS:    "DNS is answered by AgentLab alone; port 53 of other servers is never reached",
	RuleRebinding:     "addresses that are always denied are removed from DNS answers",
	RuleNAT:           "the mode is nat: the public internet is allowed",
	RuleOff:           "the mode is off: nothing but the controller is reached",
	RuleAllowlist:     "the mode is allowlist, and no allow rule matches",
	RulePorts:         "the policy's ports do not include this one",
	RuleNameMissing:   "the connection has no host name, and only a name could allow it",
	RuleNameMismatch:  "the connection's host name is not allowed at this address",
	RuleNameUnread:    "the policy denies hosts by name, which cannot be read from UDP; clients continue with TCP",
	RuleProxy:         "only TCP to IPv4 addresses goes through the operator's upstream proxy; with QUIC refused, clients continue with TCP",
	RuleLimit:         "the sandbox has too many connections",
	RuleRate:          "the sandbox asks too quickly",
	RuleHostAddr:      "the host itself is never reached from a sandbox",
	RuleLAN:           "the host's own networks are never reached from a sandbox, even if their addresses are public",
	RuleGateway:       "the controller does not serve this port",
}

// Means returns the meaning of a verdict's rule in one sentence.
func Means(rule string) string {
	if m, ok := meanings[rule]; ok {
		return m
	}
	if r, ok := strings.CutPrefix(rule, RuleLayerPrefix); ok {
		return "a layer that narrows the policy denies it: " + Means(r)
	}
	if r, ok := strings.CutPrefix(rule, RulePrivatePrefix); ok {
		return "the operator opened the private destination " + r
	}
	if r, ok := strings.CutPrefix(rule, RuleAllowPrefix); ok {
		return "the allow rule " + r + " allows it"
	}
	if r, ok := strings.CutPrefix(rule, RuleDenyPrefix); ok {
		return "the deny rule " + r + " denies it"
	}
	return rule
}

// AllowedDomains lists the names that a sandbox may reach, as information for
// its agent: "*" for any name, otherwise names and wildcards. It ignores deny
// rules that exclude names of a wildcard.
func (p *Policy) AllowedDomains() []string {
	out := []string{}
	narrow := p.narrowest()
	if narrow == nil {
		return out
	}
	if narrow.network.Mode == agentlab.NetworkNAT {
		return append(out, "*")
	}
	seen := map[string]bool{}
	for _, r := range narrow.rules {
		if !r.Allow || r.Domain == "" || seen[r.text()] {
			continue
		}
		name := r.Domain + "."
		if r.Wildcard {
			name = "any." + name
		}
		if p.Decide(Flow{Proto: DNS, Names: []string{name}}).Allow {
			seen[r.text()] = true
			out = append(out, r.text())
		}
	}
	return out
}

// text returns the name or wildcard of a rule, without ports.
func (r *Rule) text() string {
	if r.Wildcard {
		return "*." + r.Domain
	}
	return r.Domain
}

// narrowest returns the shortest allow list of the policy and its layers, the
// policy itself if there is none, and nil if one of them allows nothing.
func (p *Policy) narrowest() *Policy {
	best := p
	for _, q := range p.all() {
		switch {
		case q.network.Mode == agentlab.NetworkOff:
			return nil
		case q.network.Mode != agentlab.NetworkAllowlist:
		case best.network.Mode != agentlab.NetworkAllowlist || len(q.rules) < len(best.rules):
			best = q
		}
	}
	return best
}
