package vnet

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/time/rate"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

const (
	dnsPort = 53
	// maxQuestion is far above any honest question with one name in it.
	maxQuestion = 1024
	// dnsPayload is how large our UDP answers get at most, for a guest that
	// says that it takes more than the plain 512 bytes.
	dnsPayload = 4096
	dnsTCPIdle = 10 * time.Second
)

// Resolver answers DNS questions. It gets a message with exactly one question
// of class IN and returns the answer, or an error, which the guest sees as
// SERVFAIL. The answer's addresses are filtered afterwards.
type Resolver interface {
	Exchange(ctx context.Context, question *dns.Msg) (*dns.Msg, error)
}

// dnsServer answers on the gateway's port 53.
type dnsServer struct {
	n        *Network
	udp      *gonet.UDPConn
	limit    *rate.Limiter
	inFlight slots
}

// newDNSServer makes the server and takes the port, so that no question can
// come too early.
func newDNSServer(n *Network) (*dnsServer, error) {
	addr := tcpip.FullAddress{NIC: nicID, Addr: toStack(n.cfg.Gateway), Port: dnsPort}
	conn, err := gonet.DialUDP(n.stack, &addr, nil, ipv4.ProtocolNumber)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "take the DNS port: %w", err)
	}
	l := n.cfg.Limits
	return &dnsServer{
		n: n, udp: conn,
		limit:    rate.NewLimiter(rate.Limit(l.DNSRate), 2*l.DNSRate),
		inFlight: make(slots, l.DNSInFlight),
	}, nil
}

// serveUDP answers datagrams until the Network ends.
func (s *dnsServer) serveUDP() {
	conn := s.udp
	defer closeQuietly(conn)
	stop := context.AfterFunc(s.n.ctx, func() { closeQuietly(conn) })
	defer stop()
	buf := make([]byte, maxQuestion+1)
	for {
		size, from, err := conn.ReadFrom(buf)
		if err != nil {
			return
		}
		if size > maxQuestion || !s.admit() {
			continue
		}
		wire := append([]byte(nil), buf[:size]...)
		if !s.inFlight.take() {
			continue // a resolver asks again
		}
		if !s.n.spawn(func() {
			defer s.inFlight.give()
			if answer := s.answer(wire, true); answer != nil {
				_, _ = conn.WriteTo(answer, from)
			}
		}) {
			s.inFlight.give()
		}
	}
}

// serveTCP answers questions, one after the other, on one connection.
func (s *dnsServer) serveTCP(conn net.Conn) {
	for {
		_ = conn.SetDeadline(time.Now().Add(dnsTCPIdle))
		var head [2]byte
		if _, err := io.ReadFull(conn, head[:]); err != nil {
			return
		}
		size := binary.BigEndian.Uint16(head[:])
		if size > maxQuestion {
			return
		}
		wire := make([]byte, size)
		if _, err := io.ReadFull(conn, wire); err != nil || !s.admit() {
			return
		}
		answer := s.answer(wire, false)
		if answer == nil {
			return
		}
		_ = conn.SetDeadline(time.Now().Add(dnsTCPIdle))
		framed := binary.BigEndian.AppendUint16(nil, uint16(len(answer))) //nolint:gosec // Pack refuses more
		if _, err := conn.Write(append(framed, answer...)); err != nil {
			return
		}
	}
}

func (s *dnsServer) admit() bool {
	if s.limit.AllowN(s.n.cfg.Now(), 1) {
		return true
	}
	s.n.audit.record(Decision{Proto: egress.DNS, Rule: egress.RuleRate})
	return false
}

// answer makes the wire form of the answer to a question; nil means that
// there is nothing to say.
func (s *dnsServer) answer(wire []byte, udp bool) []byte {
	query := new(dns.Msg)
	if err := query.Unpack(wire); err != nil {
		if len(wire) < 12 || wire[2]&0x80 != 0 {
			return nil
		}
		query = &dns.Msg{MsgHdr: dns.MsgHdr{Id: binary.BigEndian.Uint16(wire)}}
		return s.pack(query, rcode(query, dns.RcodeFormatError), udp)
	}
	if query.Response {
		return nil
	}
	reply := s.resolve(query)
	reply.Id, reply.Question = query.Id, query.Question
	return s.pack(query, reply, udp)
}

func (s *dnsServer) pack(query, reply *dns.Msg, udp bool) []byte {
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

// resolve decides a question and has it answered.
func (s *dnsServer) resolve(query *dns.Msg) *dns.Msg {
	if query.Opcode != dns.OpcodeQuery {
		return rcode(query, dns.RcodeNotImplemented)
	}
	if len(query.Question) != 1 {
		return rcode(query, dns.RcodeFormatError)
	}
	q := query.Question[0]
	d := Decision{Proto: egress.DNS, Name: dns.CanonicalName(q.Name), Addr: netip.AddrPortFrom(s.n.cfg.Gateway, dnsPort)}
	verdict := s.n.cfg.Policy.Decide(egress.Flow{Proto: egress.DNS, Dst: d.Addr, Names: []string{d.Name}})
	d.Allow, d.Rule = verdict.Allow, verdict.Rule
	if d.Allow && !forwardable(q) {
		d.Allow, d.Rule = false, egress.RuleProtocol
	}
	if !d.Allow {
		s.n.audit.record(d)
		return rcode(query, dns.RcodeRefused)
	}
	if reply := local(query, q); reply != nil {
		return reply
	}
	return s.forward(query, q, d)
}

// forwardable tells whether a question is of a kind that we pass on.
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

// forward puts the question to the resolver, in a message of our own making,
// so that nothing else of the guest's travels with it.
func (s *dnsServer) forward(query *dns.Msg, q dns.Question, d Decision) *dns.Msg {
	ctx, cancel := context.WithTimeout(s.n.ctx, s.n.cfg.Limits.DNSTimeout)
	defer cancel()
	ask := new(dns.Msg)
	ask.SetQuestion(q.Name, q.Qtype)
	ask.SetEdns0(1232, query.IsEdns0() != nil && query.IsEdns0().Do())
	answer, err := s.n.cfg.Resolver.Exchange(ctx, ask)
	if err != nil || answer == nil {
		if err != nil {
			d.Error = err.Error()
		}
		s.n.audit.record(d)
		return rcode(query, dns.RcodeServerFailure)
	}
	reply := new(dns.Msg).SetReply(query)
	reply.Rcode = answer.Rcode & 0xf // the extended ones live in the upstream's own OPT record
	f := answerFilter{name: d.Name}
	reply.Answer = f.records(answer.Answer)
	reply.Ns = f.records(answer.Ns)
	// The additional section is only hints; leaving it out cannot be wrong.
	s.n.audit.record(d)
	for _, a := range f.withheld {
		s.n.audit.record(Decision{Proto: egress.DNS, Name: d.Name, Addr: netip.AddrPortFrom(a, 0), Rule: egress.RuleRebinding})
	}
	for _, a := range f.kept {
		s.n.names.learn(a, d.Name)
	}
	return reply
}
