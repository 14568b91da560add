package nft

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

// Learned is an address that a sandbox got from AgentLab's DNS server.
type Learned struct {
	Sandbox Sandbox
	Addr    netip.Addr
	Names   []string // canonical; all that currently resolve to Addr
	TTL     time.Duration
}

// guest returns the sandbox's own address of the same family.
func (l Learned) guest() netip.Addr {
	if l.Addr.Unmap().Is4() {
		return l.Sandbox.IPv4
	}
	return l.Sandbox.IPv6
}

// elements returns the set elements for the address by the decision of the
// sandbox's whole policy with all its layers: an element where the names
// change the decision for the address alone, and one for the proxy where a
// flow needs a name. An address that would need too many elements is denied.
// weight is their cost, in elements and in work.
func (l Learned) elements(p *plan) (out []binding, weight int) {
	addr := l.Addr.Unmap()
	if !l.guest().IsValid() || l.TTL <= 0 {
		return nil, 0
	}
	if egress.Openable(addr) {
		return l.private(p), 1
	}
	list, looks := p.decisions(addr, l.Names)
	if out = l.bindings(p, list); len(out) > maxElements {
		out = l.bindings(p, denyAll)
	}
	return out, max(len(out), looks/checksPerElement)
}

// private returns the elements of an address that the operator allows by name:
// flows to it are redirected to the proxy, which checks the policy again.
func (l Learned) private(p *plan) (out []binding) {
	for _, t := range p.policy.Private() {
		flow := egress.Flow{Proto: egress.TCP, Dst: netip.AddrPortFrom(l.Addr.Unmap(), t.Port), Names: l.Names}
		byAddr := flow // always allowed, not only while an answer is valid
		byAddr.Names = nil
		if slices.Contains(l.Names, t.Name) && p.policy.Decide(flow).Allow && !p.policy.Decide(byAddr).Allow {
			out = append(out, privateBinding(l, t.Port, fmt.Sprintf("timeout %ds", int(l.TTL/time.Second)+1)))
		}
	}
	return slices.Compact(out)
}

// privateBinding returns the element that redirects a sandbox's flows to a
// port of a private address, or of the gateway, to the proxy.
func privateBinding(l Learned, port uint16, options string) binding {
	f := v6
	if l.Addr.Unmap().Is4() {
		f = v4
	}
	return binding{"inet", "private" + f.v, fmt.Sprintf("%s . %s . %d", l.guest(), l.Addr.Unmap(), port), "", options}
}

// Limits for one address. A guest may narrow its own policy, and so choose how
// many rules match an address and how they split its ports.
const (
	maxElements      = 256
	maxChecks        = 1 << 17 // checks of single rules; some milliseconds
	minChecks        = 16      // minimum number of checks per rule for the address
	checksPerElement = 512
)

// denyAll denies an address completely, regardless of the rules for addresses.
var denyAll = []decision{{egress.TCP, allPorts, forbidden}, {egress.UDP, allPorts, forbidden}, {egress.ICMP, allPorts, forbidden}}

func (l Learned) bindings(p *plan, list []decision) (out []binding) {
	addr := l.Addr.Unmap()
	f := v6
	if addr.Is4() {
		f = v4
	}
	ttl := fmt.Sprintf("timeout %ds", int(l.TTL/time.Second)+1)
	pair := fmt.Sprintf("%s . %s", l.guest(), addr)
	put := func(single, ranged string, key string, r egress.PortRange, verdict string) {
		if single != "" && r.Hi-r.Lo < maxExpanded {
			for port := int(r.Lo); port <= int(r.Hi); port++ {
				out = append(out, binding{"inet", single + f.v, fmt.Sprintf("%s . %d", key, port), verdict, ttl})
			}
			return
		}
		out = append(out, binding{"inet", ranged + f.v, fmt.Sprintf("%s . %s", key, r), verdict, ttl})
	}
	for _, d := range list {
		proto := string(d.proto)
		if d.proto == egress.ICMP && f == v6 {
			proto = "ipv6-icmp"
		}
		switch d.what {
		case showName:
			put("named", "namedranges", pair, d.ports, "")
		case allowed:
			put("learned", "ranges", pair+" . "+proto, d.ports, "goto "+p.allowedChain())
		case forbidden:
			put("learned", "ranges", pair+" . "+proto, d.ports, "goto "+denyChain(rulePolicy))
		}
	}
	return out
}

// maxExpanded is the maximum number of ports of a range that become separate
// elements, in a set whose lookup cost does not depend on the number of
// elements.
const maxExpanded = 16

type outcome int

const (
	unchanged outcome = iota // same decision as for the address alone
	allowed
	forbidden
	showName
)

type decision struct {
	proto egress.Proto
	ports egress.PortRange
	what  outcome
}

// decisions returns the decisions of the policy for all ports, once for each
// range of ports with the same matching rules, and how many checks of rules
// that took. It denies the address if there would be too many.
func (p *plan) decisions(addr netip.Addr, names []string) (out []decision, looks int) {
	var ranges []egress.PortRange
	rules := 1
	p.policy.About(addr, names, func(r *egress.Rule) bool {
		rules++
		ranges = append(ranges, r.Ports...)
		return rules < maxChecks/minChecks
	})
	for _, q := range p.all() {
		for _, s := range q.Ports() {
			ranges = append(ranges, s.Range)
		}
	}
	parts := segments(ranges)
	if looks = rules * len(parts) * 2; looks > maxChecks {
		return denyAll, maxChecks
	}
	for _, proto := range []egress.Proto{egress.TCP, egress.UDP, egress.ICMP} {
		cut := parts
		if proto == egress.ICMP {
			cut = []egress.PortRange{allPorts}
		}
		for _, r := range cut {
			d := decision{proto, r, p.decide(egress.Flow{Proto: proto, Dst: netip.AddrPortFrom(addr, r.Lo)}, names)}
			if n := len(out); n > 0 && out[n-1].proto == proto && out[n-1].what == d.what {
				out[n-1].ports.Hi = r.Hi
				continue
			}
			out = append(out, d)
		}
	}
	return slices.DeleteFunc(out, func(d decision) bool { return d.what == unchanged }), looks
}

// decide returns how names change the decision for a flow.
func (p *plan) decide(flow egress.Flow, names []string) outcome {
	plain := p.policy.Decide(flow)
	flow.Names = names
	v := p.policy.Decide(flow)
	switch {
	case v.Allow && v.NeedName:
		return showName
	case v.Allow && !plain.Allow:
		return allowed
	case !v.Allow && plain.Allow:
		return forbidden
	}
	return unchanged
}

// segments splits the ports at the ends of ranges and at ports with a special
// meaning.
func segments(ranges []egress.PortRange) []egress.PortRange {
	cuts := []int{0, 22, 23, 53, 54, 80, 81, 443, 444, 65536}
	for _, r := range ranges {
		cuts = append(cuts, int(r.Lo), int(r.Hi)+1)
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	var out []egress.PortRange
	for i := range len(cuts) - 1 {
		out = append(out, egress.PortRange{Lo: uint16(cuts[i]), Hi: uint16(cuts[i+1] - 1)})
	}
	return out
}
