package nft

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

// Learned is an address that a sandbox was told by our DNS server.
type Learned struct {
	Sandbox Sandbox
	Addr    netip.Addr
	Names   []string // canonical; all that stand for Addr now
	TTL     time.Duration
}

// guest is the sandbox's own address of the same family.
func (l Learned) guest() netip.Addr {
	if l.Addr.Unmap().Is4() {
		return l.Sandbox.IPv4
	}
	return l.Sandbox.IPv6
}

// elements are what the address may be used for, as decided by the sandbox's
// whole policy with all its layers: an element where the names make another
// decision than the address alone, and one for the proxy where the flow must
// show a name.
func (l Learned) elements(p *plan) []binding {
	addr := l.Addr.Unmap()
	if !l.guest().IsValid() || l.TTL <= 0 {
		return nil
	}
	f := v6
	if addr.Is4() {
		f = v4
	}
	ttl := fmt.Sprintf("timeout %ds", int(l.TTL/time.Second)+1)
	pair := fmt.Sprintf("%s . %s", l.guest(), addr)
	var out []binding
	put := func(single, ranged string, key string, r egress.PortRange, verdict string) {
		if single != "" && r.Hi-r.Lo < maxExpanded {
			for port := int(r.Lo); port <= int(r.Hi); port++ {
				out = append(out, binding{"inet", single + f.v, fmt.Sprintf("%s . %d", key, port), verdict, ttl})
			}
			return
		}
		out = append(out, binding{"inet", ranged + f.v, fmt.Sprintf("%s . %s", key, r), verdict, ttl})
	}
	for _, d := range p.decisions(addr, l.Names) {
		proto := string(d.proto)
		if d.proto == egress.ICMP && f == v6 {
			proto = "ipv6-icmp"
		}
		switch d.what {
		case showName:
			put("named", "namedranges", pair, d.ports, "")
		case allowed:
			put("learned", "ranges", pair+" . "+proto, d.ports, "goto "+p.yes())
		case forbidden:
			put("learned", "ranges", pair+" . "+proto, d.ports, "goto "+denyChain(rulePolicy))
		}
	}
	return out
}

// maxExpanded is up to how many ports of a range are elements of their own,
// in a set that costs the same for any number of elements.
const maxExpanded = 16

type outcome int

const (
	unchanged outcome = iota // the address alone decides
	allowed
	forbidden
	showName
)

type decision struct {
	proto egress.Proto
	ports egress.PortRange
	what  outcome
}

// decisions asks the policy about every port, once for each range of ports
// between which no rule makes a difference.
func (p *plan) decisions(addr netip.Addr, names []string) []decision {
	var out []decision
	for _, proto := range []egress.Proto{egress.TCP, egress.UDP, egress.ICMP} {
		for _, r := range p.segments[proto] {
			flow := egress.Flow{Proto: proto, Dst: netip.AddrPortFrom(addr, r.Lo)}
			plain := p.policy.Decide(flow)
			flow.Names = names
			v := p.policy.Decide(flow)
			d := decision{proto, r, unchanged}
			switch {
			case v.Allow && v.NeedName:
				d.what = showName
			case v.Allow && !plain.Allow:
				d.what = allowed
			case !v.Allow && plain.Allow:
				d.what = forbidden
			}
			if n := len(out); n > 0 && out[n-1].proto == proto && out[n-1].what == d.what {
				out[n-1].ports.Hi = r.Hi
				continue
			}
			out = append(out, d)
		}
	}
	return slices.DeleteFunc(out, func(d decision) bool { return d.what == unchanged })
}

// segments cuts the ports where any rule of the policy or of its layers, or
// the language itself, makes a difference.
func segments(p *egress.Policy, proto egress.Proto) []egress.PortRange {
	if proto == egress.ICMP {
		return []egress.PortRange{allPorts}
	}
	cuts := []int{0, 22, 23, 53, 54, 80, 81, 443, 444, 65536}
	for _, q := range append([]*egress.Policy{p}, p.Layers()...) {
		for _, r := range q.Rules() {
			for _, x := range r.Ports {
				cuts = append(cuts, int(x.Lo), int(x.Hi)+1)
			}
		}
		for _, s := range q.Ports() {
			cuts = append(cuts, int(s.Range.Lo), int(s.Range.Hi)+1)
		}
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	var out []egress.PortRange
	for i := range len(cuts) - 1 {
		out = append(out, egress.PortRange{Lo: uint16(cuts[i]), Hi: uint16(cuts[i+1] - 1)}) //nolint:gosec // 0 to 65535
	}
	return out
}
