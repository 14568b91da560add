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

// local answers what must not or need not leave this machine; nil means that
// the question is to be forwarded. A rule tells that it is a refusal.
func (g *Gate) local(query *dns.Msg, q dns.Question) (reply *dns.Msg, rule string) {
	name := dns.CanonicalName(q.Name)
	switch {
	case isBareName(name) && isOfHosts(q.Qtype):
		return rcode(query, dns.RcodeNameError), egress.RulePrivate
	case q.Qtype == dns.TypeAAAA && !g.ipv6():
		return new(dns.Msg).SetReply(query), "" // no such record
	case isUnder(name, "in-addr.arpa."), isUnder(name, "ip6.arpa."):
		// The names of hosts on our own networks are nobody's business.
		if rule, denied := egress.AlwaysDenied(reverseAddr(name)); denied {
			return rcode(query, dns.RcodeNameError), rule
		}
	}
	return nil, ""
}

// isBareName tells whether a name has no dot in it. Some name servers ask the
// hosts around them for such a name (LLMNR), or read /etc/hosts.
func isBareName(name string) bool { return dns.CountLabel(name) == 1 }

// isOfHosts leaves out what is asked about top-level domains to check
// signatures.
func isOfHosts(kind uint16) bool {
	switch kind {
	case dns.TypeNS, dns.TypeSOA, dns.TypeDS, dns.TypeDNSKEY:
		return false
	}
	return true
}

// oddName tells whether a label holds a dot or a backslash. What seems to be a
// name below an allowed one is another then: "a\.example.com" is in com.
func oddName(name string) bool { return strings.Contains(name, `\.`) || strings.Contains(name, `\\`) }

func isUnder(name, zone string) bool {
	return name == zone || strings.HasSuffix(name, "."+zone)
}

// reverseAddr reads the address in a name of in-addr.arpa or ip6.arpa; what
// the name leaves out is zero. The zero Addr means that it holds none.
func reverseAddr(name string) netip.Addr {
	if rest, ok := strings.CutSuffix(name, "ip6.arpa."); ok {
		return reverse6(dns.SplitDomainName(rest))
	}
	labels := dns.SplitDomainName(strings.TrimSuffix(name, "in-addr.arpa."))
	slices.Reverse(labels)
	var b [4]byte
	if len(labels) > len(b) {
		labels = labels[:len(b)] // RFC 2317 puts more labels in front
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

// maxAliases bounds a chain of CNAME records.
const maxAliases = 16

// maxAddresses is how many addresses a guest is told in one answer: each costs
// us memory, and work before the answer may be given.
const maxAddresses = 64

// aliases returns the names whose addresses an answer may hold: the one asked
// for, and those that its chain of CNAME records leads to.
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

// answerFilter keeps of an answer's records what a guest may see.
type answerFilter struct {
	aliases        []string
	ipv6           bool
	private        bool                  // the operator opened this name: private addresses are what it is for
	withholds      func(netip.Addr) bool // beside what no policy allows; nil: none
	answer         []dns.RR
	authority      []dns.RR
	kept, withheld []netip.Addr
	ttl            uint32 // the least of the kept addresses' records
}

func (f *answerFilter) filter(m *dns.Msg) {
	f.ttl = uint32(maxTTL / time.Second)
	for _, rr := range m.Answer {
		if kept := f.record(rr); kept != nil {
			f.answer = append(f.answer, capTTL(kept))
		}
	}
	// Of the authority section only what says how long "no" holds is of use,
	// and what proves it. The additional section is only hints; leaving it
	// out cannot be wrong.
	for _, rr := range m.Ns {
		switch rr.(type) {
		case *dns.SOA, *dns.NSEC, *dns.NSEC3, *dns.RRSIG:
			f.authority = append(f.authority, rr)
		}
	}
}

// capTTL keeps clients from using an answer for longer than we remember it.
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

// record returns rr, a changed copy of it, or nil to leave it out.
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

// withoutHints leaves the address hints out of a service binding (a client
// then asks for the addresses, and that answer is filtered) and the keys of
// encrypted ClientHellos.
func withoutHints(in []dns.SVCBKeyValue) []dns.SVCBKeyValue {
	var out []dns.SVCBKeyValue
	for _, kv := range in {
		switch kv.Key() {
		case dns.SVCB_IPV4HINT, dns.SVCB_IPV6HINT:
		case dns.SVCB_ECHCONFIG:
			// With it a client would encrypt the name that it asks for, and
			// show another: flows that must show theirs would be refused.
		case dns.SVCB_MANDATORY:
			// It may name the hints; without it nothing is mandatory.
		default:
			out = append(out, kv)
		}
	}
	return out
}
