package guestserver

import (
	"context"
	"encoding/json"
	"errors"
	"io"
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
	"github.com/agentlab-vm/agentlab/internal/redact"
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
		return g.withGrant(agentlab.GrantRunner, r.serve)
	case runnerAtWork:
		return g.whileRunning(agentlab.GrantRunner, r.serve)
	case uploaderAtWork:
		return g.whileRunning(agentlab.GrantUpload, r.serve)
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

// Bootstrap delivers jobs and secrets; *bootstrap.Service implements it.
type Bootstrap interface {
	// Exchange trades the one-time token, given as its lower-case hex SHA-256,
	// for everything that the runner of the sandbox needs. In one transaction
	// it consumes the token, stores the grants whose tokens the answer holds
	// and moves the job to RUNNING. Unknown, used, expired and foreign tokens
	// are all CodeDenied, without a difference in message; every other error
	// leaves the token usable, and the runner tries again.
	Exchange(ctx context.Context, vmid int, tokenHash string) (guestapi.BootstrapResponse, error)

	// Redactor returns the redactor of the secrets of a job. An error makes
	// log appends fail (the runner tries again): nothing unredacted is stored.
	Redactor(ctx context.Context, jobID string) (*redact.Redactor, error)
}

// Jobs is what the guest plane asks of the job service. vmid is always that
// of the channel on which the call came, never what the guest claims.
type Jobs interface {
	// Started is called after each successful Exchange.
	Started(ctx context.Context, vmid int)

	// Get returns the job with that id.
	Get(ctx context.Context, id string) (agentlab.Job, error)

	// Report checks (guestcheck.Report) and records how the job of the
	// sandbox stands. Its text is already redacted. It is idempotent; a
	// report for a job that is final is answered, not an error.
	Report(ctx context.Context, vmid int, r guestapi.Report) (guestapi.Directive, error)

	// NarrowNetwork narrows the sandbox's network policy, and never widens
	// it. When it returns nil the narrower policy is in force. The same again
	// changes nothing.
	NarrowNetwork(ctx context.Context, vmid int, n guestapi.NetworkNarrow) error

	// Directive answers what the controller wants of the runner. With
	// wait > 0 it answers when Stop changes to something not empty or when
	// wait is over, whichever is first.
	Directive(ctx context.Context, vmid int, wait time.Duration) (guestapi.Directive, error)
}

// Tokens looks up grants, which are stored by hash.
type Tokens interface {
	// GrantByHash finds the grant of that kind by the lower-case hex SHA-256
	// of its token. Code not_found (or denied) means there is none. Expiry
	// and VMID are checked by the caller.
	GrantByHash(ctx context.Context, hash, kind string) (agentlab.Grant, error)
}

// Artifacts keeps what guests send. *artifact.Service implements it.
type Artifacts interface {
	// Put stores a file of a job, replacing one of the same path.
	Put(ctx context.Context, jobID, path string, r io.Reader) (agentlab.Artifact, error)
	// LogSize tells how many bytes of the job's agent log are held.
	LogSize(ctx context.Context, jobID string) (int64, error)
	// Log reads the log from offset to its present end.
	Log(ctx context.Context, jobID string, offset int64, follow bool) (io.ReadCloser, error)
	// AppendLog adds p to the log at offset, which must not be beyond its
	// end; what is held already is skipped. full: the quota is reached.
	AppendLog(ctx context.Context, jobID string, offset int64, p []byte) (size int64, full bool, err error)
	// RepoBundle opens the git bundle given for the job.
	RepoBundle(ctx context.Context, jobID string) (rc io.ReadSeekCloser, size int64, err error)
}

// status maps codes to HTTP statuses, here and nowhere else for this plane.
func status(code agentlab.Code) int {
	switch code {
	case agentlab.CodeInvalid:
		return http.StatusBadRequest
	case agentlab.CodeDenied:
		return http.StatusUnauthorized
	case agentlab.CodeNotFound:
		return http.StatusNotFound
	case agentlab.CodeExists, agentlab.CodeConflict:
		return http.StatusConflict
	case agentlab.CodeLimit:
		return http.StatusRequestEntityTooLarge
	case agentlab.CodeNoSpace:
		return http.StatusInsufficientStorage
	case agentlab.CodeBusy:
		return http.StatusTooManyRequests
	case agentlab.CodeTimeout:
		return http.StatusRequestTimeout
	case agentlab.CodeUnsupported:
		return http.StatusNotImplemented
	case agentlab.CodeUnavailable, agentlab.CodeUnknownOutcome:
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

// fail answers an error. Its text goes to the guest only when the guest's own
// request is at fault.
func (g *guest) fail(w http.ResponseWriter, r *http.Request, err error) {
	code := agentlab.CodeOf(err)
	st := status(code)
	msg := "the controller cannot do this now"
	if own, ok := errors.AsType[*agentlab.Error](err); ok && st < 500 {
		msg = own.Message
	}
	if st >= 500 && r.Context().Err() == nil { // else it is the guest that broke off
		g.log.Error("guest call failed", "method", r.Method, "pattern", r.Pattern, "err", err)
	} else {
		g.log.Debug("guest call refused", "method", r.Method, "pattern", r.Pattern, "code", code)
	}
	writeError(w, st, string(code), msg)
}

func writeError(w http.ResponseWriter, status int, code, msg string) {
	// What is left of a refused body is not worth reading.
	w.Header().Set("Connection", "close")
	writeJSON(w, status, guestapi.ErrorBody{Code: code, Message: msg})
}

// answerTimeout is how long a guest may leave an answer unread.
const answerTimeout = 30 * time.Second

func writeJSON(w http.ResponseWriter, status int, v any) {
	p, err := json.Marshal(v)
	if err != nil {
		status, p = http.StatusInternalServerError, []byte(`{"code":"internal","message":"internal error"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	rc := http.NewResponseController(w)
	_ = rc.SetWriteDeadline(time.Now().Add(answerTimeout)) // not every ResponseWriter of a test can
	w.WriteHeader(status)
	_, _ = w.Write(append(p, '\n')) // the guest may be gone
	_ = rc.Flush()
	_ = rc.SetWriteDeadline(time.Time{})
}

// readAll reads a body of at most limit bytes.
func readAll(r io.Reader, limit int64) ([]byte, error) {
	p, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return nil, bodyError(err)
	}
	if int64(len(p)) > limit {
		return nil, agentlab.Errorf(agentlab.CodeLimit, "the body exceeds %d bytes", limit)
	}
	return p, nil
}

// bodyError gives an error of reading a body its code: it is the guest's.
func bodyError(err error) error {
	if _, ok := errors.AsType[*agentlab.Error](err); ok {
		return err
	}
	return &agentlab.Error{Code: agentlab.CodeInvalid, Message: "the body broke off", Err: err}
}
