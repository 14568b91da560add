package nft

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// defaultFlows is the number of connections of a sandbox whose policy has no
// limit.
const defaultFlows = 4096

// plan is the representation of one policy in the kernel. Sandboxes with equal
// policies share it.
type plan struct {
	id     string // part of the names of its chains and sets
	mark   uint32 // of the flows that it allowed
	policy *egress.Policy
	limits agentlab.NetworkLimits
}

// planOf returns the plan of a sandbox's policy. Its ID and mark depend only
// on the content of the policy. So flows continue when the same policy is
// loaded again, and another policy must allow them again first.
func planOf(s Sandbox) *plan {
	text, err := json.Marshal(s.Policy.Network())
	if err != nil {
		panic(err) // only strings and numbers
	}
	sum := sha256.Sum256(text)
	return &plan{
		id:     hex.EncodeToString(sum[:16]), // a repository can choose part of the text, so collisions must be infeasible
		mark:   binary.BigEndian.Uint32(sum[16:])&0x3fffffff | 0x40000000,
		policy: s.Policy, limits: s.Policy.Limits(),
	}
}

// all returns the policy and its layers.
func (p *plan) all() []*egress.Policy {
	return append([]*egress.Policy{p.policy}, p.policy.Layers()...)
}

func (p *plan) chain(i int) string {
	if i == 0 {
		return "p_" + p.id
	}
	return fmt.Sprintf("p_%s_%d", p.id, i)
}

func (p *plan) allowedChain() string { return "yes_" + p.id }

// binding is one set element that binds a sandbox to its policy.
type binding struct{ family, set, key, verdict, options string }

// bindings returns all elements of a sandbox.
func bindings(s Sandbox, p *plan, gateway4 netip.Addr) []binding {
	var out []binding
	inet := func(set, key, verdict string) {
		out = append(out, binding{"inet", set, key, verdict, ""})
	}
	for _, f := range families {
		a := s.IPv4
		if f == v6 {
			a = s.IPv6
		}
		if !a.IsValid() {
			continue
		}
		inet("bound"+f.v, fmt.Sprintf("%s . %s", s.MAC, a), "")
		inet("policy"+f.v, a.String(), "goto "+p.chain(0))
		if p.redirectsAll() {
			inet("redirect"+f.v, a.String(), "goto r_"+p.id)
		}
		if p.limits.BandwidthMbps > 0 {
			inet("shape"+f.v, a.String(), "jump s_"+p.id)
		}
		inet("live"+f.v, fmt.Sprintf("%s . 0x%08x", a, p.mark), "")
	}
	for _, t := range p.policy.Private() {
		a := t.Addr
		if t.Host {
			a = gateway4
		}
		if l := (Learned{Sandbox: s, Addr: a}); a.IsValid() && l.guest().IsValid() {
			out = append(out, privateBinding(l, t.Port, ""))
		}
	}
	if s.DHCP {
		inet("dhcp", s.MAC.String(), "")
	}
	out = append(out, binding{"arp", "bound", fmt.Sprintf("%s . %s", s.MAC, s.IPv4), "", ""})
	port := quoted(s.Port)
	return append(out,
		binding{"bridge", "ports", port, "", ""},
		binding{"bridge", "senders", port, "goto sender", ""},
		binding{"bridge", "macs", fmt.Sprintf("%s . %s", port, s.MAC), "", ""},
		binding{"bridge", "arps", fmt.Sprintf("%s . %s . %s", port, s.MAC, s.IPv4), "", ""})
}

// redirectsAll reports whether flows to any address may need a check of their
// name, because of denied names.
func (p *plan) redirectsAll() bool { return len(p.deniedNamePorts(0)) > 0 }

// deniedNamePorts returns the TCP ports on which the i-th policy checks for
// denied names; i = 0 means all policies.
func (p *plan) deniedNamePorts(i int) []uint16 {
	var out []uint16
	for _, port := range []uint16{80, 443} {
		for j, q := range p.all() {
			if (i == 0 || i == j) && deniesNames(q, port) {
				out = append(out, port)
				break
			}
		}
	}
	return out
}

// deniesNames reports whether the policy checks the names of flows on a port
// that it allows by address.
func deniesNames(q *egress.Policy, port uint16) bool {
	for _, r := range q.Rules() {
		if !r.Allow && r.Domain != "" && (r.Proto == "" || r.Proto == egress.TCP && inPorts(r.Ports, port)) {
			return true
		}
	}
	return false
}

func inPorts(list []egress.PortRange, port uint16) bool {
	return len(list) == 0 || slices.ContainsFunc(list, func(r egress.PortRange) bool { return r.Contains(port) })
}

// policies renders a chain for each policy.
func (b *builder) policies() {
	done := map[string]bool{}
	for _, s := range b.Sandboxes {
		p := b.planOf(s)
		if done[p.id] {
			continue
		}
		done[p.id] = true
		b.plan(p)
	}
}

func (b *builder) plan(p *plan) {
	yes := b.inet.chain(p.allowedChain(), "")
	if b.Config.LogGroup != 0 {
		yes.add("", "limit rate 200/second burst 1000 packets log prefix %s group %d", quote("allow "+rulePolicy), b.Config.LogGroup)
	}
	yes.add("", "ct mark set 0x%08x accept", p.mark)
	policies := p.all()
	for i, q := range policies {
		next := "goto " + p.allowedChain()
		if i+1 < len(policies) {
			next = "goto " + p.chain(i+1)
		}
		b.policyChain(p, q, i, next)
	}
	b.redirectChain(p)
	b.shapeChain(p)
}

const flowKey = "meta l4proto . th dport"

// policyChain renders one policy without its layers, for packets that do not
// belong to an allowed flow.
func (b *builder) policyChain(p *plan, q *egress.Policy, i int, next string) {
	c := b.inet.chain(p.chain(i), "")
	no := b.deny(rulePolicy)
	if i == 0 {
		b.flowLimit(p, c)
		for _, f := range families {
			for _, set := range []string{"learned", "ranges"} {
				c.add("learned", "%s saddr . %s daddr . %s vmap @%s%s", f.ip, f.ip, flowKey, set, f.v)
			}
		}
	}
	for _, f := range families {
		if set := b.addrSet(p.chain(i)+"_deny"+f.v, f, q, false); set != "" {
			c.add("policy.deny", "%s daddr . %s @%s %s", f.ip, flowKey, set, no)
		}
	}
	if set := b.isatapSet(p.chain(i)+"_deny6_isatap", q); set != "" {
		c.add("policy.deny", isatapAddr+" ip6 daddr & ::ffff:ffff . %s @%s %s", flowKey, set, no)
	}
	if ports := p.deniedNamePorts(i); i > 0 && len(ports) > 0 || i == 0 && deniesAny(q) {
		// TCP was redirected; the name in UDP cannot be read.
		c.add("name.unread", "meta l4proto { tcp, udp } th dport { %s } %s", portList(ports), no)
	}
	switch q.Mode() {
	case agentlab.NetworkNAT:
		if set := b.portSet(p.chain(i)+"_ports", q); set != "" {
			c.add(egress.RulePorts, "%s != @%s %s", flowKey, set, no)
		}
		c.add("", "%s", next)
		return
	case agentlab.NetworkAllowlist:
		for _, f := range families {
			if set := b.addrSet(p.chain(i)+"_allow"+f.v, f, q, true); set != "" {
				c.add("policy.allow", "%s daddr . %s @%s %s", f.ip, flowKey, set, next)
			}
		}
	}
	c.add("policy.mode", "%s", no)
}

func deniesAny(q *egress.Policy) bool { return deniesNames(q, 80) || deniesNames(q, 443) }

// flowLimit denies flows above the limit of the policy.
func (b *builder) flowLimit(p *plan, c *chain) {
	most := p.limits.Flows
	if most == 0 {
		most = defaultFlows
	}
	for _, f := range families {
		name := "f_" + p.id + "_" + f.v
		b.inet.set(set{name: name, key: f.addr, flags: "dynamic", size: maxSandboxes})
		c.add(egress.RuleLimit, "meta nfproto ipv%s add @%s { %s saddr ct count over %d } %s", f.v, name, f.ip, most, b.deny(egress.RuleLimit))
	}
}

// redirectChain redirects the flows of a policy with denied names to the
// proxy, except those that are decided by address or port.
func (b *builder) redirectChain(p *plan) {
	if !p.redirectsAll() {
		return
	}
	c := b.inet.chain("r_"+p.id, "")
	what := ""
	for i, q := range p.all() {
		for _, f := range families {
			if b.has(p.chain(i) + "_deny" + f.v) {
				c.add("", "%s daddr . %s @%s accept", f.ip, flowKey, p.chain(i)+"_deny"+f.v)
			}
		}
		if b.has(p.chain(i) + "_ports") {
			c.add("", "%s != @%s_ports accept", flowKey, p.chain(i))
		}
		if q.Mode() == agentlab.NetworkAllowlist && what == "" {
			what = p.chain(i) + "_allow"
		}
		if q.Mode() == agentlab.NetworkOff {
			return
		}
	}
	ports := portList(p.deniedNamePorts(0))
	if what == "" {
		c.add(ruleRedirect, "tcp dport { %s } redirect to :%d", ports, b.Config.ProxyPort)
		return
	}
	for _, f := range families {
		if b.has(what + f.v) {
			c.add(ruleRedirect, "tcp dport { %s } %s daddr . %s @%s%s redirect to :%d", ports, f.ip, flowKey, what, f.v, b.Config.ProxyPort)
		}
	}
}

// has reports whether a set is already declared.
func (b *builder) has(name string) bool {
	return slices.ContainsFunc(b.inet.sets, func(s *set) bool { return s.name == name })
}

// shapeChain drops packets above the bandwidth; TCP then slows down.
func (b *builder) shapeChain(p *plan) {
	if p.limits.BandwidthMbps <= 0 {
		return
	}
	c := b.inet.chain("s_"+p.id, "")
	kbytes := p.limits.BandwidthMbps * 125
	for _, f := range families {
		for _, way := range []struct{ name, iface, addr string }{{"up", "iifname", "saddr"}, {"down", "oifname", "daddr"}} {
			name := fmt.Sprintf("s_%s_%s%s", p.id, way.name, f.v)
			b.inet.set(set{name: name, key: f.addr, flags: "dynamic", size: maxSandboxes})
			c.add("limit.bandwidth", "%s %s meta nfproto ipv%s update @%s { %s %s limit rate over %d kbytes/second burst %d kbytes } drop",
				way.iface, quoted(b.Config.Bridge), f.v, name, f.ip, way.addr, kbytes, max(kbytes/4, 64))
		}
	}
}

// portSet declares the set of ports of a policy in mode nat. It returns "" if
// the policy has none.
func (b *builder) portSet(name string, q *egress.Policy) string {
	if len(q.Ports()) == 0 {
		return ""
	}
	var cover coverage
	for _, s := range q.Ports() {
		cover.add(s.Proto, []egress.PortRange{s.Range})
	}
	s := b.inet.set(set{name: name, key: "inet_proto . inet_service", flags: "interval"})
	for _, k := range cover.keys(v4, v6) {
		s.add("", k, "", "")
	}
	return name
}

// addrSet declares the set of a policy's allow or deny rules for addresses. It
// returns "" if there are none.
func (b *builder) addrSet(name string, f family, q *egress.Policy, allow bool) string {
	var rules []egress.Rule
	for _, r := range q.Rules() {
		if r.Allow != allow || r.Domain != "" {
			continue
		}
		if !allow && f == v6 && r.Prefix.Addr().Is4() {
			r.Prefix = nat64(r.Prefix) // denied in this form too
		}
		if f.has(r.Prefix.Addr()) {
			rules = append(rules, r)
		}
	}
	return b.ruleSet(name, f, rules)
}

// isatapSet declares the set of deny rules for IPv4 addresses in ISATAP
// addresses. It returns "" if there are none.
func (b *builder) isatapSet(name string, q *egress.Policy) string {
	var rules []egress.Rule
	for _, r := range q.Rules() {
		if !r.Allow && r.Domain == "" && r.Prefix.Addr().Is4() {
			r.Prefix = embedInIPv6(r.Prefix)
			rules = append(rules, r)
		}
	}
	return b.ruleSet(name, v6, rules)
}

// ruleSet declares the set of what rules for addresses cover. It returns "" if
// there are none.
func (b *builder) ruleSet(name string, f family, rules []egress.Rule) string {
	if len(rules) == 0 {
		return ""
	}
	s := b.inet.set(set{name: name, key: f.addr + " . inet_proto . inet_service", flags: "interval"})
	for _, part := range partition(rules) {
		for _, k := range part.cover.keys(f) {
			s.add("", part.addrs.key()+" . "+k, "", "")
		}
	}
	return name
}

// coverage is a set of protocols and ports.
type coverage struct{ tcp, udp, icmp []egress.PortRange }

var allPorts = egress.PortRange{Lo: 0, Hi: 65535}

func (c *coverage) add(proto egress.Proto, ports []egress.PortRange) {
	if len(ports) == 0 || proto == egress.ICMP || proto == "" {
		ports = []egress.PortRange{allPorts}
	}
	if proto == egress.TCP || proto == "" {
		c.tcp = append(c.tcp, ports...)
	}
	if proto == egress.UDP || proto == "" {
		c.udp = append(c.udp, ports...)
	}
	if proto == egress.ICMP || proto == "" {
		// ICMP has a checksum at the position of the port, so all values
		// match.
		c.icmp = append(c.icmp, allPorts)
	}
}

// keys returns the coverage as parts of elements that do not overlap.
func (c *coverage) keys(fams ...family) []string {
	var out []string
	put := func(proto string, list []egress.PortRange) {
		for _, r := range merge(list) {
			out = append(out, proto+" . "+r.String())
		}
	}
	put("tcp", c.tcp)
	put("udp", c.udp)
	for _, f := range fams {
		put(map[string]string{"4": "icmp", "6": "ipv6-icmp"}[f.v], c.icmp)
	}
	return out
}

// merge joins ranges that overlap or are adjacent.
func merge(list []egress.PortRange) []egress.PortRange {
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b egress.PortRange) int { return int(a.Lo) - int(b.Lo) })
	var out []egress.PortRange
	for _, r := range list {
		if n := len(out); n > 0 && int(r.Lo) <= int(out[n-1].Hi)+1 {
			out[n-1].Hi = max(out[n-1].Hi, r.Hi)
			continue
		}
		out = append(out, r)
	}
	return out
}

// part is a range of addresses with the same matching rules.
type part struct {
	addrs interval
	cover coverage
}

// partition splits the ranges of rules where any of them begins or ends, so
// that the parts do not overlap, as the kernel requires. Of two networks, one
// contains the other or they are disjoint, so a stack is enough for the
// enclosing ones.
func partition(rules []egress.Rule) []part {
	rules = slices.Clone(rules)
	slices.SortStableFunc(rules, func(a, b egress.Rule) int {
		if c := a.Prefix.Addr().Compare(b.Prefix.Addr()); c != 0 {
			return c
		}
		return a.Prefix.Bits() - b.Prefix.Bits()
	})
	var out []part
	var stack []egress.Rule
	var from netip.Addr // the next address of the stack's top that is not in a part
	emit := func(to netip.Addr) {
		if len(stack) == 0 || !from.IsValid() || to.Less(from) {
			return
		}
		p := part{addrs: interval{lo: from, hi: to}}
		for _, r := range stack {
			p.cover.add(r.Proto, r.Ports)
		}
		out = append(out, p)
	}
	pop := func() {
		end := lastAddr(stack[len(stack)-1].Prefix)
		emit(end)
		stack = stack[:len(stack)-1]
		from = end.Next()
	}
	for _, r := range rules {
		for len(stack) > 0 && lastAddr(stack[len(stack)-1].Prefix).Less(r.Prefix.Addr()) {
			pop()
		}
		if len(stack) > 0 && from.Less(r.Prefix.Addr()) {
			emit(r.Prefix.Addr().Prev())
		}
		stack, from = append(stack, r), r.Prefix.Addr()
	}
	for len(stack) > 0 {
		pop()
	}
	return out
}

// describe returns a one-line description for users.
func (p *plan) describe() string {
	return fmt.Sprintf("%s (%s)", p.id, strings.TrimSpace(p.policy.String()))
}
