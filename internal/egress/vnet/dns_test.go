package vnet_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
)

// ask puts a question to the gateway over UDP.
func (l *lab) ask(t testing.TB, name string, qtype uint16) *dns.Msg {
	t.Helper()
	return l.exchange(t, new(dns.Msg).SetQuestion(name, qtype).SetEdns0(4096, false))
}

func (l *lab) exchange(t testing.TB, q *dns.Msg) *dns.Msg {
	t.Helper()
	wire, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	c := l.guest.udp(t, gateway(53))
	defer func() { _ = c.Close() }()
	if _, err := c.Write(wire); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1<<16)
	n, err := c.Read(buf)
	if err != nil {
		t.Fatalf("no answer to %s: %v", q.Question[0].String(), err)
	}
	reply := new(dns.Msg)
	if err := reply.Unpack(buf[:n]); err != nil || reply.Id != q.Id || !reply.Response {
		t.Fatalf("an answer that is none: %v, %v", reply, err)
	}
	return reply
}

func answerA(t testing.TB, m *dns.Msg) net.IP {
	t.Helper()
	for _, rr := range m.Answer {
		if a, ok := rr.(*dns.A); ok {
			return a.A.To4()
		}
	}
	t.Fatalf("no address in %v", m)
	return nil
}

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func TestDNSQuestions(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.net.SetName("mixed.test", addrs("192.31.196.77", "10.0.0.1", "127.0.0.1")...)
	l.net.SetName("rebind.test", addrs("169.254.169.254")...)
	l.net.SetName("six.test", addrs("2606:4700::1111", "::1")...)
	l.net.SetName("8.8.8.8.in-addr.arpa")
	l.net.SetName("1.1.168.192.in-addr.arpa")
	l.net.SetName("printer.local", addrs("192.31.196.78")...)
	www := l.net.Host("www.test").String()
	cases := []struct {
		name  string
		qtype uint16
		rcode int
		want  string // addresses and texts of the answer
	}{
		{"www.test.", dns.TypeA, dns.RcodeSuccess, www},
		{"WWW.Test.", dns.TypeA, dns.RcodeSuccess, www},
		{"www.test.", dns.TypeAAAA, dns.RcodeSuccess, ""},
		{"www.test.", dns.TypeTXT, dns.RcodeSuccess, "www.test."},
		{"missing.test.", dns.TypeA, dns.RcodeNameError, ""},
		{"mixed.test.", dns.TypeA, dns.RcodeSuccess, "192.31.196.77"},
		{"rebind.test.", dns.TypeA, dns.RcodeSuccess, ""},
		{"six.test.", dns.TypeAAAA, dns.RcodeSuccess, "2606:4700::1111"},
		{"www.test.", dns.TypeANY, dns.RcodeRefused, ""},
		{"www.test.", dns.TypeAXFR, dns.RcodeRefused, ""},
		{"8.8.8.8.in-addr.arpa.", dns.TypePTR, dns.RcodeSuccess, ""},
		{"1.1.168.192.in-addr.arpa.", dns.TypePTR, dns.RcodeNameError, ""},
		{"10.in-addr.arpa.", dns.TypeSOA, dns.RcodeNameError, ""},
		{"x.y.in-addr.arpa.", dns.TypePTR, dns.RcodeNameError, ""},
		{"1.0.0.0.ip6.arpa.", dns.TypePTR, dns.RcodeNameError, ""},
		{"printer.local.", dns.TypeA, dns.RcodeNameError, ""},
		{"localhost.", dns.TypeA, dns.RcodeNameError, ""},
	}
	for _, c := range cases {
		reply := l.ask(t, c.name, c.qtype)
		var got []string
		for _, rr := range reply.Answer {
			switch rr := rr.(type) {
			case *dns.A:
				got = append(got, rr.A.String())
			case *dns.AAAA:
				got = append(got, rr.AAAA.String())
			case *dns.TXT:
				got = append(got, rr.Txt...)
			default:
				got = append(got, rr.String())
			}
		}
		if reply.Rcode != c.rcode || strings.Join(got, " ") != c.want {
			t.Errorf("%s %s: %s %v", c.name, dns.TypeToString[c.qtype], dns.RcodeToString[reply.Rcode], got)
		}
		if len(reply.Question) != 1 || reply.Question[0].Name != c.name {
			t.Errorf("%s: the question comes back as %v", c.name, reply.Question)
		}
	}
	d := l.audit.wait(t, "the withheld address", func(d decision) bool { return d.Rule == egress.RuleRebinding && d.Name == "rebind.test" })
	if d.Allow || d.Addr.Addr().String() != "169.254.169.254" {
		t.Errorf("recorded as %+v", d)
	}
}

func TestDNSInvalidQuestions(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	question := func(edit func(*dns.Msg)) []byte {
		m := new(dns.Msg).SetQuestion("www.test.", dns.TypeA)
		m.Id = 0x1234
		edit(m)
		wire, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		return wire
	}
	cases := []struct {
		name  string
		wire  []byte
		rcode int // -1: no answer
	}{
		{"nothing", nil, -1},
		{"a cut header", make([]byte, 11), -1},
		{"an answer", question(func(m *dns.Msg) { m.Response = true }), -1},
		{"a broken answer", append([]byte{0x12, 0x34, 0x80, 0, 0, 9}, make([]byte, 6)...), -1},
		{"a broken question", append([]byte{0x12, 0x34, 0, 0, 0, 9}, make([]byte, 6)...), dns.RcodeFormatError},
		{"no question", question(func(m *dns.Msg) { m.Question = nil }), dns.RcodeFormatError},
		{"two questions", question(func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }), dns.RcodeFormatError},
		{"an update", question(func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }), dns.RcodeNotImplemented},
		{"class CHAOS", question(func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }), dns.RcodeRefused},
	}
	for _, c := range cases {
		answer := l.AnswerDNS(c.wire)
		reply := new(dns.Msg)
		switch {
		case c.rcode < 0 && answer != nil:
			t.Errorf("%s is answered", c.name)
		case c.rcode >= 0 && (reply.Unpack(answer) != nil || reply.Rcode != c.rcode || reply.Id != 0x1234):
			t.Errorf("%s: %v", c.name, reply)
		}
	}
}

// upstream is a resolver made by a test.
type upstream func(*dns.Msg) (*dns.Msg, error)

func (u upstream) Exchange(_ context.Context, q *dns.Msg) (*dns.Msg, error) { return u(q) }

type refusing struct{}

func (refusing) Exchange(context.Context, *dns.Msg) (*dns.Msg, error) { return nil, errors.New("no") }

func TestDNSForwardsOnlyTheQuestion(t *testing.T) {
	t.Parallel()
	asked := make(chan *dns.Msg, 8)
	l := newLab(t, func(c *vnet.Config) {
		c.Resolver = upstream(func(q *dns.Msg) (*dns.Msg, error) {
			asked <- q.Copy()
			return new(dns.Msg).SetReply(q), nil
		})
	})
	q := new(dns.Msg).SetQuestion("www.test.", dns.TypeA).SetEdns0(4096, true)
	q.IsEdns0().Option = append(q.IsEdns0().Option, &dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 32, Address: net.IPv4(1, 2, 3, 4)})
	q.Extra = append(q.Extra, &dns.TXT{Hdr: dns.RR_Header{Name: "smuggled.", Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{"data"}})
	l.exchange(t, q)
	got := <-asked
	if len(got.Extra) != 1 || len(got.IsEdns0().Option) != 0 || !got.IsEdns0().Do() || len(got.Question) != 1 {
		t.Errorf("sent upstream: %v", got)
	}
}

func TestDNSServiceBindingsLoseTheirHints(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(c *vnet.Config) {
		c.Resolver = upstream(func(q *dns.Msg) (*dns.Msg, error) {
			m := new(dns.Msg).SetReply(q)
			rr, err := dns.NewRR(`www.test. 60 IN HTTPS 1 . mandatory=ipv4hint alpn="h2" ipv4hint=127.0.0.1 ipv6hint=::1 ech="AEj+DQBE"`)
			if err != nil {
				return nil, err
			}
			extra, _ := dns.NewRR("www.test. 60 IN A 127.0.0.1")
			m.Answer, m.Extra = []dns.RR{rr}, []dns.RR{extra}
			return m, nil
		})
	})
	reply := l.ask(t, "www.test.", dns.TypeHTTPS)
	if text := fmt.Sprint(reply.Answer, reply.Extra); strings.Contains(text, "127.0.0.1") || strings.Contains(text, "::1") || strings.Contains(text, "ech") || !strings.Contains(text, "h2") {
		t.Errorf("answered %s", text)
	}
}

func TestDNSFailuresAreServfail(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(c *vnet.Config) { c.Resolver = refusing{} })
	if reply := l.ask(t, "www.test.", dns.TypeA); reply.Rcode != dns.RcodeServerFailure {
		t.Errorf("answered %v", reply)
	}
	d := l.audit.wait(t, "the question", func(d decision) bool { return d.Name == "www.test" })
	if d.Error == "" {
		t.Errorf("recorded as %+v", d)
	}
}

func TestDNSInModeOff(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(c *vnet.Config) { c.Policy = policy(t, agentlab.NetworkOff) })
	if reply := l.ask(t, "secrets.in.a.name.test.", dns.TypeA); reply.Rcode != dns.RcodeRefused {
		t.Errorf("answered %v", reply)
	}
	if dials := l.net.Dials(); len(dials) > 0 {
		t.Errorf("dialled: %v", dials)
	}
}

func TestDNSLargeAnswersGoOverTCP(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	var many []netip.Addr
	for i := range 400 {
		many = append(many, netip.AddrFrom4([4]byte{192, 31, byte(197 + i/250), byte(i % 250)}))
	}
	l.net.SetName("some.test", many[:60]...)
	l.net.SetName("many.test", many...)
	question, _ := new(dns.Msg).SetQuestion("some.test.", dns.TypeA).Pack()
	reply := new(dns.Msg)
	if answer := l.AnswerDNS(question); len(answer) > dns.MinMsgSize || reply.Unpack(answer) != nil || !reply.Truncated {
		t.Errorf("over UDP: truncated %v, %d bytes", reply.Truncated, len(answer))
	}
	c := l.guest.mustTCP(t, gateway(53))
	for _, x := range []struct { // one connection carries several questions
		name string
		want int
	}{{"some.test.", 60}, {"many.test.", 64}, {"some.test.", 60}} {
		wire, _ := new(dns.Msg).SetQuestion(x.name, dns.TypeA).Pack()
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(wire))), wire...)); err != nil {
			t.Fatal(err)
		}
		var head [2]byte
		if _, err := io.ReadFull(c, head[:]); err != nil {
			t.Fatal(err)
		}
		body := make([]byte, binary.BigEndian.Uint16(head[:]))
		if _, err := io.ReadFull(c, body); err != nil {
			t.Fatal(err)
		}
		reply := new(dns.Msg)
		if err := reply.Unpack(body); err != nil || len(reply.Answer) != x.want {
			t.Errorf("%s over TCP: %d addresses, %v, want %d", x.name, len(reply.Answer), err, x.want)
		}
	}
}

func TestDNSRateLimit(t *testing.T) {
	t.Parallel()
	frozen := time.Unix(1700000000, 0)
	l := newLab(t, func(c *vnet.Config) {
		c.Limits.DNSRate = 5
		c.Now = func() time.Time { return frozen }
	})
	wire, _ := new(dns.Msg).SetQuestion("www.test.", dns.TypeA).Pack()
	for range 50 {
		l.guest.send(t, udpFrame(gateway(53), wire))
	}
	l.audit.wait(t, "the limit", func(d decision) bool { return d.Rule == egress.RuleRate && !d.Allow })
	eventually(t, "the admitted ones are asked", func() bool { return len(l.net.Dials()) == 10 })
}

func FuzzDNS(f *testing.F) {
	wire, _ := new(dns.Msg).SetQuestion("www.test.", dns.TypeA).SetEdns0(1232, true).Pack()
	f.Add(wire)
	f.Add(append([]byte{0x12, 0x34, 0, 0, 0, 9}, make([]byte, 6)...))
	l := newLab(f, func(c *vnet.Config) {
		c.Limits.DNSRate = 1 << 30
		c.Resolver = upstream(func(q *dns.Msg) (*dns.Msg, error) {
			m := new(dns.Msg).SetReply(q)
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.IPv4(10, 0, 0, 1)}}
			return m, nil
		})
	})
	f.Fuzz(func(t *testing.T, wire []byte) {
		answer := l.AnswerDNS(wire)
		if answer == nil {
			return
		}
		reply := new(dns.Msg)
		if err := reply.Unpack(answer); err != nil {
			t.Fatalf("an answer that cannot be read: %v", err)
		}
		if !reply.Response || len(reply.Answer) > 0 {
			t.Fatalf("answered %v", reply)
		}
	})
}
