package gate

import (
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

// local answers questions that must not or need not leave this machine; nil
// means that the question must be forwarded. If rule is not empty, the answer
// is a refusal.
func (g *Gate) local(query *dns.Msg, q dns.Question) (reply *dns.Msg, rule string) {
	name := dns.CanonicalName(q.Name)
	switch {
	case isBareName(name) && isOfHosts(q.Qtype):
		return rcode(query, dns.RcodeNameError), egress.RulePrivate
	case q.Qtype == dns.TypeAAAA && !g.ipv6():
		return new(dns.Msg).SetReply(query), "" // no such record
	case isUnder(name, "in-addr.arpa."), isUnder(name, "ip6.arpa."):
		// Guests must not learn names of hosts on private networks.
		if rule, denied := egress.AlwaysDenied(reverseAddr(name)); denied {
			return rcode(query, dns.RcodeNameError), rule
		}
	}
	return nil, ""
}

// isBareName reports whether a name has no dot in it. For such a name some
// name servers ask the hosts of the local network (LLMNR), or read /etc/hosts.
func isBareName(name string) bool { return dns.CountLabel(name) == 1 }

// isOfHosts excludes question types that are used for top-level domains to
// check signatures.
func isOfHosts(kind uint16) bool {
	switch kind {
	case dns.TypeNS, dns.TypeSOA, dns.TypeDS, dns.TypeDNSKEY:
		return false
	}
	return true
}

// hasEscapedDot reports whether a label contains a dot or a backslash. Such a name
// only looks like one below an allowed name: "a\.example.com" is in com.
func hasEscapedDot(name string) bool {
	return strings.Contains(name, `\.`) || strings.Contains(name, `\\`)
}

func isUnder(name, zone string) bool {
	return name == zone || strings.HasSuffix(name, "."+zone)
}

// reverseAddr returns the address in a name of in-addr.arpa or ip6.arpa;
// missing labels count as zero. It returns the zero Addr if there is none.
func reverseAddr(name string) netip.Addr {
	if rest, ok := strings.CutSuffix(name, "ip6.arpa."); ok {
		return reverse6(dns.SplitDomainName(rest))
	}
	labels := dns.SplitDomainName(strings.TrimSuffix(name, "in-addr.arpa."))
	slices.Reverse(labels)
	var b [4]byte
	if len(labels) > len(b) {
		labels = labels[:len(b)] // RFC 2317 adds labels in front
	}
	for i, l := range labels {
		v, err := strconv.ParseUint(l, 10, 8)
		if err != nil {
			return netip.Addr{}
		}
		b[i] = byte(v)
	}
	return netip.AddrFrom4(b)
}

func reverse6(labels []string) netip.Addr {
	slices.Reverse(labels)
	var b [16]byte
	if len(labels) > 2*len(b) {
		return netip.Addr{}
	}
	for i, l := range labels {
		v, err := strconv.ParseUint(l, 16, 4)
		if err != nil {
			return netip.Addr{}
		}
		b[i/2] |= byte(v) << (4 * (1 - i%2))
	}
	return netip.AddrFrom16(b)
}

// maxAliases limits a chain of CNAME records.
const maxAliases = 16

// maxAddresses limits the addresses in one answer: each costs memory, and work
// before the answer is sent.
const maxAddresses = 64

// aliases returns the names whose addresses an answer may contain: the name of
// the question and those of its chain of CNAME records.
func aliases(name string, answer []dns.RR) []string {
	chain := []string{name}
	for len(chain) < maxAliases {
		next := ""
		for _, rr := range answer {
			c, ok := rr.(*dns.CNAME)
			if ok && dns.CanonicalName(c.Hdr.Name) == chain[len(chain)-1] {
				next = dns.CanonicalName(c.Target)
			}
		}
		if next == "" || slices.Contains(chain, next) {
			break
		}
		chain = append(chain, next)
	}
	return chain
}

// answerFilter selects the records of an answer that a guest may see.
type answerFilter struct {
	aliases        []string
	ipv6           bool
	private        bool                  // the operator allows this name: its private addresses are kept
	withholds      func(netip.Addr) bool // in addition to addresses that no policy allows; nil: none
	answer         []dns.RR
	authority      []dns.RR
	kept, withheld []netip.Addr
	ttl            uint32 // the minimum of the kept address records
}

func (f *answerFilter) filter(m *dns.Msg) {
	f.ttl = uint32(maxTTL / time.Second)
	for _, rr := range m.Answer {
		if kept := f.record(rr); kept != nil {
			f.answer = append(f.answer, capTTL(kept))
		}
	}
	// From the authority section only the records for the lifetime of a
	// negative answer, and their proofs, are useful. The additional section
	// has only hints; it can always be omitted.
	for _, rr := range m.Ns {
		switch rr.(type) {
		case *dns.SOA, *dns.NSEC, *dns.NSEC3, *dns.RRSIG:
			f.authority = append(f.authority, rr)
		}
	}
}

// capTTL limits how long clients use an answer to the time that the gate
// remembers it.
func capTTL(rr dns.RR) dns.RR {
	if most := uint32(maxTTL / time.Second); rr.Header().Ttl > most {
		rr = dns.Copy(rr)
		rr.Header().Ttl = most
	}
	return rr
}

// address decides on one address record.
func (f *answerFilter) address(h *dns.RR_Header, ip net.IP) bool {
	a, ok := netip.AddrFromSlice(ip)
	a = a.Unmap()
	if len(f.kept)+len(f.withheld) >= maxAddresses {
		return false
	}
	if !ok || !slices.Contains(f.aliases, dns.CanonicalName(h.Name)) {
		return false
	}
	keep, withheld := egress.FilterAnswer([]netip.Addr{a})
	switch {
	case f.private && egress.Openable(a):
		keep, withheld = []netip.Addr{a}, nil
	case len(keep) > 0 && f.withholds != nil && f.withholds(a):
		keep, withheld = nil, keep
	}
	f.kept = append(f.kept, keep...)
	f.withheld = append(f.withheld, withheld...)
	if len(keep) > 0 {
		f.ttl = min(f.ttl, h.Ttl)
	}
	return len(keep) > 0
}

// record returns rr, a changed copy of it, or nil to omit it.
func (f *answerFilter) record(rr dns.RR) dns.RR {
	switch rr := rr.(type) {
	case *dns.A:
		if !f.address(&rr.Hdr, rr.A) {
			return nil
		}
	case *dns.AAAA:
		if !f.ipv6 || !f.address(&rr.Hdr, rr.AAAA) {
			return nil
		}
	case *dns.OPT:
		return nil
	case *dns.HTTPS:
		c := *rr
		c.Value = withoutHints(rr.Value)
		return &c
	case *dns.SVCB:
		c := *rr
		c.Value = withoutHints(rr.Value)
		return &c
	}
	return rr
}

// withoutHints removes from a service binding the address hints (a client then
// asks for the addresses, and that answer is filtered) and the keys of
// encrypted ClientHellos.
func withoutHints(in []dns.SVCBKeyValue) []dns.SVCBKeyValue {
	var out []dns.SVCBKeyValue
	for _, kv := range in {
		switch kv.Key() {
		case dns.SVCB_IPV4HINT, dns.SVCB_IPV6HINT:
		case dns.SVCB_ECHCONFIG:
			// With these keys a client would encrypt the real name and send
			// another one in clear, and flows that must have a name would
			// be denied.
		case dns.SVCB_MANDATORY:
			// It may list the hints; without it nothing is mandatory.
		default:
			out = append(out, kv)
		}
	}
	return out
}
