package gate

import (
	"context"
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

const (
	dnsPort = 53
	// maxQuestion is far above the size of any valid question with one
	// name.
	maxQuestion = 1024
	// dnsPayload is the maximum size of a UDP answer, for a guest that
	// announces that it accepts more than 512 bytes.
	dnsPayload = 4096
)

// Resolver answers DNS questions. It gets a message with exactly one question
// of class IN and returns the answer, or an error, for which the guest gets
// SERVFAIL. The answer's addresses are filtered afterwards.
type Resolver interface {
	Exchange(ctx context.Context, question *dns.Msg) (*dns.Msg, error)
}

// privateResolver is implemented by resolvers that cannot resolve the names of
// private destinations; Private returns one that can.
type privateResolver interface{ Private() Resolver }

// Answer returns the wire form of the answer to a question. It returns nil if
// there is no answer, also because the guest asks too fast. udp means that the
// answer must fit into a datagram.
func (g *Gate) Answer(ctx context.Context, wire []byte, udp bool) []byte {
	if !g.dnsLimit.AllowN(g.cfg.Now(), 1) {
		g.audit.record(agentlab.EgressRecord{Proto: string(egress.DNS), Rule: egress.RuleRate})
		return nil
	}
	if len(wire) > maxQuestion {
		return nil
	}
	query := new(dns.Msg)
	if err := query.Unpack(wire); err != nil {
		if len(wire) < 12 || wire[2]&0x80 != 0 {
			return nil
		}
		query = &dns.Msg{MsgHdr: dns.MsgHdr{Id: binary.BigEndian.Uint16(wire)}}
		return pack(query, rcode(query, dns.RcodeFormatError), udp)
	}
	if query.Response {
		return nil
	}
	reply := g.resolve(ctx, query)
	reply.Id, reply.Question = query.Id, query.Question
	return pack(query, reply, udp)
}

func pack(query, reply *dns.Msg, udp bool) []byte {
	reply.Response, reply.RecursionAvailable, reply.Authoritative = true, true, false
	reply.Compress = true
	size := dns.MinMsgSize
	if opt := query.IsEdns0(); opt != nil {
		reply.SetEdns0(dnsPayload, opt.Do())
		size = min(max(int(opt.UDPSize()), dns.MinMsgSize), dnsPayload)
	}
	if !udp {
		size = dns.MaxMsgSize
	}
	reply.Truncate(size)
	out, err := reply.Pack()
	if err != nil {
		out, err = rcode(query, dns.RcodeServerFailure).Pack()
		if err != nil {
			return nil
		}
	}
	return out
}

func rcode(query *dns.Msg, code int) *dns.Msg { return new(dns.Msg).SetRcode(query, code) }

// resolve decides on a question and returns its answer.
func (g *Gate) resolve(ctx context.Context, query *dns.Msg) *dns.Msg {
	if query.Opcode != dns.OpcodeQuery {
		return rcode(query, dns.RcodeNotImplemented)
	}
	if len(query.Question) != 1 {
		return rcode(query, dns.RcodeFormatError)
	}
	q := query.Question[0]
	name := dns.CanonicalName(q.Name)
	verdict := g.Policy().Decide(egress.Flow{Proto: egress.DNS, Dst: g.cfg.Server, Names: []string{name}})
	if verdict.Allow && (!forwardable(q) || hasEscapedDot(name)) {
		verdict = egress.Verdict{Rule: egress.RuleProtocol}
	}
	if !verdict.Allow {
		g.audit.record(dnsRecord(name, verdict))
		if verdict.Rule == egress.RuleOff || verdict.Rule == egress.RuleProtocol {
			return rcode(query, dns.RcodeRefused)
		}
		return rcode(query, dns.RcodeNameError) // programs treat it as final
	}
	if name == egress.HostName+"." {
		g.audit.record(dnsRecord(name, verdict))
		return g.hostAnswer(query, q)
	}
	if reply, rule := g.local(query, q); reply != nil {
		if rule != "" {
			g.audit.record(dnsRecord(name, egress.Verdict{Rule: rule}))
		}
		return reply
	}
	return g.forward(ctx, query, q, verdict)
}

func dnsRecord(name string, v egress.Verdict) agentlab.EgressRecord {
	return agentlab.EgressRecord{Proto: string(egress.DNS), Name: trimDot(name), Allow: v.Allow, Rule: v.Rule}
}

func trimDot(name string) string {
	if len(name) > 1 && name[len(name)-1] == '.' {
		return name[:len(name)-1]
	}
	return name
}

// forwardable reports whether a question has a type that is forwarded.
func forwardable(q dns.Question) bool {
	if q.Qclass != dns.ClassINET {
		return false
	}
	switch q.Qtype {
	case dns.TypeANY, dns.TypeAXFR, dns.TypeIXFR, dns.TypeMAILA, dns.TypeMAILB, dns.TypeNone, dns.TypeOPT, dns.TypeTKEY, dns.TypeTSIG:
		return false
	}
	return true
}

// forward sends the question to the resolver in a new message, which contains
// nothing else from the guest.
func (g *Gate) forward(ctx context.Context, query *dns.Msg, q dns.Question, v egress.Verdict) *dns.Msg {
	record := dnsRecord(dns.CanonicalName(q.Name), v)
	answer, err := g.exchange(ctx, q, query.IsEdns0() != nil && query.IsEdns0().Do())
	if err != nil || answer == nil {
		if err != nil {
			record.Error = err.Error()
		}
		g.audit.record(record)
		return rcode(query, dns.RcodeServerFailure)
	}
	reply := new(dns.Msg).SetReply(query)
	reply.Rcode = answer.Rcode & 0xf // extended codes are in the upstream's own OPT record
	f := g.filterAnswer(q, answer)
	reply.Answer, reply.Ns = f.answer, f.authority
	if len(f.kept) > 0 {
		record.Addr = f.kept[0].String()
	}
	g.audit.record(record)
	return reply
}

func (g *Gate) exchange(ctx context.Context, q dns.Question, dnssec bool) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, g.cfg.Limits.DNSTimeout)
	defer cancel()
	defer context.AfterFunc(g.ctx, cancel)()
	ask := new(dns.Msg)
	ask.SetQuestion(q.Name, q.Qtype)
	ask.SetEdns0(1232, dnssec)
	r := g.cfg.Resolver
	if own, ok := r.(privateResolver); ok && g.Policy().OpensName(dns.CanonicalName(q.Name)) {
		r = own.Private()
	}
	return r.Exchange(ctx, ask)
}

// filterAnswer filters an answer, stores its addresses under the name of the question,
// and records withheld addresses.
func (g *Gate) filterAnswer(q dns.Question, answer *dns.Msg) answerFilter {
	name := dns.CanonicalName(q.Name)
	f := answerFilter{aliases: aliases(name, answer.Answer), ipv6: g.ipv6(), withholds: g.withholds, private: g.Policy().OpensName(name)}
	f.filter(answer)
	for _, a := range f.withheld {
		r := dnsRecord(name, egress.Verdict{Rule: egress.RuleRebinding})
		r.Addr = a.String()
		g.audit.record(r)
	}
	ttl := clampTTL(f.ttl)
	for _, a := range f.kept {
		g.names.learn(a, name, ttl)
	}
	if g.cfg.Learned != nil && len(f.kept) > 0 {
		g.cfg.Learned(name, f.kept, ttl)
	}
	return f
}

// resolveAgain resolves a name without a question of the guest and returns its
// addresses of one family.
func (g *Gate) resolveAgain(ctx context.Context, name string, ipv4 bool) []netip.Addr {
	q := dns.Question{Name: name, Qtype: dns.TypeAAAA, Qclass: dns.ClassINET}
	if ipv4 {
		q.Qtype = dns.TypeA
	}
	v := g.Policy().Decide(egress.Flow{Proto: egress.DNS, Dst: g.cfg.Server, Names: []string{name}})
	if !v.Allow || !g.dnsLimit.AllowN(g.cfg.Now(), 1) {
		return nil
	}
	answer, err := g.exchange(ctx, q, false)
	if err != nil || answer == nil {
		return nil
	}
	f := g.filterAnswer(q, answer)
	return slices.DeleteFunc(f.kept, func(a netip.Addr) bool { return a.Is4() != ipv4 })
}

// addressFilter is implemented by dialers that refuse further addresses in
// addition to those that no policy allows.
type addressFilter interface {
	Withholds(ctx context.Context, a netip.Addr) bool
}

// withholds reports whether the dialer would refuse an address, so that the
// guest must not receive it.
func (g *Gate) withholds(a netip.Addr) bool {
	d, ok := g.cfg.Dialer.(addressFilter)
	return ok && d.Withholds(g.ctx, a) && !egress.Dropped(egress.RuleRebinding)
}

// ipv6er is implemented by dialers that know whether IPv6 addresses can be
// reached. For others it is assumed that they can.
type ipv6er interface{ IPv6() bool }

// ipv6 reports whether the guest gets IPv6 addresses.
func (g *Gate) ipv6() bool {
	if g.cfg.NoIPv6 {
		return false
	}
	d, ok := g.cfg.Dialer.(ipv6er)
	return !ok || d.IPv6()
}

// dnsIdle limits how long a TCP connection may take for a question.
const dnsIdle = 10 * time.Second
