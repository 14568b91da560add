package gate

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// PrivateDialer is implemented by dialers that can dial the private
// destinations of a policy. Its caller has checked the policy: it only refuses
// addresses that no policy may allow.
type PrivateDialer interface {
	// DialPrivate opens a TCP connection to a private address other than the
	// host's.
	DialPrivate(ctx context.Context, to netip.AddrPort) (net.Conn, error)
	// DialHost opens a TCP connection to a port of the host's loopback address.
	DialHost(ctx context.Context, port uint16) (net.Conn, error)
}

// OpensHost reports whether the policy allows a port of the host itself.
func (g *Gate) OpensHost(port uint16) bool {
	return slices.ContainsFunc(g.Policy().Private(), func(t egress.Private) bool { return t.Host && t.Port == port })
}

// isServer reports whether an address is the controller's address for guests.
func (g *Gate) isServer(a netip.Addr) bool {
	return a.IsValid() && a.Unmap() == g.cfg.Server.Addr()
}

// refuser is implemented by dialers that know at once that they do not support
// a flow, so that the guest gets the error without waiting.
type refuser interface {
	Refuses(proto egress.Proto, to netip.Addr) (rule string)
}

// unsupported returns the rule by which the dialer does not support a flow
// that the policy allows, "" if it does. Private destinations are dialled
// directly.
func (f *Flow) unsupported() (rule string) {
	d, ok := f.g.cfg.Dialer.(refuser)
	if !ok || f.flow.Host || egress.Openable(f.flow.Dst.Addr()) {
		return ""
	}
	return d.Refuses(f.flow.Proto, f.flow.Dst.Addr())
}

// open dials one address of an allowed flow.
func (f *Flow) open(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	if !f.flow.Host && !egress.Openable(to.Addr()) {
		return f.g.cfg.Dialer.DialContext(ctx, string(f.flow.Proto), to.String())
	}
	d, ok := f.g.cfg.Dialer.(PrivateDialer)
	switch {
	case !ok || f.flow.Proto != egress.TCP:
		return nil, agentlab.Errorf(agentlab.CodeUnsupported, "private destinations are not supported").WithField("network.private")
	case f.flow.Host && slices.Contains(f.g.cfg.Reserved, to.Port()):
		return nil, &egress.DeniedError{Addr: to.Addr(), Rule: egress.RuleGateway}
	case f.flow.Host:
		return d.DialHost(ctx, to.Port())
	}
	return d.DialPrivate(ctx, to)
}

// hostAnswer answers the question for the host's own name with the
// controller's address.
func (g *Gate) hostAnswer(query *dns.Msg, q dns.Question) *dns.Msg {
	reply := new(dns.Msg).SetReply(query)
	if a := g.cfg.Server.Addr(); q.Qtype == dns.TypeA && a.Is4() {
		h := dns.RR_Header{Name: q.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}
		reply.Answer = append(reply.Answer, &dns.A{Hdr: h, A: a.AsSlice()})
	}
	return reply
}

// DialPrivate implements PrivateDialer. The host's own addresses are refused:
// a name must not give access to its other ports.
func (h *HostDialer) DialPrivate(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	a := to.Addr().Unmap()
	if !egress.Openable(a) {
		return nil, &egress.DeniedError{Addr: a, Rule: egress.RulePrivate}
	}
	rule, err := h.localRule(a)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot read the host's addresses: %w", err)
	}
	if rule == egress.RuleHostAddr {
		return nil, &egress.DeniedError{Addr: a, Rule: rule}
	}
	leaves, err := leavesHost(a)
	if err != nil {
		return nil, err
	}
	if !leaves {
		return nil, &egress.DeniedError{Addr: a, Rule: egress.RuleHostAddr}
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", netip.AddrPortFrom(a, to.Port()).String())
}

// DialHost implements PrivateDialer.
func (h *HostDialer) DialHost(ctx context.Context, port uint16) (net.Conn, error) {
	return dialLoopback(ctx, port)
}

func dialLoopback(ctx context.Context, port uint16) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
	if err != nil {
		if c6, err6 := d.DialContext(ctx, "tcp", net.JoinHostPort("::1", strconv.Itoa(int(port)))); err6 == nil {
			return c6, nil
		}
	}
	return conn, err
}
