// Package outside is the only way out of this host on behalf of a guest. A service for
// guests asks for a server by its name (Guest.Permit), and gets it only if the network
// policy of the sandbox allows a connection to it. The decision is in the egress log of
// the sandbox. What the service sends goes to the addresses that were decided.
package outside

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

// Sandboxes returns the sandbox with a VMID; *store.Store implements it.
type Sandboxes interface {
	Sandbox(ctx context.Context, vmid int) (agentlab.Sandbox, error)
}

// Audit appends a decision to the egress log of a sandbox.
type Audit interface {
	RecordEgress(ctx context.Context, sb agentlab.Sandbox, r agentlab.EgressRecord) error
}

// Config is the configuration of an Outside.
type Config struct {
	Network   *gate.Outside
	Sandboxes Sandboxes
	Audit     Audit
	// Certificates are trusted in addition to those of the system, each as PEM.
	Certificates []string
	Stall        time.Duration // longest time without a byte from a server; default 1 min
	Logger       *slog.Logger  // nil means none
}

// Outside has the policies of the sandboxes that use it, and the connections. Its
// methods may be called from any goroutine.
type Outside struct {
	cfg    Config
	public *http.Transport
	// private has the connections to private addresses, so that they are not used for
	// other guests.
	private *http.Transport
	changes atomic.Int64 // calls of SandboxChanged

	mu     sync.Mutex
	guests map[int]*Guest
}

// New returns an Outside.
func New(cfg Config) *Outside {
	cfg.Logger, cfg.Stall = cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler)), cmp.Or(cfg.Stall, time.Minute)
	o := &Outside{cfg: cfg, guests: map[int]*Guest{}}
	o.public, o.private = o.transport(), o.transport()
	return o
}

// Close ends what runs for guests. No call may follow.
func (o *Outside) Close() error {
	o.mu.Lock()
	guests := o.guests
	o.guests = map[int]*Guest{}
	o.mu.Unlock()
	for _, g := range guests {
		g.close()
	}
	o.public.CloseIdleConnections()
	o.private.CloseIdleConnections()
	return nil
}

// serverKey is the key of the Server in the context of a request.
type serverKey struct{}

// transport returns a transport that connects only to the Server in the context of a
// request. It ignores proxies in the environment: they would resolve names themselves.
func (o *Outside) transport() *http.Transport {
	roots, err := x509.SystemCertPool()
	if err != nil {
		roots = x509.NewCertPool()
	}
	for _, pem := range o.cfg.Certificates {
		roots.AppendCertsFromPEM([]byte(pem))
	}
	return &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			srv, ok := ctx.Value(serverKey{}).(Server)
			err := error(agentlab.Errorf(agentlab.CodeInternal, "a connection without a decision"))
			if !ok {
				return nil, err
			}
			for _, to := range srv.addrs {
				var conn net.Conn
				if conn, err = o.cfg.Network.Dial(ctx, to, srv.Private); err == nil || ctx.Err() != nil {
					return conn, err
				}
			}
			return nil, err
		},
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots}, ForceAttemptHTTP2: true, MaxIdleConnsPerHost: 8, IdleConnTimeout: time.Minute,
		TLSHandshakeTimeout: 20 * time.Second, ResponseHeaderTimeout: o.cfg.Stall, MaxResponseHeaderBytes: 64 << 10,
	}
}

// Server is a server that the policy of a guest allows.
type Server struct {
	Private bool // the policy opens a private destination
	at      string
	addrs   []netip.AddrPort // that may be dialled
	o       *Outside
}

// Do sends a request to the server, whose name must be the host of the URL. It follows
// no redirect: the policy may not allow the other server. Reading the answer fails if
// the server sends nothing for Config.Stall.
func (srv Server) Do(req *http.Request) (*http.Response, error) {
	if at := HostPort(req.URL); srv.o == nil || at != srv.at {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "a request to %s without a decision", at)
	}
	tr := srv.o.public
	if srv.Private {
		tr = srv.o.private
	}
	ctx, cancel := context.WithCancel(context.WithValue(req.Context(), serverKey{}, srv))
	resp, err := tr.RoundTrip(req.WithContext(ctx))
	if err != nil {
		cancel()
		return nil, err
	}
	resp.Body = &body{resp.Body, cancel, srv.o.cfg.Stall}
	return resp, nil
}

// body cancels a request whose server sends nothing for too long.
type body struct {
	io.ReadCloser
	cancel context.CancelFunc
	stall  time.Duration
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	defer time.AfterFunc(b.stall, b.cancel).Stop()
	return b.ReadCloser.Read(p)
}

// Close implements io.Closer.
func (b *body) Close() error {
	defer b.cancel()
	return b.ReadCloser.Close()
}

// HostPort returns HOST:PORT of a URL.
func HostPort(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = "443"
		if u.Scheme == "http" {
			port = "80"
		}
	}
	return net.JoinHostPort(strings.ToLower(u.Hostname()), port)
}
