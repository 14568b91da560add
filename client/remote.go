package client

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Remote is the address of a daemon over TCP, with the credentials of both
// sides.
type Remote struct {
	// URL is https://HOST[:PORT], or http://HOST[:PORT] where HOST is a
	// loopback address of this machine (a tunnel, for example).
	URL string
	// Token is sent with every call.
	Token string
	// CA holds the PEM certificates of the authorities that may sign the
	// daemon's certificate. Empty means those of this system.
	CA []byte
	// Pin is "sha256/" and the base64 of the SHA-256 of the public key of the
	// daemon's certificate. With Pin and without CA, only the key is checked,
	// neither the name nor the signer of the certificate.
	Pin string
}

// dialTimeout limits connecting over TCP, and the TLS handshake.
const dialTimeout = 30 * time.Second

// NewRemote returns a client of a daemon over TCP. It does not connect. Codes:
// invalid, and denied if the token would be sent unencrypted.
func NewRemote(r Remote) (*Client, error) {
	u, err := url.Parse(r.URL)
	if err != nil || u.Host == "" || u.Hostname() == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" || strings.Trim(u.Path, "/") != "" {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not the address of a daemon", r.URL).WithHint("give https://HOST:PORT")
	}
	if r.Token == "" || strings.ContainsFunc(r.Token, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "the token is missing or malformed").
			WithHint("write it to a file and set AGENTLAB_TOKEN_FILE to its path; create a token with: agentlab token create NAME")
	}
	port := map[string]string{"https": "443", "http": "80"}[u.Scheme]
	if p := u.Port(); p != "" && port != "" {
		port = p
	}
	c := &Client{host: net.JoinHostPort(u.Hostname(), port), token: r.Token}
	switch {
	case u.Scheme == "https":
		if c.tls, err = r.tls(u.Hostname()); err != nil {
			return nil, err
		}
	case u.Scheme != "http":
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not the address of a daemon", r.URL).WithHint("give https://HOST:PORT")
	case !loopback(u.Hostname()):
		return nil, agentlab.Errorf(agentlab.CodeDenied, "the token would be sent unencrypted to %s", u.Host).WithHint("use https://")
	}
	c.http = c.transport()
	return c, nil
}

// loopback reports whether a host is a loopback address or localhost. Other
// names may resolve to any machine.
func loopback(host string) bool {
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback() || strings.EqualFold(host, "localhost")
}

// tls returns the configuration that authenticates the daemon.
func (r Remote) tls(host string) (*tls.Config, error) {
	c := &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}
	if len(r.CA) > 0 {
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(r.CA) {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "the CA file contains no certificate").
				WithHint("set AGENTLAB_CA_FILE to a file with PEM certificates")
		}
	}
	if r.Pin == "" {
		return c, nil
	}
	text, ok := strings.CutPrefix(r.Pin, "sha256/")
	want, err := base64.StdEncoding.DecodeString(text)
	if !ok || err != nil || len(want) != sha256.Size {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not a pin", r.Pin).
			WithHint("give sha256/ and the base64 of the SHA-256 of the public key, see docs/access.md")
	}
	c.InsecureSkipVerify = len(r.CA) == 0
	c.VerifyConnection = func(s tls.ConnectionState) error {
		if len(s.PeerCertificates) == 0 {
			return errPin
		}
		if got := sha256.Sum256(s.PeerCertificates[0].RawSubjectPublicKeyInfo); string(got[:]) != string(want) {
			return errPin
		}
		return nil
	}
	return c, nil
}

var errPin = errors.New("the key of its certificate does not match the pin")

// dialRemote connects over TCP and authenticates the daemon with TLS before it
// returns.
func (c *Client) dialRemote(ctx context.Context) (net.Conn, error) {
	d := net.Dialer{Timeout: dialTimeout}
	conn, err := d.DialContext(ctx, "tcp", c.host)
	if err != nil {
		if ctx.Err() != nil {
			return nil, err
		}
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot connect to the daemon on %s: %w", c.host, err).
			WithHint("check api.listen in the daemon's config.yaml, and AGENTLAB_HOST here")
	}
	if c.tls == nil {
		// The name localhost may resolve to another machine.
		if a, err := netip.ParseAddrPort(conn.RemoteAddr().String()); err != nil || !a.Addr().Unmap().IsLoopback() {
			_ = conn.Close()
			return nil, agentlab.Errorf(agentlab.CodeDenied, "%s is not this machine: the token would be sent unencrypted", c.host).WithHint("use https://")
		}
		return conn, nil
	}
	secure := tls.Client(conn, c.tls)
	hctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	if err := secure.HandshakeContext(hctx); err != nil {
		_ = conn.Close()
		if ctx.Err() != nil {
			return nil, err
		}
		if _, bad := errors.AsType[*tls.CertificateVerificationError](err); bad || errors.Is(err, errPin) {
			return nil, agentlab.Errorf(agentlab.CodeDenied, "cannot verify the certificate of %s: %w", c.host, err).
				WithHint("set AGENTLAB_CA_FILE to its authority, or AGENTLAB_PIN to its key; see docs/access.md")
		}
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot connect to the daemon on %s: %w", c.host, err).
			WithHint("check that it uses TLS; use http:// for a tunnel that ends on this machine")
	}
	return secure, nil
}
