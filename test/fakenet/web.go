package fakenet

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"
)

// HandleHTTP serves plain HTTP on a port of a host.
func (n *Net) HandleHTTP(name string, port uint16, h http.Handler) netip.AddrPort {
	l := newListener()
	at := n.HandleTCP(name, port, l.serve)
	n.serveHTTP(l, h)
	return at
}

// HandleHTTPS serves HTTP over TLS on a port of a host, with a certificate for
// its name that ca made.
func (n *Net) HandleHTTPS(name string, port uint16, ca *CA, h http.Handler) (netip.AddrPort, error) {
	cert, err := ca.Issue(name)
	if err != nil {
		return netip.AddrPort{}, err
	}
	l := newListener()
	at := n.HandleTCP(name, port, l.serve)
	n.serveHTTP(tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"http/1.1"}, MinVersion: tls.VersionTLS12}), h)
	return at, nil
}

func (n *Net) serveHTTP(l net.Listener, h http.Handler) {
	srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	n.onClose(func() { _ = srv.Close() })
	n.spawn(func() { _ = srv.Serve(l) })
}

// Web serves a small site on port 80 of a host: /hello is a greeting, and
// /bytes/N answers with N bytes.
func (n *Net) Web(name string) netip.AddrPort { return n.HandleHTTP(name, 80, Site()) }

// Site is the handler behind Web.
func Site() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /hello", func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintf(w, "hello from %s\n", r.Host)
	})
	mux.HandleFunc("GET /bytes/{n}", func(w http.ResponseWriter, r *http.Request) {
		left, err := strconv.ParseInt(r.PathValue("n"), 10, 64)
		if err != nil || left < 0 {
			http.Error(w, "not a number of bytes", http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Length", strconv.FormatInt(left, 10))
		block := make([]byte, 32<<10)
		for left > 0 {
			size, err := w.Write(block[:min(left, int64(len(block)))])
			if err != nil {
				return
			}
			left -= int64(size)
		}
	})
	return mux
}

// listener turns connections that are handed to serve into accepted ones.
type listener struct {
	conns chan net.Conn
	end   chan struct{}
	once  sync.Once
}

func newListener() *listener {
	return &listener{conns: make(chan net.Conn), end: make(chan struct{})}
}

// serve hands conn to Accept and returns when it was closed.
func (l *listener) serve(conn net.Conn) {
	c := &accepted{Conn: conn, done: make(chan struct{})}
	select {
	case l.conns <- c:
		select {
		case <-c.done:
		case <-l.end:
		}
	case <-l.end:
	}
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.end:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *listener) Close() error {
	l.once.Do(func() { close(l.end) })
	return nil
}

// Addr implements net.Listener.
func (l *listener) Addr() net.Addr { return &net.TCPAddr{} }

type accepted struct {
	net.Conn
	once sync.Once
	done chan struct{}
}

// Close implements net.Conn.
func (a *accepted) Close() error {
	defer a.once.Do(func() { close(a.done) })
	return a.Conn.Close()
}

// CloseWrite lets the HTTP server end a connection without a reset.
func (a *accepted) CloseWrite() error {
	if half, ok := a.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// CA is a certificate authority for one test.
type CA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewCA makes an authority that is valid for a day.
func NewCA() (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	t := certificate("fakenet test authority")
	t.IsCA, t.BasicConstraintsValid, t.KeyUsage = true, true, x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &CA{cert, key}, nil
}

// PEM returns the authority's certificate, for a client to trust.
func (c *CA) PEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.cert.Raw})
}

// Issue returns a certificate of a server for a name or an IP address.
func (c *CA) Issue(name string) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	t := certificate(name)
	t.DNSNames, t.KeyUsage = []string{name}, x509.KeyUsageDigitalSignature
	if ip := net.ParseIP(name); ip != nil {
		t.DNSNames, t.IPAddresses = nil, []net.IP{ip}
	}
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	der, err := x509.CreateCertificate(rand.Reader, t, c.cert, key.Public(), c.key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

func certificate(name string) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 100)) // never fails with this reader
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(24 * time.Hour),
	}
}
