package egress

import (
	"net/netip"
	"strings"
)

// ruleTable finds the rules for a name or an address without a search of all
// rules: names by maps, addresses by one map lookup per prefix length.
type ruleTable struct {
	exact, below map[string][]int // names without a final dot
	prefixes     map[netip.Prefix][]int
	bits4, bits6 []int // the prefix lengths in use
}

func newRuleTable() ruleTable {
	return ruleTable{exact: map[string][]int{}, below: map[string][]int{}, prefixes: map[netip.Prefix][]int{}}
}

func (t *ruleTable) add(r *Rule, index int) {
	switch {
	case r.Domain != "" && r.Wildcard:
		t.below[r.Domain] = append(t.below[r.Domain], index)
	case r.Domain != "":
		t.exact[r.Domain] = append(t.exact[r.Domain], index)
	default:
		if len(t.prefixes[r.Prefix]) == 0 {
			t.addBits(r.Prefix)
		}
		t.prefixes[r.Prefix] = append(t.prefixes[r.Prefix], index)
	}
}

func (t *ruleTable) addBits(p netip.Prefix) {
	list := &t.bits4
	if p.Addr().Is6() {
		list = &t.bits6
	}
	for _, b := range *list {
		if b == p.Bits() {
			return
		}
	}
	*list = append(*list, p.Bits())
}

// byAddr calls fn with the rules for an address, until fn returns false.
func (t *ruleTable) byAddr(a netip.Addr, fn func(index int) bool) {
	if !a.IsValid() {
		return
	}
	a = a.Unmap()
	bits := t.bits4
	if a.Is6() {
		bits = t.bits6
	}
	for _, b := range bits {
		p, err := a.Prefix(b)
		if err != nil {
			continue
		}
		for _, i := range t.prefixes[p] {
			if !fn(i) {
				return
			}
		}
	}
}

// byName calls fn with the rules for a name, until fn returns false.
func (t *ruleTable) byName(name string, fn func(index int) bool) {
	name = strings.TrimSuffix(name, ".")
	for _, i := range t.exact[name] {
		if !fn(i) {
			return
		}
	}
	if len(t.below) == 0 {
		return
	}
	for {
		_, parent, ok := strings.Cut(name, ".")
		if !ok {
			return
		}
		for _, i := range t.below[parent] {
			if !fn(i) {
				return
			}
		}
		name = parent
	}
}
