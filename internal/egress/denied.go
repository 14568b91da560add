package egress

import (
	"encoding/binary"
	"net/netip"
)

// Rules of the list that applies in every mode. The names are stable.
const (
	RuleInvalid       = "always.invalid"       // not an address, or one with a zone
	RuleUnspecified   = "always.unspecified"   // 0.0.0.0/8, ::
	RuleLoopback      = "always.loopback"      // 127.0.0.0/8, ::1
	RulePrivate       = "always.private"       // RFC 1918
	RuleCGNAT         = "always.cgnat"         // 100.64.0.0/10, used by tailnets
	RuleTailnet       = "always.tailnet"       // fd7a:115c:a1e0::/48
	RuleLinkLocal     = "always.linklocal"     // 169.254.0.0/16, fe80::/10
	RuleMetadata      = "always.metadata"      // cloud metadata services
	RuleULA           = "always.ula"           // fc00::/7
	RuleSiteLocal     = "always.sitelocal"     // fec0::/10
	RuleMulticast     = "always.multicast"     // 224.0.0.0/4, ff00::/8
	RuleBroadcast     = "always.broadcast"     // 255.255.255.255
	RuleDocumentation = "always.documentation" // TEST-NET-1 to 3, 2001:db8::/32, 3fff::/20
	RuleBenchmark     = "always.benchmark"     // 198.18.0.0/15, 2001:2::/48
	RuleTransition    = "always.transition"    // tunnels that carry IPv4 in IPv6, with unknown destinations
	RuleReserved      = "always.reserved"      // everything else that is not public unicast
)

type denial struct {
	prefix netip.Prefix
	rule   string
}

// denials4 is searched in order, so single addresses come before the ranges
// that contain them.
var denials4 = compile(
	"169.254.169.254/32", RuleMetadata, // most clouds
	"169.254.170.2/32", RuleMetadata, // AWS container credentials
	"169.254.170.23/32", RuleMetadata, // AWS pod identity
	"100.100.100.200/32", RuleMetadata, // Alibaba Cloud
	"168.63.129.16/32", RuleMetadata, // Azure; a public address that the host answers
	"192.0.0.192/32", RuleMetadata, // Oracle Cloud
	"0.0.0.0/8", RuleUnspecified,
	"10.0.0.0/8", RulePrivate,
	"100.64.0.0/10", RuleCGNAT,
	"127.0.0.0/8", RuleLoopback,
	"169.254.0.0/16", RuleLinkLocal,
	"172.16.0.0/12", RulePrivate,
	"192.0.0.0/24", RuleReserved,
	"192.0.2.0/24", RuleDocumentation,
	"192.88.99.0/24", RuleTransition,
	"192.168.0.0/16", RulePrivate,
	"198.18.0.0/15", RuleBenchmark,
	"198.51.100.0/24", RuleDocumentation,
	"203.0.113.0/24", RuleDocumentation,
	"224.0.0.0/4", RuleMulticast,
	"255.255.255.255/32", RuleBroadcast,
	"240.0.0.0/4", RuleReserved,
)

// denials6 applies after every known embedding of IPv4 was checked. An address
// in none of these and not in 2000::/3 is reserved.
var denials6 = compile(
	"fd00:ec2::254/128", RuleMetadata, // AWS
	"fd20:ce::254/128", RuleMetadata, // Google Cloud
	"::/128", RuleUnspecified,
	"::1/128", RuleLoopback,
	"::/96", RuleTransition, // IPv4-compatible, deprecated
	"::ffff:0:0:0/96", RuleTransition, // SIIT
	"64:ff9b:1::/48", RuleTransition, // local NAT64: may translate to anything
	"100::/64", RuleReserved, // discard-only
	"2001::/32", RuleTransition, // Teredo
	"2001:2::/48", RuleBenchmark,
	"2001:db8::/32", RuleDocumentation,
	"2001::/23", RuleReserved, // IETF protocol assignments
	"2002::/16", RuleTransition, // 6to4
	"3fff::/20", RuleDocumentation,
	"fd7a:115c:a1e0::/48", RuleTailnet,
	"fc00::/7", RuleULA,
	"fe80::/10", RuleLinkLocal,
	"fec0::/10", RuleSiteLocal,
	"ff00::/8", RuleMulticast,
)

var globalUnicast6 = netip.MustParsePrefix("2000::/3")

func compile(pairs ...string) []denial {
	out := make([]denial, 0, len(pairs)/2)
	for i := 0; i+1 < len(pairs); i += 2 {
		out = append(out, denial{netip.MustParsePrefix(pairs[i]), pairs[i+1]})
	}
	return out
}

func match(list []denial, a netip.Addr) (string, bool) {
	for _, d := range list {
		if d.prefix.Contains(a) {
			return d.rule, true
		}
	}
	return "", false
}

// AlwaysDenied reports whether no policy can allow a, and by which rule. For
// an IPv6 address that contains an IPv4 address, the IPv4 address decides: if
// it is denied, the rule is that of the IPv4 address.
func AlwaysDenied(a netip.Addr) (rule string, denied bool) {
	rule, denied = alwaysDenied(a)
	if denied && rule != RuleInvalid && Dropped(rule) {
		return "", false
	}
	return rule, denied
}

func alwaysDenied(a netip.Addr) (rule string, denied bool) {
	if !a.IsValid() || a.Zone() != "" {
		return RuleInvalid, true
	}
	a = a.Unmap()
	if a.Is4() {
		return match(denials4, a)
	}
	for _, inner := range embedded(a) {
		if rule, denied := match(denials4, inner); denied {
			return rule, true
		}
	}
	if wellKnownNAT64.Contains(a) {
		return "", false // the inner address is public
	}
	if rule, denied := match(denials6, a); denied {
		return rule, true
	}
	if !globalUnicast6.Contains(a) {
		return RuleReserved, true
	}
	return "", false
}

var (
	wellKnownNAT64 = netip.MustParsePrefix("64:ff9b::/96")
	compatible     = netip.MustParsePrefix("::/96")
	siit           = netip.MustParsePrefix("::ffff:0:0:0/96")
	teredo         = netip.MustParsePrefix("2001::/32")
	sixToFour      = netip.MustParsePrefix("2002::/16")
)

// Embedded returns the IPv4 addresses that an IPv6 address is known to
// contain, by NAT64, 6to4, Teredo, ISATAP or IPv4-compatible and -translated
// notation.
func Embedded(a netip.Addr) []netip.Addr {
	if a = a.Unmap(); a.Is4() {
		return nil
	}
	return embedded(a)
}

// embedded returns the IPv4 addresses that an IPv6 address is known to
// contain.
func embedded(a netip.Addr) []netip.Addr {
	b := a.As16()
	last := netip.AddrFrom4([4]byte(b[12:16]))
	switch {
	case a == netip.IPv6Unspecified() || a == netip.IPv6Loopback():
		return nil
	case wellKnownNAT64.Contains(a), compatible.Contains(a), siit.Contains(a):
		return []netip.Addr{last}
	case teredo.Contains(a):
		client := binary.BigEndian.Uint32(b[12:16]) ^ 0xffffffff
		var c [4]byte
		binary.BigEndian.PutUint32(c[:], client)
		return []netip.Addr{netip.AddrFrom4([4]byte(b[4:8])), netip.AddrFrom4(c)}
	case sixToFour.Contains(a):
		return []netip.Addr{netip.AddrFrom4([4]byte(b[2:6]))}
	case b[8]&^0x02 == 0 && b[9] == 0 && b[10] == 0x5e && b[11] == 0xfe:
		return []netip.Addr{last} // ISATAP, under any prefix
	}
	return nil
}
