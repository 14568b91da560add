package devproxy

import (
	"cmp"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/connlimit"
)

const (
	// preferredDNSPort is the preferred port of the DNS responder.
	preferredDNSPort = 8853
	// dnsTTL is how long resolvers store an answer, in seconds.
	dnsTTL = 60
	// maxDNSConns is the maximum number of connections to the responder.
	maxDNSConns = 32
	// maxDNSMessage is the size of a UDP query that is read.
	maxDNSMessage = 1232
	dnsTimeout    = 5 * time.Second
)

// dnsServer resolves the names below DNSDomain, on UDP and TCP.
type dnsServer struct{ udp, tcp *dns.Server }

// SetDNS starts or stops the responder for names below DNSDomain, also for later starts
// of the daemon, and returns its address; the zero value if it is stopped. Codes:
// conflict if the ports are not served, unavailable.
func (s *Service) SetDNS(on bool) (netip.AddrPort, error) {
	at, err := s.setDNS(on)
	if err == nil {
		s.save()
	}
	return at, err
}

func (s *Service) setDNS(on bool) (netip.AddrPort, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.cfg.Off || s.closed:
		return netip.AddrPort{}, agentlab.Errorf(agentlab.CodeConflict, "this daemon does not serve the ports of guests").WithHint("set dev_servers.enabled: true in config.yaml, and restart the daemon")
	case !on:
		s.stopDNS()
		s.dnsPort = 0
	case s.dns == nil:
		err := s.startDNS(cmp.Or(s.dnsPort, preferredDNSPort))
		if err != nil && s.dnsPort == 0 { // otherwise a resolver may be configured to ask that port
			err = s.startDNS(0)
		}
		if err != nil {
			return netip.AddrPort{}, agentlab.Errorf(agentlab.CodeUnavailable, "the DNS responder cannot be started: %w", err)
		}
	}
	return s.dnsAddr(), nil
}

// resumeDNS starts the responder if it ran before the daemon ended.
func (s *Service) resumeDNS() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dnsPort == 0 || s.dns != nil {
		return
	}
	if err := s.startDNS(s.dnsPort); err != nil {
		s.log.Warn("the names below sandbox.local cannot be resolved", "err", err)
	}
}

// DNS returns the address of the responder; the zero value if there is none.
func (s *Service) DNS() netip.AddrPort {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dnsAddr()
}

func (s *Service) dnsAddr() netip.AddrPort {
	if s.dns == nil {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), s.dnsPort)
}

// startDNS listens on a port of 127.0.0.1; 0 is any. s.mu is locked.
func (s *Service) startDNS(port uint16) error {
	udp, tcp, err := listenDNS(port)
	if err != nil {
		return err
	}
	at, err := netip.ParseAddrPort(udp.LocalAddr().String())
	if err != nil {
		return err
	}
	handler := dns.HandlerFunc(answerDNS)
	s.dns = &dnsServer{
		udp: &dns.Server{PacketConn: udp, Handler: handler, UDPSize: maxDNSMessage, ReadTimeout: dnsTimeout, WriteTimeout: dnsTimeout},
		tcp: &dns.Server{Listener: connlimit.New(tcp, maxDNSConns, maxDNSConns), Handler: handler, ReadTimeout: dnsTimeout, WriteTimeout: dnsTimeout},
	}
	s.dnsPort = at.Port()
	for _, server := range []*dns.Server{s.dns.udp, s.dns.tcp} {
		s.wg.Go(func() { _ = server.ActivateAndServe() })
	}
	return nil
}

// stopDNS closes the sockets. s.mu is locked.
func (s *Service) stopDNS() {
	if s.dns != nil {
		_ = s.dns.udp.PacketConn.Close()
		_ = s.dns.tcp.Listener.Close()
		s.dns = nil
	}
}

func listenDNS(port uint16) (net.PacketConn, net.Listener, error) {
	host := "127.0.0.1"
	tcp, err := net.Listen("tcp4", net.JoinHostPort(host, strconv.Itoa(int(port)))) //nolint:noctx // a socket of this machine
	if err != nil {
		return nil, nil, err
	}
	udp, err := net.ListenPacket("udp4", tcp.Addr().String()) //nolint:noctx // as above
	if err != nil {
		_ = tcp.Close()
		return nil, nil, err
	}
	return udp, tcp, nil
}

// answerDNS resolves each name of one or two labels below DNSDomain to loopback. It
// knows no other names.
func answerDNS(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(q)
	m.Authoritative = true
	if q.IsEdns0() != nil {
		m.SetEdns0(maxDNSMessage, false)
	}
	if len(q.Question) != 1 || q.Opcode != dns.OpcodeQuery || q.Question[0].Qclass != dns.ClassINET {
		m.Rcode = dns.RcodeNotImplemented
		_ = w.WriteMsg(m)
		return
	}
	name := strings.ToLower(q.Question[0].Name)
	header := dns.RR_Header{Name: q.Question[0].Name, Rrtype: q.Question[0].Qtype, Class: dns.ClassINET, Ttl: dnsTTL}
	_, _, _, known := parseHost(strings.TrimSuffix(name, "."), true)
	switch {
	case name != DNSDomain+"." && !strings.HasSuffix(name, "."+DNSDomain+"."):
		m.Authoritative, m.Rcode = false, dns.RcodeRefused
	case name != DNSDomain+"." && !known:
		m.Rcode = dns.RcodeNameError
	case known && q.Question[0].Qtype == dns.TypeA:
		m.Answer = []dns.RR{&dns.A{Hdr: header, A: net.IPv4(127, 0, 0, 1)}}
	case known && q.Question[0].Qtype == dns.TypeAAAA:
		m.Answer = []dns.RR{&dns.AAAA{Hdr: header, AAAA: net.IPv6loopback}}
	}
	if m.Authoritative && len(m.Answer) == 0 { // how long the absence may be stored
		m.Ns = []dns.RR{&dns.SOA{
			Hdr: dns.RR_Header{Name: DNSDomain + ".", Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: dnsTTL},
			Ns:  DNSDomain + ".", Mbox: "hostmaster." + DNSDomain + ".", Serial: 1, Refresh: 3600, Retry: 600, Expire: 86400, Minttl: dnsTTL,
		}}
	}
	_ = w.WriteMsg(m)
}
