package daemon

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/server"
)

// openTCP opens the listener for callers with a token, if one is configured.
// It checks the certificate before any client connects.
func (d *Daemon) openTCP(ctx context.Context, a config.API) error {
	if a.Listen == "" {
		return nil
	}
	if a.TLSCert != "" {
		c := &certificate{certFile: a.TLSCert, keyFile: a.TLSKey, now: d.cfg.Clock, warn: func(err error) {
			d.log.Warn("the certificate of the control API could not be read again; the old one is used", "err", err)
		}}
		if err := c.load(); err != nil {
			return err
		}
		d.tcp.TLS = &tls.Config{GetCertificate: c.get, MinVersion: tls.VersionTLS12}
		d.tcp.Ours = c.names
	}
	var lc net.ListenConfig
	network, addr := listenOn(a.Listen)
	l, err := lc.Listen(ctx, network, addr)
	if err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "cannot listen on %s: %w", a.Listen, err).WithField("api.listen").
			WithHint("choose another port, or an address that this machine has")
	}
	d.tcpListener = l
	d.undo.add(func() error {
		if err := l.Close(); !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	})
	return nil
}

// listenOn returns the network and address to listen on for the configured
// ADDRESS:PORT. With the network "tcp", 0.0.0.0 would also mean all IPv6
// addresses.
func listenOn(configured string) (network, addr string) {
	a, err := netip.ParseAddrPort(configured)
	if err != nil || !a.Addr().Unmap().Is4() {
		return "tcp", configured
	}
	return "tcp4", netip.AddrPortFrom(a.Addr().Unmap(), a.Port()).String()
}

// TCPAddr returns the address of the TCP listener, nil if there is none.
func (d *Daemon) TCPAddr() net.Addr {
	if d.tcpListener == nil {
		return nil
	}
	return d.tcpListener.Addr()
}

// accessOf returns the access of a role that the configuration has validated.
func accessOf(r agentlab.Role) server.Access {
	switch r {
	case agentlab.RoleRead:
		return server.AccessRead
	case agentlab.RoleWrite:
		return server.AccessWrite
	case agentlab.RoleAdmin:
		return server.AccessAdmin
	}
	return 0
}

// lookEvery is the interval of checks for changed certificate files.
const lookEvery = 10 * time.Second

// certificate is read from files, and again after they change, so that it can
// be renewed while the daemon runs.
type certificate struct {
	certFile, keyFile string
	now               func() time.Time
	warn              func(error)

	mu     sync.Mutex
	cert   *tls.Certificate
	stamp  [2]os.FileInfo
	looked time.Time
}

// load reads the pair.
func (c *certificate) load() error {
	bad := func(key string, err error) error {
		return agentlab.Errorf(agentlab.CodeInvalid, "%w", err).WithField(key)
	}
	key, err := os.Stat(c.keyFile)
	if err != nil {
		return bad("api.tls_key", err)
	}
	if key.Mode().Perm()&0o007 != 0 {
		return agentlab.Errorf(agentlab.CodeDenied, "everybody can use %s (mode %04o)", c.keyFile, key.Mode().Perm()).
			WithField("api.tls_key").WithHint("chmod 600 %s", c.keyFile)
	}
	cert, err := os.Stat(c.certFile)
	if err != nil {
		return bad("api.tls_cert", err)
	}
	pair, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return bad("api.tls_cert", err)
	}
	if pair.Leaf == nil {
		if pair.Leaf, err = x509.ParseCertificate(pair.Certificate[0]); err != nil {
			return bad("api.tls_cert", err)
		}
	}
	c.cert, c.stamp, c.looked = &pair, [2]os.FileInfo{cert, key}, c.now()
	return nil
}

// get returns the certificate for a handshake.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	return c.current(), nil
}

// names reports whether the certificate is valid for that name.
func (c *certificate) names(host string) bool { return c.current().Leaf.VerifyHostname(host) == nil }

func (c *certificate) current() *tls.Certificate {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := c.now(); now.Sub(c.looked) >= lookEvery {
		c.looked = now
		if c.changed() {
			if err := c.load(); err != nil {
				c.warn(err)
			}
		}
	}
	return c.cert
}

func (c *certificate) changed() bool {
	for i, path := range []string{c.certFile, c.keyFile} {
		is, err := os.Stat(path)
		if err != nil || !os.SameFile(is, c.stamp[i]) || !is.ModTime().Equal(c.stamp[i].ModTime()) || is.Size() != c.stamp[i].Size() {
			return true
		}
	}
	return false
}
