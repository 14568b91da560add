package gate

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
)

const (
	resolvConf      = "/etc/resolv.conf"
	resolvReread    = 5 * time.Second
	upstreamTry     = 2500 * time.Millisecond // per server and attempt
	upstreamServers = 3
)

// resolverDialer is implemented by dialers that dial the host's own name
// servers in another way than the guest's destinations: those servers are part
// of the host's configuration and usually have private addresses.
type resolverDialer interface {
	DialResolver(ctx context.Context, network, addr string) (net.Conn, error)
}

// Upstream is a Resolver that asks the name servers of a resolv.conf.
type Upstream struct {
	dial func(ctx context.Context, network, addr string) (net.Conn, error)
	path string

	mu      sync.Mutex
	read    time.Time
	servers []netip.AddrPort
}

// NewUpstream returns a Resolver that asks the host's name servers, dialled
// through d. It reads the host's resolv.conf again every few seconds.
func NewUpstream(d Dialer) *Upstream {
	u := &Upstream{dial: d.DialContext, path: resolvConf}
	if r, ok := d.(resolverDialer); ok {
		u.dial = r.DialResolver
	}
	return u
}

// Exchange implements Resolver: each server in turn, twice, over UDP, and over
// TCP if the answer did not fit. The error is agentlab.CodeUnavailable.
func (u *Upstream) Exchange(ctx context.Context, question *dns.Msg) (*dns.Msg, error) {
	var last error
rounds:
	for range 2 {
		for _, server := range u.list() {
			answer, err := u.ask(ctx, "udp", server, question)
			if err == nil && answer.Truncated {
				answer, err = u.ask(ctx, "tcp", server, question)
			}
			if err == nil && answer.Rcode != dns.RcodeServerFailure && answer.Rcode != dns.RcodeRefused {
				return answer, nil
			}
			if err == nil {
				err = fmt.Errorf("%s answers %s", server, dns.RcodeToString[answer.Rcode])
			}
			last = err
			if ctx.Err() != nil {
				break rounds
			}
		}
	}
	return nil, agentlab.Errorf(agentlab.CodeUnavailable, "no name server answers: %w", last).
		WithHint("check the name servers in %s", u.path)
}

func (u *Upstream) ask(ctx context.Context, network string, server netip.AddrPort, question *dns.Msg) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, upstreamTry)
	defer cancel()
	conn, err := u.dial(ctx, network, server.String())
	if err != nil {
		return nil, err
	}
	defer closeQuietly(conn)
	stop := context.AfterFunc(ctx, func() { closeQuietly(conn) })
	defer stop()
	ask := question.Copy()
	ask.Id = dns.Id() // random, like the source port: both protect against forged answers
	wire := &dns.Conn{Conn: packetConn(network, conn), UDPSize: dns.MaxMsgSize}
	if err := wire.WriteMsg(ask); err != nil {
		return nil, err
	}
	for {
		answer, err := wire.ReadMsg()
		if err != nil {
			if ctx.Err() != nil {
				return nil, fmt.Errorf("%s does not answer: %w", server, ctx.Err())
			}
			if network == "tcp" || answer == nil {
				return nil, err
			}
			continue
		}
		if answer.Id == ask.Id && answer.Response && len(answer.Question) == 1 && sameQuestion(answer.Question[0], ask.Question[0]) {
			return answer, nil
		}
		if network == "tcp" {
			return nil, errors.New("the answer does not match the question")
		}
	}
}

func sameQuestion(a, b dns.Question) bool {
	return a.Qtype == b.Qtype && a.Qclass == b.Qclass && dns.CanonicalName(a.Name) == dns.CanonicalName(b.Name)
}

// packetConn wraps a datagram connection of any type so that dns.Conn
// recognises it; otherwise dns.Conn would add a length to each message.
func packetConn(network string, c net.Conn) net.Conn {
	if network != "udp" {
		return c
	}
	return datagramConn{c}
}

// datagramConn implements net.PacketConn.
type datagramConn struct{ net.Conn }

// LocalAddr implements net.Conn.
func (c datagramConn) LocalAddr() net.Addr { return &net.UDPAddr{} }

// ReadFrom implements net.PacketConn.
func (c datagramConn) ReadFrom(p []byte) (int, net.Addr, error) {
	n, err := c.Read(p)
	return n, c.RemoteAddr(), err
}

// WriteTo implements net.PacketConn; the connection has only one peer.
func (c datagramConn) WriteTo(p []byte, _ net.Addr) (int, error) { return c.Write(p) }

// list returns the name servers, at most three, like the C library. For a host
// without any it returns the loopback address, also like the C library.
func (u *Upstream) list() []netip.AddrPort {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.servers != nil && time.Since(u.read) < resolvReread {
		return u.servers
	}
	u.read = time.Now()
	u.servers = readResolvConf(u.path)
	if len(u.servers) == 0 {
		u.servers = []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), dnsPort)}
	}
	return u.servers
}

func readResolvConf(path string) []netip.AddrPort {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer closeQuietly(f)
	conf, err := dns.ClientConfigFromReader(f)
	if err != nil {
		return nil
	}
	var out []netip.AddrPort
	for _, s := range conf.Servers {
		if a, err := netip.ParseAddr(s); err == nil && len(out) < upstreamServers {
			out = append(out, netip.AddrPortFrom(a, dnsPort))
		}
	}
	return out
}
