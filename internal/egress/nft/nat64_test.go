//go:build linux

package nft

import (
	"context"
	"net"
	"testing"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress/probe/probetest"
)

// nat64Resolver is a resolver of a network with a NAT64 under a prefix of its
// own.
type nat64Resolver struct {
	testResolver
	silent bool
}

func (r nat64Resolver) Exchange(ctx context.Context, q *dns.Msg) (*dns.Msg, error) {
	if q.Question[0].Name != "ipv4only.arpa." {
		return r.testResolver.Exchange(ctx, q)
	}
	if r.silent {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "no answer")
	}
	answer := new(dns.Msg).SetReply(q)
	h := dns.RR_Header{Name: q.Question[0].Name, Class: dns.ClassINET, Ttl: 60, Rrtype: dns.TypeAAAA}
	answer.Answer = append(answer.Answer, &dns.AAAA{Hdr: h, AAAA: net.ParseIP("2a0c:6464::c000:aa")})
	return answer, nil
}

// A NAT64 prefix of the host's network is closed whole, and while the network
// does not say whether it has one, so is all global IPv6.
func TestNetworksOwnNAT64(t *testing.T) {
	const private, public, elsewhere = "[2a0c:6464::10.1.2.3]:4000", "[2a0c:6464::192.31.196.20]:4000", "[2620:4f:8000::20]:4000"
	for name, c := range map[string]struct {
		resolver nat64Resolver
		open     bool
	}{"announced": {nat64Resolver{}, true}, "unknown": {nat64Resolver{silent: true}, false}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			m := w.manager(Options{Resolver: c.resolver})
			w.tenants(m, probetest.Reference()[0].Network)
			for _, target := range []string{private, public} {
				if w.guests[0].reaches("udp", target) {
					t.Errorf("%s was reached", target)
				}
			}
			if !c.open {
				if w.guests[0].reaches("udp", elsewhere) {
					t.Errorf("%s was reached while it is not known what it stands for", elsewhere)
				}
			} else if !w.guests[0].mustReach("udp", elsewhere) {
				t.Errorf("%s is not reached", elsewhere)
			}
		})
	}
	w := newWorld(t)
	w.tenants(w.manager(Options{}), probetest.Reference()[0].Network)
	if !w.guests[0].mustReach("udp", private) {
		t.Error("the test proves nothing: what it wants closed is not open in a network without NAT64")
	}
}
