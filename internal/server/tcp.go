package server

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/connlimit"
)

// Maximum number of simultaneous TCP connections, in total and per host.
// Further connections are closed at once. The unix socket does not count.
const (
	maxConns       = 512
	maxConnsOfHost = 128
)

// TCP configures the API over TCP.
type TCP struct {
	// TLS has the certificate. Nil means plain HTTP, which is allowed only
	// on a loopback address.
	TLS *tls.Config
	// Ours reports whether a name in the header Host means this daemon;
	// nil means that no name does. Addresses and localhost always do.
	Ours func(host string) bool
}

// ServeTCP serves callers with a token on l until Shutdown; it closes l. It
// may be called once.
func (s *Server) ServeTCP(l net.Listener, c TCP) error {
	addr, ok := l.Addr().(*net.TCPAddr)
	if c.TLS == nil && (!ok || !addr.IP.IsLoopback()) {
		return errors.Join(agentlab.Errorf(agentlab.CodeDenied, "the API is not served on %s without TLS", l.Addr()).
			WithHint("set api.tls_cert and api.tls_key, or listen on 127.0.0.1"), l.Close())
	}
	s.ours.Store(&c.Ours)
	l = connlimit.New(l, maxConns, maxConnsOfHost)
	if c.TLS != nil {
		t := c.TLS.Clone()
		t.NextProtos = []string{"http/1.1"} // an HTTP/2 connection cannot become a stream
		t.MinVersion = max(t.MinVersion, tls.VersionTLS12)
		l = tls.NewListener(l, t)
	}
	if err := s.tcp.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func (s *Server) tcpServer() *http.Server {
	var only1 http.Protocols
	only1.SetHTTP1(true)
	return &http.Server{
		Handler:           s.rejectCrossSite(s.Handler()),
		ConnContext:       s.remoteContext,
		ReadHeaderTimeout: s.cfg.HeaderTimeout, // includes the TLS handshake
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		Protocols:         &only1,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
}

// remoteContext stores the remote address of a connection, for all its calls.
// The address alone gives no access.
func (s *Server) remoteContext(ctx context.Context, c net.Conn) context.Context {
	who := caller{source: c.RemoteAddr().String()}
	if a, err := netip.ParseAddrPort(c.RemoteAddr().String()); err == nil {
		who.from = a.Addr().Unmap()
		who.source = who.from.String()
	} else {
		who.err = err
	}
	return context.WithValue(ctx, callerKey{}, who)
}

// rejectCrossSite rejects requests that a web page could make a browser send: those
// with a foreign Host name (DNS rebinding) and those from another site. They
// are rejected before any token is checked.
func (s *Server) rejectCrossSite(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var err error
		switch {
		case fromOtherSite(r):
			err = agentlab.Errorf(agentlab.CodeDenied, "calls from web pages of other sites are rejected")
		case !s.isOurHost(r.Host):
			err = agentlab.Errorf(agentlab.CodeDenied, "the header Host is not a name of this daemon").
				WithField("Host").WithHint("use an address, localhost, or a name that is in the daemon's certificate")
		}
		if err != nil {
			s.logRejection(r, err)
			s.rejectUnauthenticated(w, r, err)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// fromOtherSite reports whether a browser sent a call for a page of another
// site. The method does not matter: a read call can disclose data.
func fromOtherSite(r *http.Request) bool {
	for _, site := range r.Header["Sec-Fetch-Site"] {
		if site != "same-origin" && site != "none" {
			return true
		}
	}
	for _, origin := range r.Header["Origin"] {
		u, err := url.Parse(origin)
		if err != nil || u.Host == "" || !strings.EqualFold(u.Host, r.Host) { // "null" too
			return true
		}
	}
	return false
}

// isOurHost reports whether the header Host means this daemon. DNS rebinding is
// not possible with an address.
func (s *Server) isOurHost(hostport string) bool {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil || strings.EqualFold(host, "localhost") {
		return true
	}
	ours := s.ours.Load()
	return host != "" && ours != nil && *ours != nil && (*ours)(host)
}
