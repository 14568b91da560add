package guestserver

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/connlimit"
)

// Limits bound what one sandbox may ask for. Zero fields take the default.
type Limits struct {
	JSONBytes  int64   // body of a bootstrap request or report; default 64 KiB
	LogChunk   int64   // body of one log append; default 1 MiB
	Rate       float64 // calls in a second; default 200, with a burst of 400
	Bootstraps float64 // bootstrap calls in a second; default 1, with a burst of 10
	// Refusal is how long every refusal of a bootstrap token takes, more than
	// any of the checks, so that the time does not tell which of them it
	// failed; default 50 ms.
	Refusal      time.Duration
	InFlight     int           // calls at the same time; default 16
	Connections  int           // connections at the same time; default 64
	StallTimeout time.Duration // longest time that a body may give no byte, or an answer take none; default 30 s
	MinBodyRate  float64       // bytes in a second that a body gives on average after StallTimeout; default 512
}

func (l Limits) withDefaults() Limits {
	if l.JSONBytes <= 0 {
		l.JSONBytes = 64 << 10
	}
	if l.LogChunk <= 0 {
		l.LogChunk = 1 << 20
	}
	if l.Rate <= 0 {
		l.Rate = 200
	}
	if l.Bootstraps <= 0 {
		l.Bootstraps = 1
	}
	if l.Refusal <= 0 {
		l.Refusal = 50 * time.Millisecond
	}
	if l.InFlight <= 0 {
		l.InFlight = 16
	}
	if l.Connections <= 0 {
		l.Connections = 64
	}
	if l.StallTimeout <= 0 {
		l.StallTimeout = 30 * time.Second
	}
	if l.MinBodyRate <= 0 {
		l.MinBodyRate = 512
	}
	return l
}

// Config is what a Server needs.
type Config struct {
	Tokens    Tokens
	Jobs      Jobs
	Artifacts Artifacts
	Bootstrap Bootstrap
	Limits    Limits
	Clock     func() time.Time // nil means time.Now
	Logger    *slog.Logger     // nil means none
}

// Server makes the handlers of the guest plane. It holds no state of its own:
// a restarted controller goes on where it was.
type Server struct {
	cfg Config
	log *slog.Logger
}

// New makes a Server.
func New(cfg Config) *Server {
	cfg.Limits = cfg.Limits.withDefaults()
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Server{cfg: cfg, log: cfg.Logger}
}

// Timeouts of every guest listener. There is none for whole requests and
// answers, since uploads and long polls may take long: their bodies are
// bounded by progress instead.
const (
	headerTimeout  = 10 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 16 << 10
)

// HTTPServer returns a server for the listener of one sandbox, with timeouts
// that suit a hostile client. Serve does the rest too.
func (s *Server) HTTPServer(vmid int) *http.Server {
	return &http.Server{
		Handler:           s.Handler(vmid),
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
}

// Serve answers the guest of one sandbox on l until ctx ends or l fails. It
// closes l, limits the number of connections, and cuts calls that are still
// under way when ctx ends: the runner sends them again.
func (s *Server) Serve(ctx context.Context, vmid int, l net.Listener) error {
	srv := s.HTTPServer(vmid)
	srv.BaseContext = func(net.Listener) context.Context { return ctx }
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer stop()
	err := srv.Serve(connlimit.New(l, s.cfg.Limits.Connections, s.cfg.Limits.Connections))
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Handler serves all routes of the guest plane for the sandbox with that
// VMID, which must be the only one that can reach it. Rate limits count for
// each handler that is made.
func (s *Server) Handler(vmid int) http.Handler {
	l := s.cfg.Limits
	g := &guest{
		s: s, vmid: vmid, log: bounded.Lines(s.log.With("vmid", vmid), logBurst, logEvery, s.cfg.Clock),
		calls:      rate.NewLimiter(rate.Limit(l.Rate), int(2*l.Rate)),
		bootstraps: rate.NewLimiter(rate.Limit(l.Bootstraps), int(10*l.Bootstraps)),
		slots:      make(chan struct{}, l.InFlight),
	}
	mux := http.NewServeMux()
	for _, r := range g.routes() {
		mux.HandleFunc(r.method+" "+r.path, g.admit(r))
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		writeError(w, http.StatusNotFound, "not_found", "no such call")
	})
	return g.guard(mux)
}

// route is one row of the guest plane. Every column is required.
type route struct {
	method, path string
	needs        need
	serve        func(w http.ResponseWriter, r *http.Request, jobID string)
}

// need is what a call must prove, beside coming through a sandbox's own
// channel. The zero value is nothing that can be proven.
type need int

const (
	// oneTime: the one-time token in the body, which the handler checks.
	oneTime need = iota + 1
	// runner: the runner's grant, for calls that an ended job may still make.
	runner
	// runnerAtWork: the runner's grant, and a job that has not ended.
	runnerAtWork
	// uploaderAtWork: the grant for uploads, and a job that has not ended.
	uploaderAtWork
)

// routes is the guest plane. No handler takes from a request whom it is
// about: the sandbox is that of the channel, the job that of the grant.
func (g *guest) routes() []route {
	return []route{
		{"POST", guestapi.PathBootstrap, oneTime, func(w http.ResponseWriter, r *http.Request, _ string) { g.bootstrap(w, r) }},
		{"POST", guestapi.PathReport, runner, g.report},
		{"GET", guestapi.PathDirective, runner, g.directive},
		{"POST", guestapi.PathLog, runnerAtWork, g.appendLog},
		{"POST", guestapi.PathNetwork, runnerAtWork, g.narrowNetwork},
		{"GET", guestapi.PathRepo, runnerAtWork, g.repo},
		{"PUT", guestapi.PathUpload + "{path...}", uploaderAtWork, g.upload},
	}
}

// admit lets those calls through to a row that prove what it needs.
func (g *guest) admit(r route) http.HandlerFunc {
	switch r.needs {
	case oneTime:
		return func(w http.ResponseWriter, req *http.Request) { r.serve(w, req, "") }
	case runner:
		return g.with(agentlab.GrantRunner, r.serve)
	case runnerAtWork:
		return g.during(agentlab.GrantRunner, r.serve)
	case uploaderAtWork:
		return g.during(agentlab.GrantUpload, r.serve)
	}
	return func(w http.ResponseWriter, req *http.Request) { g.fail(w, req, errNoGrant) }
}

// Lines that one guest can cause in the daemon's log: so many at once, then one
// each logEvery. All guests share that log, and its size is bounded: one guest
// must not push out the lines of others.
const (
	logBurst = 50
	logEvery = 5 * time.Second
)

// guest is one sandbox as this plane sees it.
type guest struct {
	s          *Server
	vmid       int
	log        *slog.Logger
	calls      *rate.Limiter
	bootstraps *rate.Limiter
	slots      chan struct{}
	logMu      sync.Mutex // one log append at a time
}
