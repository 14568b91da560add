package egress

import "net/netip"

// About calls fn with each rule of the policy and of its layers that can apply
// to flows to an address, which the canonical names resolve to, until fn
// returns false. It passes a rule once for each of the names that the rule
// matches.
func (p *Policy) About(addr netip.Addr, names []string, fn func(*Rule) bool) {
	for _, q := range p.all() {
		if !q.about(addr, names, fn) {
			return
		}
	}
}

func (p *Policy) about(addr netip.Addr, names []string, fn func(*Rule) bool) bool {
	more := true
	visit := func(i int) bool {
		more = more && fn(&p.rules[i])
		return more
	}
	for _, t := range []*ruleTable{&p.deny, &p.allow} {
		t.byAddr(addr, visit)
		for _, inner := range embedded(addr.Unmap()) {
			t.byAddr(inner, visit)
		}
		for _, n := range names {
			if t.byName(n, visit); !more {
				return false
			}
		}
	}
	return more
}
