package egress

import (
	"net/netip"
	"sync"
)

// Denial is one range of addresses that no policy allows.
type Denial struct {
	Prefix netip.Prefix
	Rule   string
}

// MaskedDenial is a set of IPv6 addresses that no policy allows and that no
// prefix describes: all a with a & Mask == Value.
type MaskedDenial struct {
	Value, Mask netip.Addr
	Rule        string
}

// Denials returns the list of AlwaysDenied, for enforcers that load rules
// instead of calling Decide for each flow. Ranges overlap; the first that
// contains an address determines the rule. IPv6 addresses that contain IPv4
// ones under any prefix are in MaskedDenials. Callers must not change the list, which
// is made once: every policy is compiled with it.
func Denials() []Denial { return allDenials() }

var allDenials = sync.OnceValue(func() []Denial {
	var out []Denial
	add := func(p netip.Prefix, rule string) {
		if !Dropped(rule) {
			out = append(out, Denial{p, rule})
		}
	}
	for _, d := range denials4 {
		add(d.prefix, d.rule)
	}
	for _, d := range denials4 { // what NAT64 would translate to IPv4
		b := wellKnownNAT64.Addr().As16()
		v4 := d.prefix.Addr().As4()
		copy(b[12:], v4[:])
		add(netip.PrefixFrom(netip.AddrFrom16(b), 96+d.prefix.Bits()), d.rule)
	}
	for _, d := range denials6 {
		add(d.prefix, d.rule)
	}
	for _, p := range without(netip.MustParsePrefix("::/0"), globalUnicast6, wellKnownNAT64) {
		add(p, RuleReserved)
	}
	return out
})

// MaskedDenials returns the rest of the list: ISATAP addresses, which contain
// IPv4 addresses under any prefix.
func MaskedDenials() []MaskedDenial {
	var out []MaskedDenial
	for _, d := range denials4 {
		if Dropped(d.rule) {
			continue
		}
		value := [16]byte{10: 0x5e, 11: 0xfe}
		mask := [16]byte{8: 0xfd, 9: 0xff, 10: 0xff, 11: 0xff}
		v4 := d.prefix.Addr().As4()
		copy(value[12:], v4[:])
		for i := range d.prefix.Bits() {
			mask[12+i/8] |= 0x80 >> (i % 8)
		}
		out = append(out, MaskedDenial{netip.AddrFrom16(value), netip.AddrFrom16(mask), d.rule})
	}
	return out
}

// without returns the prefixes that cover p except the holes.
func without(p netip.Prefix, holes ...netip.Prefix) []netip.Prefix {
	overlaps := false
	for _, h := range holes {
		if h.Bits() <= p.Bits() && h.Contains(p.Addr()) {
			return nil
		}
		overlaps = overlaps || h.Overlaps(p)
	}
	if !overlaps {
		return []netip.Prefix{p}
	}
	lower := netip.PrefixFrom(p.Addr(), p.Bits()+1)
	b := p.Addr().AsSlice()
	b[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	addr, _ := netip.AddrFromSlice(b)
	upper := netip.PrefixFrom(addr, p.Bits()+1)
	return append(without(lower, holes...), without(upper, holes...)...)
}
