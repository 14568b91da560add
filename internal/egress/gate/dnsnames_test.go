package gate_test

import (
	"slices"
	"testing"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

// askedFor is a Resolver that notes what it is asked for.
type askedFor []string

func (a *askedFor) answer(q *dns.Msg) (*dns.Msg, error) {
	*a = append(*a, q.Question[0].Name)
	return new(dns.Msg).SetReply(q), nil
}

// What the host's name servers know of the host's own networks is not asked.
func TestNamesOfTheHostsNetworksAreNotAsked(t *testing.T) {
	t.Parallel()
	var asked askedFor
	l := newLab(t, agentlab.Network{Mode: agentlab.NetworkNAT}, func(c *gate.Config) { c.Resolver = resolverFunc(asked.answer) })
	for _, name := range []string{"fileserver.", "_gateway.", "nas.lan.", "NAS.Lan.", "metadata.google.internal.", "printer.local.", "x.corp.", "1.0.168.192.in-addr.arpa."} {
		for _, kind := range []uint16{dns.TypeA, dns.TypeTXT, dns.TypeSRV, dns.TypeSVCB} {
			if m := l.resolve(t, name, kind); m.Rcode != dns.RcodeNameError {
				t.Errorf("%s: %v", name, m)
			}
		}
		l.record(t, name, func(r agentlab.EgressRecord) bool {
			return r.Proto == "dns" && !r.Allow && r.Rule == egress.RulePrivate && r.Name+"." == dns.CanonicalName(name)
		})
	}
	l.resolve(t, "com.", dns.TypeDS) // what a validating resolver asks
	l.resolve(t, "internal.example.", dns.TypeA)
	if want := []string{"com.", "internal.example."}; !slices.Equal(asked, want) {
		t.Errorf("asked for %q, want %q", asked, want)
	}
}

// A dot within a label makes no name below an allowed one.
func TestDotsWithinLabels(t *testing.T) {
	t.Parallel()
	var asked askedFor
	l := newLab(t, allow("*.site.test"), func(c *gate.Config) { c.Resolver = resolverFunc(asked.answer) })
	for _, name := range []string{`a\.site.test.`, `a\\.site.test.`, `a.b\.site.test.`} {
		if m := l.resolve(t, name, dns.TypeA); m.Rcode == dns.RcodeSuccess {
			t.Errorf("%s: %v", name, m)
		}
	}
	if l.resolve(t, "a.site.test.", dns.TypeA); !slices.Equal(asked, []string{"a.site.test."}) {
		t.Errorf("asked for %q", asked)
	}
}
