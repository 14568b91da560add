package server

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// certificateEvery is the interval of checks for changed certificate files.
const certificateEvery = 10 * time.Second

// certificate is read from files, and again after they change, so that it can
// be renewed while the daemon runs.
type certificate struct {
	certFile, keyFile string
	now               func() time.Time
	warn              func(error)

	mu      sync.Mutex
	cert    *tls.Certificate
	stamp   [2]os.FileInfo
	checked time.Time
}

// LoadCertificate returns how the API is served with the certificate and the key
// in two files. warn gets the error when changed files cannot be used; the old
// pair is used then.
func LoadCertificate(certFile, keyFile string, now func() time.Time, warn func(error)) (TCP, error) {
	c := &certificate{certFile: certFile, keyFile: keyFile, now: now, warn: warn}
	if err := c.load(); err != nil {
		return TCP{}, err
	}
	return TCP{TLS: &tls.Config{GetCertificate: c.get, MinVersion: tls.VersionTLS12}, Ours: c.names}, nil
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
		return agentlab.Errorf(agentlab.CodeDenied, "%s is accessible to all users (mode %04o)", c.keyFile, key.Mode().Perm()).
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
	c.cert, c.stamp, c.checked = &pair, [2]os.FileInfo{cert, key}, c.now()
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
	if now := c.now(); now.Sub(c.checked) >= certificateEvery {
		c.checked = now
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
