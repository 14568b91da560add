package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
)

// Limits on what a caller may send, and how slowly.
const (
	maxJSONBytes     = 4 << 20 // enough for a task of 256 KiB with the longest JSON escapes
	maxHeaderBytes   = 64 << 10
	bodyStallTimeout = 30 * time.Second // longest time without a byte of the body
	writeTimeout     = 15 * time.Second // longest time that a stream's reader may read nothing
	idleTimeout      = 2 * time.Minute
)

// Config is what a Server needs.
type Config struct {
	Services Services
	Rules    Rules
	PeerOf   func(net.Conn) (Peer, error) // nil means sockpath.PeerOf; tests set other callers
	Logger   *slog.Logger
	Version  string // of the daemon, for the OpenAPI document
	Proxied  bool   // sandboxes use an upstream proxy
	// DefaultProfile is the profile of jobs and sandboxes that do not name one.
	DefaultProfile string
	// SessionProfile is the profile of sessions that 'agentlab start' creates.
	SessionProfile string
	// Trash is how long a deleted workspace stays in the trash. 0 means that this is
	// not known.
	Trash time.Duration
	// MaxBundleBytes is the maximum size of an uploaded git bundle. 0
	// means 4 GiB.
	MaxBundleBytes int64
	// HeaderTimeout limits how long a caller may take to send the header of a
	// request. 0 means 10 s.
	HeaderTimeout time.Duration
}

// Server is the control API.
type Server struct {
	cfg     Config
	log     *slog.Logger
	mux     *http.ServeMux
	table   []route         // the routes of the mux
	listed  map[string]bool // its patterns
	api     huma.API
	http    *http.Server                           // on the unix socket
	tcp     *http.Server                           // over TCP, for callers with a token
	ours    atomic.Pointer[func(host string) bool] // TCP.Ours
	drain   context.Context                        // done when streams must end
	undrain context.CancelFunc
	streams sync.WaitGroup // connections that were hijacked from net/http

	localRejections, remoteRejections *slog.Logger
}

// New returns a Server. It fails if the route table has an error.
func New(cfg Config) (*Server, error) {
	if cfg.PeerOf == nil {
		cfg.PeerOf = sockpath.PeerOf
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.MaxBundleBytes == 0 {
		cfg.MaxBundleBytes = 4 << 30
	}
	if cfg.HeaderTimeout == 0 {
		cfg.HeaderTimeout = 10 * time.Second
	}
	refused := func() *slog.Logger { return bounded.Lines(cfg.Logger, rejectionBurst, rejectionInterval, time.Now) }
	s := &Server{cfg: cfg, log: cfg.Logger, localRejections: refused(), remoteRejections: refused(), mux: http.NewServeMux(), listed: map[string]bool{}}
	adaptHuma()
	s.drain, s.undrain = context.WithCancel(context.Background())
	s.api = humago.New(s.mux, apiConfig(cfg.Version))
	s.table = s.routes()
	for _, r := range s.table {
		if err := s.register(r); err != nil {
			return nil, err
		}
		s.listed[r.method+" "+r.path] = true
	}
	s.documentPaths()
	s.http = &http.Server{
		Handler:           s.Handler(),
		ConnContext:       s.connContext,
		ReadHeaderTimeout: cfg.HeaderTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	s.tcp = s.tcpServer()
	return s, nil
}

// Serve serves the API on l, a unix socket, until Shutdown; it closes l.
func (s *Server) Serve(l net.Listener) error {
	if err := s.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Shutdown ends streams, waits for the other calls until ctx ends, and then
// closes the remaining connections.
func (s *Server) Shutdown(ctx context.Context) error {
	s.undrain()
	var errs []error
	for _, srv := range []*http.Server{s.http, s.tcp} {
		if err := srv.Shutdown(ctx); err != nil {
			errs = append(errs, err, srv.Close())
		}
	}
	s.streams.Wait()
	return errors.Join(errs...)
}

// rejectUnauthenticated answers an unauthenticated caller and does not wait for the rest of
// the request.
func (s *Server) rejectUnauthenticated(w http.ResponseWriter, r *http.Request, err error) {
	if !callerOf(r.Context()).local {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now())
		w.Header().Set("Connection", "close")
	}
	writeProblem(w, err)
}

// Handler returns the handler of the whole API. It identifies a caller by the
// value that ConnContext stored in the request's context and by the token of
// the request.
func (s *Server) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		w, done := limitStalls(w, r)
		defer done()
		defer s.recover(w, r)
		ctx, leave, err := s.authenticate(r)
		if leave != nil {
			defer leave()
		}
		if err != nil { // a caller without access learns nothing about routes
			s.logRejection(r, err)
			s.rejectUnauthenticated(w, r, err)
			return
		}
		w.Header().Set(api.VersionHeader, s.cfg.Version)
		r = r.WithContext(ctx)
		h, pattern := s.mux.Handler(r)
		if pattern == "" {
			writeProblem(w, noRoute(h, r))
			return
		}
		if !s.listed[pattern] { // it has no access column, so no caller has access
			s.log.Error("rejected: a route that is not in the table", "method", r.Method, "path", r.URL.Path)
			writeProblem(w, agentlab.Errorf(agentlab.CodeDenied, "no caller has access to %s", r.URL.Path))
			return
		}
		s.mux.ServeHTTP(w, r)
		s.log.Debug("call", "method", r.Method, "path", r.URL.Path, "took", time.Since(start))
	})
}

// recover handles a panic of one call: the daemon continues, and the caller
// does not receive the panic's text.
func (s *Server) recover(w http.ResponseWriter, r *http.Request) {
	p := recover()
	if p == nil {
		return
	}
	if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(p)
	}
	s.log.Error("panic in a handler", "method", r.Method, "path", r.URL.Path, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
	writeProblem(w, agentlab.Errorf(agentlab.CodeInternal, "internal error").
		WithHint("the cause is in the daemon's log: agentlab daemon logs"))
}

// noRoute returns why the mux has no route for r, from the answer of the mux.
func noRoute(h http.Handler, r *http.Request) error {
	var probe statusProbe
	h.ServeHTTP(&probe, r)
	if probe.status == http.StatusMethodNotAllowed {
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is not allowed on %s", r.Method, r.URL.Path).
			WithHint("allowed: %s", probe.Header().Get("Allow"))
	}
	return agentlab.Errorf(agentlab.CodeNotFound, "there is no %s", r.URL.Path).WithHint("see docs/api.md")
}

type statusProbe struct {
	header http.Header
	status int
}

func (p *statusProbe) Header() http.Header {
	if p.header == nil {
		p.header = http.Header{}
	}
	return p.header
}
func (p *statusProbe) WriteHeader(status int)      { p.status = status }
func (p *statusProbe) Write(b []byte) (int, error) { return len(b), nil }
