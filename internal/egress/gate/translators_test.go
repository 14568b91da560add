package gate_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

// tells is a Resolver of addresses.
type tells func(q dns.Question) (addrs []string, rcode int, err error)

func (f tells) Exchange(_ context.Context, m *dns.Msg) (*dns.Msg, error) {
	list, rcode, err := f(m.Question[0])
	if err != nil {
		return nil, err
	}
	answer := new(dns.Msg).SetRcode(m, rcode)
	for _, s := range list {
		h := dns.RR_Header{Name: m.Question[0].Name, Class: dns.ClassINET, Ttl: 60, Rrtype: dns.TypeAAAA}
		answer.Answer = append(answer.Answer, &dns.AAAA{Hdr: h, AAAA: net.ParseIP(s)})
	}
	return answer, nil
}

// announces answers the question for the network's NAT64 prefixes.
func announces(list ...string) gate.Resolver {
	return tells(func(q dns.Question) ([]string, int, error) {
		if q.Name != "ipv4only.arpa." || q.Qtype != dns.TypeAAAA {
			return nil, dns.RcodeNameError, nil
		}
		return list, dns.RcodeSuccess, nil
	})
}

func TestTranslatorPrefixes(t *testing.T) {
	t.Parallel()
	for addr, want := range map[string][]string{
		"2001:67c:2b0:db32:0:1:c000:aa":  {"2001:67c:2b0:db32:0:1::/96"},
		"2001:67c:c000:aa::":             {"2001:67c::/32"},
		"2001:67c:12c0:0:aa::":           {"2001:67c:1200::/40"},
		"2001:67c:1234:c000:0:aa00::":    {"2001:67c:1234::/48"},
		"2001:67c:1234:56c0:0:ab::":      {"2001:67c:1234:5600::/56"},
		"2001:67c:1234:5678:c0:0:ab00::": {"2001:67c:1234:5678::/64"},
		"64:ff9b::c000:aa":               {}, // judged by what it carries
		"2001:67c::1":                    {},
		"::ffff:192.0.0.170":             {},
	} {
		got, err := gate.NewTranslators(announces(addr)).Prefixes(t.Context())
		list := []string{}
		for _, p := range got {
			list = append(list, p.String())
		}
		if err != nil || !slices.Equal(list, want) {
			t.Errorf("%s: %v, %v, want %v", addr, list, err, want)
		}
	}
}

// A name server that does not answer is not one that says that there is no
// NAT64; NXDOMAIN says so.
func TestUnknownTranslatorsAreNotNone(t *testing.T) {
	t.Parallel()
	for _, r := range []tells{
		func(dns.Question) ([]string, int, error) { return nil, 0, errors.New("no answer") },
		func(dns.Question) ([]string, int, error) { return nil, dns.RcodeServerFailure, nil },
	} {
		if _, err := gate.NewTranslators(r).Prefixes(t.Context()); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
			t.Errorf("no answer: %v", err)
		}
	}
	none := tells(func(dns.Question) ([]string, int, error) { return nil, dns.RcodeNameError, nil })
	if list, err := gate.NewTranslators(none).Prefixes(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("NXDOMAIN: %v, %v", list, err)
	}
}

// The dialer refuses IPv6 while the network's NAT64 is not known, and what
// lies under a prefix that the network announces; so does DNS.
func TestHostDialerAndTranslators(t *testing.T) {
	t.Parallel()
	public := netip.MustParseAddr("2620:4f:8000::10")
	d := gate.NewHostDialer()
	d.AskTranslators(tells(func(dns.Question) ([]string, int, error) { return nil, 0, errors.New("no answer") }))
	if !d.Withholds(t.Context(), public) {
		t.Error("IPv6 is in answers while it is not known what it stands for")
	}
	if _, err := d.DialContext(t.Context(), "udp", "["+public.String()+"]:7"); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("IPv6 is dialled while it is not known what it stands for: %v", err)
	}
	d = gate.NewHostDialer()
	d.AskTranslators(announces("2620:4f:8001::c000:aa"))
	for addr, want := range map[string]bool{"2620:4f:8000::10": false, "192.31.196.10": false, "2620:4f:8001::8.8.8.8": true, "2620:4f:8001::10.1.2.3": true} {
		if d.Withholds(t.Context(), netip.MustParseAddr(addr)) != want {
			t.Errorf("%s in an answer: want withheld %v", addr, want)
		}
	}
}
