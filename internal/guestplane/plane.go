package guestplane

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/connlimit"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// Limits are the limits of one sandbox. Zero means the default.
type Limits struct {
	JSONBytes  int64   // body of a bootstrap request or report; default 64 KiB
	LogChunk   int64   // body of one log append; default 1 MiB
	Rate       float64 // calls per second; default 200, with a burst of 400
	Bootstraps float64 // bootstrap calls per second; default 1, with a burst of 10
	Posts      float64 // messages per second, also refused ones; default 5, with a burst of 50
	// Refusal is how long every refusal of a bootstrap token takes. It is
	// longer than any check, so that the time does not reveal which check
	// failed; default 50 ms.
	Refusal      time.Duration
	Tails        int           // calls that read messages at the same time, part of InFlight; default 8
	InFlight     int           // calls at the same time; default 16
	Connections  int           // connections at the same time; default 64
	StallTimeout time.Duration // longest time without a byte of a body or an answer; default 30 s
	MinBodyRate  float64       // minimum average rate of a body after StallTimeout, in bytes per second; default 512
}

func (l Limits) withDefaults() Limits {
	l.JSONBytes = cmp.Or(l.JSONBytes, 64<<10)
	l.LogChunk = cmp.Or(l.LogChunk, 1<<20)
	l.Rate = cmp.Or(l.Rate, 200)
	l.Bootstraps = cmp.Or(l.Bootstraps, 1)
	l.Refusal = cmp.Or(l.Refusal, 50*time.Millisecond)
	l.Posts = cmp.Or(l.Posts, 5)
	l.Tails = cmp.Or(l.Tails, 8)
	l.InFlight = cmp.Or(l.InFlight, 16)
	l.Connections = cmp.Or(l.Connections, 64)
	l.StallTimeout = cmp.Or(l.StallTimeout, 30*time.Second)
	l.MinBodyRate = cmp.Or(l.MinBodyRate, 512)
	return l
}

// Config is what a Plane needs.
type Config struct {
	Tokens    Tokens
	Jobs      Jobs
	Artifacts Artifacts
	Bootstrap Bootstrap
	Messages  Messages
	Leases    Leases
	Cache     Cache // nil: there is no registry cache
	Limits    Limits
	Clock     func() time.Time // nil means time.Now
	Logger    *slog.Logger     // nil means none
}

// Plane serves the guest plane. Its only state is that of open listeners, so a
// restarted controller continues.
//
// All guests share one mux and one http.Server: an idle guest costs its listener
// and a goroutine.
type Plane struct {
	cfg  Config
	log  *slog.Logger
	mux  http.Handler
	http *http.Server
}

// New returns a Plane.
func New(cfg Config) *Plane {
	cfg.Limits = cfg.Limits.withDefaults()
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Plane{cfg: cfg, log: cfg.Logger, mux: withCache(newMux(), cfg.Cache)}
	s.http = &http.Server{
		Handler:           s.mux,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		BaseContext:       func(l net.Listener) context.Context { return l.(*accepted).ctx },
	}
	return s
}

// Timeouts of every guest listener. There is none for complete requests and
// answers, because uploads and long polls may take long: their bodies must
// make progress instead.
const (
	headerTimeout  = 10 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 16 << 10
)

// Serve serves the guest of one sandbox on l until ctx ends or l fails. It
// closes l and all connections, which aborts running calls: the runner sends them
// again.
func (s *Plane) Serve(ctx context.Context, vmid int, l net.Listener) error {
	accept, stop := s.Handle(vmid)
	defer stop()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	defer func() { _ = l.Close() }()
	for pause := firstPause; ; {
		c, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = c.Close()
			}
			return nil
		case err == nil:
			pause = firstPause
			accept(c)
		case connlimit.Temporary(err):
			pause = min(2*pause, lastPause)
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return nil
			}
		default:
			return err
		}
	}
}

// Handle returns a function that serves a connection of the guest of one sandbox
// and returns at once, and one that closes all its connections and refuses more.
// The number of connections is limited. A guest without connections costs little.
func (s *Plane) Handle(vmid int) (accept func(net.Conn), stop func()) {
	l := &line{s: s, vmid: vmid}
	return l.accept, l.stop
}

// Pauses after a temporary error of Accept.
const (
	firstPause = 5 * time.Millisecond
	lastPause  = time.Second
)

// accepted is a listener that returns one connection and then io.EOF.
type accepted struct {
	net.Conn
	ctx  context.Context // of the calls on the connection
	done bool
}

// Accept implements net.Listener. It is not called concurrently.
func (a *accepted) Accept() (net.Conn, error) {
	if a.done {
		return nil, io.EOF
	}
	a.done = true
	return a.Conn, nil
}

// Close implements net.Listener. The connection stays open.
func (a *accepted) Close() error { return nil }

// Addr implements net.Listener.
func (a *accepted) Addr() net.Addr { return a.LocalAddr() }

// Handler serves all routes of the guest plane for the sandbox with that VMID,
// which must be the only one that can reach it. Each handler has its own rate
// limits.
func (s *Plane) Handler(vmid int) http.Handler {
	g := s.newGuest(vmid)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mux.ServeHTTP(w, r.WithContext(withGuest(r.Context(), g)))
	})
}

// newMux returns the handler of the calls of all guests.
func newMux() http.Handler {
	mux := http.NewServeMux()
	for _, r := range routes() {
		serve := admit(r)
		mux.HandleFunc(r.method+" "+r.path, func(w http.ResponseWriter, req *http.Request) { serve(guestOf(req.Context()), w, req) })
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		writeError(w, http.StatusNotFound, "not_found", "no such call")
	})
	return guard(mux)
}

// route is one row of the guest plane. Every column is required.
type route struct {
	method, path string
	needs        need
	serve        handler
}

// handler serves a call of a guest. jobID is that of the grant, "" if the call
// needs none.
type handler func(g *guest, w http.ResponseWriter, r *http.Request, jobID string)

// need is what a call must prove, in addition to using the sandbox's own
// listener. The zero value cannot be proven.
type need int

const (
	// oneTime: the one-time token in the body, which the handler checks.
	oneTime need = iota + 1
	// runner: the runner's grant, for calls that an ended job may still make.
	runner
	// runnerAtWork: the runner's grant, for a job that has not ended.
	runnerAtWork
	// uploaderAtWork: the upload grant, for a job that has not ended.
	uploaderAtWork
	// messenger: the grant for messages, with or without a job.
	messenger
)

// routes returns the routes of the guest plane. No handler reads the sandbox
// or the job from a request: the sandbox is that of the listener, the job that
// of the grant.
func routes() []route {
	return []route{
		{"POST", guestapi.PathBootstrap, oneTime, (*guest).bootstrap},
		{"POST", guestapi.PathReport, runner, (*guest).report},
		{"GET", guestapi.PathDirective, runner, (*guest).directive},
		{"POST", guestapi.PathLog, runnerAtWork, (*guest).appendLog},
		{"POST", guestapi.PathNetwork, runnerAtWork, (*guest).narrowNetwork},
		{"GET", guestapi.PathRepo, runnerAtWork, (*guest).repo},
		{"POST", guestapi.PathMessages, messenger, (*guest).postMessage},
		{"GET", guestapi.PathMessages, messenger, (*guest).readMessages},
		{"POST", guestapi.PathLease, messenger, (*guest).renewLease},
		{"GET", guestapi.PathLease, messenger, (*guest).lease},
		{"PUT", guestapi.PathUpload + "{path...}", uploaderAtWork, (*guest).upload},
	}
}

// admit returns a function that passes on calls that prove what the row needs.
func admit(r route) func(g *guest, w http.ResponseWriter, req *http.Request) {
	switch r.needs {
	case oneTime:
		return func(g *guest, w http.ResponseWriter, req *http.Request) { r.serve(g, w, req, "") }
	case runner:
		return withGrant(agentlab.GrantRunner, r.serve)
	case runnerAtWork:
		return whileRunning(agentlab.GrantRunner, r.serve)
	case uploaderAtWork:
		return whileRunning(agentlab.GrantUpload, r.serve)
	case messenger:
		return withGrant(agentlab.GrantMessages, r.serve)
	}
	return func(g *guest, w http.ResponseWriter, req *http.Request) { g.fail(w, req, errNoGrant) }
}

// Bootstrap delivers jobs and secrets; *bootstrap.Service implements it.
type Bootstrap interface {
	// Exchange exchanges the one-time token, given as its lower-case hex
	// SHA-256, for everything that the runner of the sandbox needs. In one
	// transaction it consumes the token, stores the grants of the tokens in
	// the answer and changes the job to RUNNING. For unknown, used, expired
	// and other sandboxes' tokens it returns CodeDenied with the same message;
	// after every other error the token can still be used, and the runner
	// tries again.
	Exchange(ctx context.Context, vmid int, tokenHash string) (guestapi.BootstrapResponse, error)

	// Redactor returns the redactor of the secrets of a job. After an error
	// log appends fail (the runner tries again), so that nothing unredacted
	// is stored.
	Redactor(ctx context.Context, jobID string) (*redact.Redactor, error)

	// SandboxRedactor returns the redactor of the secrets that a sandbox got,
	// with or without a job.
	SandboxRedactor(ctx context.Context, vmid int) (*redact.Redactor, error)
}

// Jobs is the part of the job service that the guest plane uses. vmid is
// always that of the listener of the call, never a value from the guest.
type Jobs interface {
	// Started is called after each successful Exchange.
	Started(ctx context.Context, vmid int)

	// Get returns the job with that ID.
	Get(ctx context.Context, id string) (agentlab.Job, error)

	// Report checks (guestcheck.Report) and stores the state of the
	// sandbox's job. Its text is already redacted. It is idempotent; a
	// report for a final job is not an error.
	Report(ctx context.Context, vmid int, r guestapi.Report) (guestapi.Directive, error)

	// NarrowNetwork narrows the sandbox's network policy, and never widens
	// it. When it returns nil, the narrower policy is in force. A repeated
	// call with the same policy changes nothing.
	NarrowNetwork(ctx context.Context, vmid int, n guestapi.NetworkNarrow) error

	// Directive returns the directive for the runner. With wait > 0 it
	// returns when Stop changes to a non-empty value or after wait,
	// whichever is first.
	Directive(ctx context.Context, vmid int, wait time.Duration) (guestapi.Directive, error)
}

// Tokens looks up grants, which are stored by hash.
type Tokens interface {
	// GrantByHash finds the grant of that kind by the lower-case hex SHA-256
	// of its token. Code not_found (or denied) means there is none. Expiry
	// and VMID are checked by the caller.
	GrantByHash(ctx context.Context, hash, kind string) (agentlab.Grant, error)
}

// Artifacts stores files of guests. *artifact.Service implements it.
type Artifacts interface {
	// Put stores a file of a job, replacing one of the same path.
	Put(ctx context.Context, jobID, path string, r io.Reader) (agentlab.Artifact, error)
	// LogSize returns how many bytes of the job's agent log are stored.
	LogSize(ctx context.Context, jobID string) (int64, error)
	// Log reads the log from offset to its current end.
	Log(ctx context.Context, jobID string, offset int64, follow bool) (io.ReadCloser, error)
	// AppendLog adds p to the log at offset, which must not be beyond its
	// end; bytes that are already stored are skipped. full means that the
	// quota is used up.
	AppendLog(ctx context.Context, jobID string, offset int64, p []byte) (size int64, full bool, err error)
	// RepoBundle opens the git bundle given for the job.
	RepoBundle(ctx context.Context, jobID string) (rc io.ReadSeekCloser, size int64, err error)
}

// Cache is the registry cache. It has its own limits; *regcache.Service implements
// it.
type Cache interface {
	Wants(r *http.Request) bool
	Serve(vmid int, w http.ResponseWriter, r *http.Request)
}

// withCache passes requests for the registry cache to it, and all others to next.
func withCache(next http.Handler, c Cache) http.Handler {
	if c == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c.Wants(r) {
			c.Serve(guestOf(r.Context()).vmid, w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// status maps codes to HTTP statuses of the guest plane.
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

// fail answers with an error. The guest receives its text only if the guest's
// request caused it.
func (g *guest) fail(w http.ResponseWriter, r *http.Request, err error) {
	code := agentlab.CodeOf(err)
	st := status(code)
	msg := "the controller cannot do this now"
	if own, ok := errors.AsType[*agentlab.Error](err); ok && st < 500 {
		msg = own.Message
	}
	if st >= 500 && r.Context().Err() == nil { // otherwise the guest has disconnected
		g.log.Error("guest call failed", "method", r.Method, "pattern", r.Pattern, "err", err)
	} else {
		g.log.Debug("guest call refused", "method", r.Method, "pattern", r.Pattern, "code", code)
	}
	writeError(w, st, string(code), msg)
}

func writeError(w http.ResponseWriter, status int, code, msg string) {
	// The rest of a refused body is not read.
	w.Header().Set("Connection", "close")
	writeJSON(w, status, guestapi.ErrorBody{Code: code, Message: msg})
}

// answerTimeout limits how long a guest may take to read an answer.
const answerTimeout = 30 * time.Second

func writeJSON(w http.ResponseWriter, status int, v any) {
	p, err := json.Marshal(v)
	if err != nil {
		status, p = http.StatusInternalServerError, []byte(`{"code":"internal","message":"internal error"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	rc := http.NewResponseController(w)
	_ = rc.SetWriteDeadline(time.Now().Add(answerTimeout)) // not supported by every ResponseWriter of tests
	w.WriteHeader(status)
	_, _ = w.Write(append(p, '\n')) // the guest may have disconnected
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

// bodyError adds a code to an error from reading a body, which the guest
// causes.
func bodyError(err error) error {
	if _, ok := errors.AsType[*agentlab.Error](err); ok {
		return err
	}
	return &agentlab.Error{Code: agentlab.CodeInvalid, Message: "the request body was truncated", Err: err}
}
