package nft

import (
	"net/netip"
	"slices"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

// denial is an address range with the rule that denies it.
type denial struct{ key, rule string }

// interval is a range of addresses that includes both ends.
type interval struct {
	lo, hi netip.Addr
	rule   string
}

func (r interval) key() string {
	if r.lo == r.hi {
		return r.lo.String()
	}
	return r.lo.String() + "-" + r.hi.String()
}

// alwaysDenied returns the addresses that no policy can allow as ranges that do not
// overlap, as a verdict map requires. If ranges of the list overlap, the first
// that contains an address decides, as in package egress.
func (b *builder) alwaysDenied(f family) []denial {
	var list []interval
	for _, d := range egress.Denials() {
		if f.has(d.Prefix.Addr()) {
			list = append(list, interval{d.Prefix.Addr(), lastAddr(d.Prefix), d.Rule})
		}
	}
	for _, n := range b.Config.Translators {
		if f.has(n.Addr()) {
			list = append(list, interval{n.Addr(), lastAddr(n), egress.RuleTransition})
		}
	}
	if f == v6 {
		for _, a := range b.Config.HostAddrs {
			n := nat64(netip.PrefixFrom(a, a.BitLen()))
			list = append(list, interval{n.Addr(), lastAddr(n), egress.RuleHostAddr})
		}
	}
	for _, n := range b.Config.HostNets {
		n = n.Masked()
		if f == v6 && n.Addr().Is4() {
			n = nat64(n)
		}
		if f.has(n.Addr()) {
			list = append(list, interval{n.Addr(), lastAddr(n), ruleLAN})
		}
	}
	var out []denial
	for _, r := range disjoint(list) {
		out = append(out, denial{r.key(), r.rule})
	}
	return out
}

// nat64 returns the NAT64 form of an IPv4 network.
func nat64(n netip.Prefix) netip.Prefix {
	b := [16]byte{1: 0x64, 2: 0xff, 3: 0x9b}
	v4 := n.Addr().As4()
	copy(b[12:], v4[:])
	return netip.PrefixFrom(netip.AddrFrom16(b), 96+n.Bits())
}

// embedInIPv6 returns an IPv4 network as the last bits of an IPv6 address, as in
// ISATAP addresses.
func embedInIPv6(n netip.Prefix) netip.Prefix {
	var b [16]byte
	v4 := n.Addr().As4()
	copy(b[12:], v4[:])
	return netip.PrefixFrom(netip.AddrFrom16(b), 96+n.Bits())
}

// lowMask returns the mask of embedInIPv6.
func lowMask(n netip.Prefix) netip.Addr {
	all := netip.AddrFrom4([4]byte{255, 255, 255, 255})
	return embedInIPv6(netip.PrefixFrom(all, n.Bits()).Masked()).Addr()
}

// lastAddr returns the highest address of a network.
func lastAddr(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// disjoint splits ranges so that none overlap. Addresses of several ranges
// stay in the first of them.
func disjoint(list []interval) []interval {
	var out []interval
	for _, r := range list {
		rest := []interval{r}
		for _, taken := range out {
			var left []interval
			for _, p := range rest {
				left = append(left, minus(p, taken)...)
			}
			rest = left
		}
		out = append(out, rest...)
	}
	slices.SortFunc(out, func(a, b interval) int { return a.lo.Compare(b.lo) })
	return out
}

// minus returns a without b.
func minus(a, b interval) []interval {
	if b.hi.Less(a.lo) || a.hi.Less(b.lo) {
		return []interval{a}
	}
	var out []interval
	if a.lo.Less(b.lo) {
		out = append(out, interval{a.lo, b.lo.Prev(), a.rule})
	}
	if b.hi.Less(a.hi) {
		out = append(out, interval{b.hi.Next(), a.hi, a.rule})
	}
	return out
}

// isatapAddr matches addresses that end in an IPv4 address, under any prefix.
const isatapAddr = "ip6 daddr & ::fdff:ffff:0:0 == ::5efe:0:0"

// alwaysRules denies addresses that no policy can allow. IPv6 addresses that
// contain an IPv4 address under any prefix cannot be described by ranges; only
// these are matched by a mask.
func (b *builder) alwaysRules(c *chain) {
	c.add("", "ip daddr vmap @always4")
	c.add("", isatapAddr+" jump isatap")
	c.add("", "ip6 daddr vmap @always6")
	isatap := b.inet.chain("isatap", "")
	for _, d := range egress.MaskedDenials() {
		isatap.add(d.Rule, "ip6 daddr & %s == %s %s", d.Mask, d.Value, b.deny(d.Rule))
	}
	for _, a := range b.Config.HostAddrs {
		n := netip.PrefixFrom(a, a.BitLen())
		isatap.add(egress.RuleHostAddr, "ip6 daddr & %s == %s %s", lowMask(n), embedInIPv6(n).Addr(), b.deny(egress.RuleHostAddr))
	}
	for _, n := range b.Config.HostNets {
		if n = n.Masked(); n.Addr().Is4() {
			isatap.add(ruleLAN, "ip6 daddr & %s == %s %s", lowMask(n), embedInIPv6(n).Addr(), b.deny(ruleLAN))
		}
	}
}
