package gate

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/proxy"

	"github.com/agentlab-vm/agentlab"
)

const (
	dnsMessage     = "application/dns-message"
	maxCredentials = 1 << 10 // bytes
	maxAuthorities = 1 << 20 // bytes
)

// doh is a Resolver that uses DNS over HTTPS (RFC 8484), through a proxy.
type doh struct {
	url    string
	client *http.Client
	host   Resolver // for names of private destinations
}

func newDoH(url string, p *ProxyDialer, roots *x509.CertPool) *doh {
	dial := func(ctx context.Context, _, addr string) (net.Conn, error) {
		at, err := netip.ParseAddrPort(addr)
		if err != nil {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not an IP address and port", addr)
		}
		return p.through(ctx, at)
	}
	return &doh{url: url, host: NewUpstream(p.HostDialer), client: &http.Client{
		Transport: &http.Transport{
			DialContext: dial, ForceAttemptHTTP2: true,
			TLSClientConfig:     &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
			TLSHandshakeTimeout: proxyPatience, MaxResponseHeaderBytes: maxProxyHead,
			MaxIdleConns: 4, IdleConnTimeout: 30 * time.Second,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// Private returns the resolver for names of private destinations, which are
// dialled directly and which a resolver on the internet cannot resolve.
func (d *doh) Private() Resolver { return d.host }

// Exchange implements Resolver. The error is agentlab.CodeUnavailable.
func (d *doh) Exchange(ctx context.Context, question *dns.Msg) (*dns.Msg, error) {
	answer, err := d.ask(ctx, question)
	if err == nil && (answer.Rcode == dns.RcodeServerFailure || answer.Rcode == dns.RcodeRefused) {
		err = errors.New("it answers " + dns.RcodeToString[answer.Rcode])
	}
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "no answer from %s: %w", d.url, err).
			WithHint("check upstream_proxy in config.yaml, and that the proxy allows connections to this address")
	}
	return answer, nil
}

func (d *doh) ask(ctx context.Context, question *dns.Msg) (*dns.Msg, error) {
	ask := question.Copy()
	ask.Id = 0 // RFC 8484: so that equal questions are equal requests
	wire, err := ask.Pack()
	if err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, d.url, bytes.NewReader(wire))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", dnsMessage)
	r.Header.Set("Accept", dnsMessage)
	reply, err := d.client.Do(r)
	if err != nil {
		return nil, err
	}
	defer closeQuietly(reply.Body)
	if reply.StatusCode != http.StatusOK || reply.Header.Get("Content-Type") != dnsMessage {
		return nil, fmt.Errorf("the answer has status %d and is not a DNS message", reply.StatusCode)
	}
	body, err := io.ReadAll(io.LimitReader(reply.Body, dns.MaxMsgSize+1))
	if err != nil {
		return nil, err
	}
	answer := new(dns.Msg)
	if len(body) > dns.MaxMsgSize {
		return nil, errors.New("the answer is too long")
	}
	if err := answer.Unpack(body); err != nil {
		return nil, errors.New("the answer is not a DNS message")
	}
	if !answer.Response || len(answer.Question) != 1 || !sameQuestion(answer.Question[0], ask.Question[0]) {
		return nil, errors.New("the answer does not match the question")
	}
	return answer, nil
}

// rootQuestion returns a question that every resolver answers.
func rootQuestion() *dns.Msg { return new(dns.Msg).SetQuestion(".", dns.TypeNS) }

// readCredentials reads USER:PASSWORD from a file that only its owner can
// read.
func readCredentials(path string) (*proxy.Auth, error) {
	bad := func(format string, args ...any) (*proxy.Auth, error) {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField("upstream_proxy.credentials_file").
			WithHint("write USER:PASSWORD on one line into the file, then: chmod 600 %s", path)
	}
	data, mode, err := readFile(path, maxCredentials)
	if err != nil {
		return bad("cannot read the credentials: %w", err)
	}
	if mode.Perm()&0o077 != 0 {
		return bad("%s is accessible to other users (mode %04o)", path, mode.Perm())
	}
	user, password, ok := strings.Cut(strings.TrimRight(string(data), "\r\n"), ":")
	if !ok || user == "" || strings.ContainsFunc(user+password, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return bad("%s does not contain USER:PASSWORD", path)
	}
	return &proxy.Auth{User: user, Password: password}, nil
}

// proxyRoots returns the system's certificate authorities and those in a file.
func proxyRoots(path string) (*x509.CertPool, error) {
	if path == "" {
		return nil, nil
	}
	data, _, err := readFile(path, maxAuthorities)
	pool, perr := x509.SystemCertPool()
	if perr != nil {
		pool = x509.NewCertPool()
	}
	if err == nil && !pool.AppendCertsFromPEM(data) {
		err = errors.New(path + " contains no PEM certificate")
	}
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "the certificates cannot be read: %w", err).WithField("upstream_proxy.ca_file")
	}
	return pool, nil
}

// readFile reads a regular file of at most limit bytes.
func readFile(path string, limit int64) ([]byte, os.FileMode, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, err
	}
	defer closeQuietly(f)
	st, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	if !st.Mode().IsRegular() || st.Size() > limit {
		return nil, 0, fmt.Errorf("%s is not a regular file of at most %d bytes", path, limit)
	}
	data, err := io.ReadAll(io.LimitReader(f, limit))
	return data, st.Mode(), err
}
