package gate_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

// FuzzUpstream plays a name server that is the attacker's: whatever it
// answers, the guest gets no address that no policy allows, and only the name
// that was asked for is learnt.
func FuzzUpstream(f *testing.F) {
	for _, rr := range []string{
		"site.test. 60 IN A 10.0.0.1", "site.test. 60 IN A 192.31.196.1", "site.test. 60 IN AAAA ::ffff:127.0.0.1",
		"other.test. 60 IN A 192.31.196.1", "site.test. 60 IN CNAME site.test.", "site.test. 60 IN HTTPS 1 . ipv4hint=127.0.0.1",
	} {
		r, err := dns.NewRR(rr)
		if err != nil {
			f.Fatal(err)
		}
		m := new(dns.Msg).SetQuestion("site.test.", r.Header().Rrtype)
		m.Response, m.Answer = true, []dns.RR{r}
		wire, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(wire, r.Header().Rrtype)
	}
	var answer *dns.Msg
	var learned []netip.Addr
	l := newLab(f, agentlab.Network{Mode: agentlab.NetworkNAT}, func(c *gate.Config) {
		c.Now = time.Now
		c.Limits.DNSRate = 1 << 30
		c.Resolver = resolverFunc(func(*dns.Msg) (*dns.Msg, error) { return answer, nil })
		c.Learned = func(name string, a []netip.Addr, ttl time.Duration) {
			if name != "site.test." || ttl < time.Minute || ttl > time.Hour {
				panic("learnt " + name + " for " + ttl.String())
			}
			learned = append(learned, a...)
		}
	})
	f.Fuzz(func(t *testing.T, wire []byte, kind uint16) {
		answer, learned = new(dns.Msg), nil
		if answer.Unpack(wire) != nil {
			return
		}
		question, err := new(dns.Msg).SetQuestion("site.test.", kind).Pack()
		if err != nil {
			return
		}
		reply := new(dns.Msg)
		if err := reply.Unpack(l.Answer(t.Context(), question, false)); err != nil {
			t.Fatalf("an answer that cannot be read: %v", err)
		}
		seen := map[netip.Addr]bool{}
		for _, rr := range append(append(reply.Answer, reply.Ns...), reply.Extra...) {
			var a netip.Addr
			switch rr := rr.(type) {
			case *dns.A:
				a, _ = netip.AddrFromSlice(rr.A)
			case *dns.AAAA:
				a, _ = netip.AddrFromSlice(rr.AAAA)
			default:
				continue
			}
			if rule, denied := egress.AlwaysDenied(a); denied {
				t.Fatalf("%s is told, in spite of %s", a, rule)
			}
			seen[a.Unmap()] = true
		}
		for _, a := range learned {
			if _, denied := egress.AlwaysDenied(a); denied || !seen[a] {
				t.Fatalf("%s is learnt", a)
			}
		}
	})
}
