package gate

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"time"

	"golang.org/x/net/proxy"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

const (
	proxyPatience = 15 * time.Second // until a proxy has opened a connection
	proxyCheck    = 3 * time.Second  // of Check
	maxProxyHead  = 16 << 10         // bytes of a proxy's answer to CONNECT
)

// ProxyConfig is the upstream proxy of a host without direct internet access.
// The configuration has checked the syntax of URL and DNS.
type ProxyConfig struct {
	URL             string `json:"url"`                        // http://, https:// or socks5://HOST:PORT
	CredentialsFile string `json:"credentials_file,omitempty"` // contains USER:PASSWORD
	CAFile          string `json:"ca_file,omitempty"`          // authorities of an https proxy and of DNS, in addition to those of the system
	DNS             string `json:"dns,omitempty"`              // https://ADDRESS/PATH of a resolver behind the proxy
}

// ProxyDialer checks addresses like a HostDialer, and then asks a proxy to
// open the connection. It sends the checked IP address to the proxy, never a
// name: the proxy would resolve the name again, and the owner of the name
// could answer with a private address of the proxy's network.
//
// Only TCP to IPv4 addresses is sent through a proxy; the rest is refused with
// egress.RuleProxy. IPv6 is refused because the NAT64 prefixes of the proxy's
// network are not known. Private destinations, the host and its name servers
// are dialled directly.
type ProxyDialer struct {
	*HostDialer
	url      *url.URL
	user     *proxy.Auth // nil: no credentials
	tls      *tls.Config // of an https proxy
	resolver Resolver    // nil: the host's
}

// NewProxyDialer reads the files of c. It dials nothing.
func NewProxyDialer(c ProxyConfig) (*ProxyDialer, error) {
	u, err := url.Parse(c.URL)
	if err != nil || u.Port() == "" {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not the URL of a proxy", c.URL).WithField("upstream_proxy.url")
	}
	p := &ProxyDialer{HostDialer: NewHostDialer(), url: u}
	if c.CredentialsFile != "" {
		if p.user, err = readCredentials(c.CredentialsFile); err != nil {
			return nil, err
		}
	}
	roots, err := proxyRoots(c.CAFile)
	if err != nil {
		return nil, err
	}
	p.tls = &tls.Config{MinVersion: tls.VersionTLS12, ServerName: u.Hostname(), RootCAs: roots}
	if c.DNS != "" {
		p.resolver = newDoH(c.DNS, p, roots)
	}
	return p, nil
}

// Resolver returns the resolver behind the proxy. nil means that none is
// configured and that the host's resolver is used.
func (p *ProxyDialer) Resolver() Resolver { return p.resolver }

// Refuses returns the rule by which the proxy does not support a flow that a
// policy allows, "" if it does. It does not wait.
func (p *ProxyDialer) Refuses(proto egress.Proto, to netip.Addr) string {
	if egress.ProxyCarries(proto, to) {
		return ""
	}
	return egress.RuleProxy
}

// IPv6 returns false: DNS answers for guests have no IPv6 addresses.
func (p *ProxyDialer) IPv6() bool { return false }

// Withholds reports whether an address must be removed from a DNS answer.
func (p *ProxyDialer) Withholds(ctx context.Context, a netip.Addr) bool {
	return !a.Unmap().Is4() || p.HostDialer.Withholds(ctx, a)
}

// DialContext implements Dialer.
func (p *ProxyDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	at, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not an IP address and port", addr)
	}
	proto := egress.Proto(network)
	switch network {
	case "tcp4":
		proto = egress.TCP
	case "tcp", "udp", "udp4", "icmp":
	default:
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "unsupported network %q", network)
	}
	rule, _ := egress.AlwaysDenied(at.Addr())
	if rule == "" {
		rule = p.Refuses(proto, at.Addr())
	}
	if rule != "" {
		return nil, &egress.DeniedError{Addr: at.Addr(), Rule: rule}
	}
	to := netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
	if err := p.check(ctx, to.Addr()); err != nil {
		return nil, err
	}
	return p.through(ctx, to)
}

// check refuses the host itself and its neighbours. An address without a route
// on the host is neither.
func (p *ProxyDialer) check(ctx context.Context, a netip.Addr) error {
	if rule, err := p.refusalRule(ctx, a); err != nil || rule != "" {
		return cmp.Or(err, error(&egress.DeniedError{Addr: a, Rule: rule}))
	}
	leaves, err := leavesHost(a)
	switch noRoute := errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH); {
	case err != nil && !noRoute:
		return err
	case err == nil && !leaves:
		return &egress.DeniedError{Addr: a, Rule: egress.RuleHostAddr}
	}
	return nil
}

// through asks the proxy for a connection to an address.
func (p *ProxyDialer) through(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, proxyPatience, errors.New("timed out"))
	defer cancel()
	conn, err := p.reach(ctx)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	if p.url.Scheme == "socks5" {
		err = p.socks(ctx, conn, to)
	} else {
		err = p.connect(conn, to)
	}
	if !stop() {
		err = p.unresponsive(context.Cause(ctx))
	}
	if err != nil {
		closeQuietly(conn)
		return nil, err
	}
	return conn, nil
}

// reach connects to the proxy itself.
func (p *ProxyDialer) reach(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", p.url.Host)
	if err != nil {
		return nil, p.unresponsive(err)
	}
	if p.url.Scheme != "https" {
		return conn, nil
	}
	secure := tls.Client(conn, p.tls)
	if err := secure.HandshakeContext(ctx); err != nil {
		closeQuietly(conn)
		return nil, p.unresponsive(err)
	}
	return secure, nil
}

func (p *ProxyDialer) unresponsive(err error) error {
	return agentlab.Errorf(agentlab.CodeUnavailable, "upstream proxy %s does not answer: %w", p.url.Host, err).
		WithHint("check upstream_proxy in config.yaml, and that the proxy runs")
}

func (p *ProxyDialer) refused(to netip.AddrPort, why any) *agentlab.Error {
	return agentlab.Errorf(agentlab.CodeUnavailable, "upstream proxy refuses %s: %v", to, why).
		WithHint("check upstream_proxy.credentials_file in config.yaml, and what the proxy at %s allows", p.url.Host)
}

// connect sends CONNECT to the proxy and reads its answer.
func (p *ProxyDialer) connect(conn net.Conn, to netip.AddrPort) error {
	request := fmt.Sprintf("CONNECT %s HTTP/1.1\r\nHost: %s\r\n", to, to)
	if p.user != nil {
		request += "Proxy-Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(p.user.User+":"+p.user.Password)) + "\r\n"
	}
	if _, err := io.WriteString(conn, request+"\r\n"); err != nil {
		return p.unresponsive(err)
	}
	head, err := readHead(conn)
	if err != nil {
		return p.unresponsive(err)
	}
	answer, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(head)), &http.Request{Method: http.MethodConnect})
	if err != nil {
		return p.unresponsive(errors.New("its answer is not HTTP"))
	}
	_ = answer.Body.Close()
	if answer.StatusCode/100 != 2 {
		return p.refused(to, fmt.Sprintf("%d %s", answer.StatusCode, http.StatusText(answer.StatusCode)))
	}
	return nil
}

// readHead reads the head of an HTTP answer and not a byte more, because what
// follows belongs to the tunnel.
func readHead(r io.Reader) ([]byte, error) {
	head := make([]byte, 0, 512)
	var b [1]byte
	for len(head) < maxProxyHead {
		if _, err := io.ReadFull(r, b[:]); err != nil {
			return nil, err
		}
		head = append(head, b[0])
		if bytes.HasSuffix(head, []byte("\r\n\r\n")) {
			return head, nil
		}
	}
	return nil, fmt.Errorf("its answer has more than %d bytes", maxProxyHead)
}

// connDialer is a proxy.ContextDialer that returns an existing connection.
type connDialer struct{ net.Conn }

// Dial implements proxy.Dialer.
func (r connDialer) Dial(string, string) (net.Conn, error) { return r.Conn, nil }

// DialContext implements proxy.ContextDialer.
func (r connDialer) DialContext(context.Context, string, string) (net.Conn, error) {
	return r.Conn, nil
}

// socks performs the SOCKS5 handshake with the proxy. Afterwards the caller
// uses conn itself, which supports half-close.
func (p *ProxyDialer) socks(ctx context.Context, conn net.Conn, to netip.AddrPort) error {
	d, err := proxy.SOCKS5("tcp", p.url.Host, p.user, connDialer{conn})
	if err != nil {
		return err
	}
	dialer, ok := d.(proxy.ContextDialer)
	if !ok {
		return agentlab.Errorf(agentlab.CodeInternal, "the SOCKS5 dialer does not support contexts")
	}
	_, err = dialer.DialContext(ctx, "tcp", to.String())
	switch {
	case IsTimeout(err):
		return p.unresponsive(err)
	case err != nil:
		return p.refused(to, err)
	}
	return nil
}

// Check connects to the proxy and, if there is a resolver behind it, asks it a
// question. The error has what does not work.
func (p *ProxyDialer) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, proxyCheck)
	defer cancel()
	if p.resolver != nil {
		_, err := p.resolver.Exchange(ctx, rootQuestion())
		return err
	}
	conn, err := p.reach(ctx)
	if err == nil {
		closeQuietly(conn)
	}
	return err
}
