package vnet

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

// local answers what must not or need not leave this machine; nil means that
// the question is to be forwarded.
func local(query *dns.Msg, q dns.Question) *dns.Msg {
	name := dns.CanonicalName(q.Name)
	switch {
	case q.Qtype == dns.TypeAAAA:
		return new(dns.Msg).SetReply(query) // the guest has no IPv6: no such record
	case isUnder(name, "localhost."), isUnder(name, "local."), isUnder(name, "home.arpa."), isUnder(name, "ip6.arpa."):
		return rcode(query, dns.RcodeNameError)
	case isUnder(name, "in-addr.arpa."):
		// The names of hosts on our own networks are nobody's business.
		if _, denied := egress.AlwaysDenied(reverseAddr(name)); denied {
			return rcode(query, dns.RcodeNameError)
		}
	}
	return nil
}

func isUnder(name, zone string) bool {
	return name == zone || strings.HasSuffix(name, "."+zone)
}

// reverseAddr reads the address in a name of in-addr.arpa; octets that the
// name leaves out are zero. The zero Addr means that it holds none.
func reverseAddr(name string) netip.Addr {
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

// answerFilter keeps of an answer's records what a guest may see.
type answerFilter struct {
	name           string
	kept, withheld []netip.Addr
}

func (f *answerFilter) records(in []dns.RR) []dns.RR {
	var out []dns.RR
	for _, rr := range in {
		if kept := f.record(rr); kept != nil {
			out = append(out, kept)
		}
	}
	return out
}

// record returns rr, a changed copy of it, or nil to leave it out.
func (f *answerFilter) record(rr dns.RR) dns.RR {
	switch rr := rr.(type) {
	case *dns.A:
		a, _ := netip.AddrFromSlice(rr.A.To4())
		keep, withheld := egress.FilterAnswer([]netip.Addr{a})
		f.kept = append(f.kept, keep...)
		f.withheld = append(f.withheld, withheld...)
		if len(keep) == 0 {
			return nil
		}
	case *dns.AAAA, *dns.OPT:
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

// withoutHints leaves the address hints out of a service binding: a client
// then asks for the addresses, and that answer is filtered.
func withoutHints(in []dns.SVCBKeyValue) []dns.SVCBKeyValue {
	var out []dns.SVCBKeyValue
	for _, kv := range in {
		switch kv.Key() {
		case dns.SVCB_IPV4HINT, dns.SVCB_IPV6HINT:
		case dns.SVCB_MANDATORY:
			// It may name the hints; without it nothing is mandatory.
		default:
			out = append(out, kv)
		}
	}
	return out
}
