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
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/connlimit"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// PlaneLimits are limits of one sandbox for all its calls. Zero means the default.
type PlaneLimits struct {
	Rate         float64       // calls per second; default 200, with a burst of 400
	InFlight     int           // calls at the same time; default 16
	Connections  int           // connections at the same time; default 64
	StallTimeout time.Duration // longest time without a byte of a body or an answer; default 30 s
	MinBodyRate  float64       // minimum average rate of a body after StallTimeout, in bytes per second; default 512
}

func (l PlaneLimits) withDefaults() PlaneLimits {
	l.Rate = cmp.Or(l.Rate, 200)
	l.InFlight = cmp.Or(l.InFlight, 16)
	l.Connections = cmp.Or(l.Connections, 64)
	l.StallTimeout = cmp.Or(l.StallTimeout, 30*time.Second)
	l.MinBodyRate = cmp.Or(l.MinBodyRate, 512)
	return l
}

// Config is the configuration of a Plane.
type Config struct {
	Store     Store
	Redactors Redactors
	Limits    PlaneLimits
	Clock     func() time.Time // nil means time.Now
	Logger    *slog.Logger     // nil means none
}

// Store has the grants and the jobs; *store.Store implements it.
type Store interface {
	// GrantByHash finds the grant of that kind by the lower-case hex SHA-256
	// of its token. Code not_found (or denied) means there is none. Expiry
	// and VMID are checked by the caller.
	GrantByHash(ctx context.Context, hash, kind string) (agentlab.Grant, error)
	Job(ctx context.Context, id string) (agentlab.Job, error)
}

// Redactors returns the redactors of the data from guests; *bootstrap.Service implements it.
// After an error nothing is stored: the runner tries again.
type Redactors interface {
	// Redactor returns the redactor of the secrets of a job.
	Redactor(ctx context.Context, jobID string) (*redact.Redactor, error)
	// SandboxRedactor returns the redactor of the secrets that a sandbox got,
	// with or without a job.
	SandboxRedactor(ctx context.Context, vmid int) (*redact.Redactor, error)
}

// Plane serves the guest plane: the services that were added to it. Its only state is
// about open listeners, so a restarted controller continues.
//
// All guests share one mux and one http.Server: an idle guest costs its listener
// and a goroutine.
type Plane struct {
	cfg       Config
	log       *slog.Logger
	shared    Limits // of the calls of all services without a lane
	protocols []protocol
	mux       *http.ServeMux
	http      *http.Server
}

// New returns a Plane with services. Others can be added before guests are served.
func New(cfg Config, services ...Service) *Plane {
	cfg.Limits = cfg.Limits.withDefaults()
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	p := &Plane{cfg: cfg, log: cfg.Logger, mux: http.NewServeMux(), shared: Limits{Rate: cfg.Limits.Rate, Burst: int(2 * cfg.Limits.Rate), Parallel: cfg.Limits.InFlight}}
	unknown := &entry{&p.shared, Route{Token: Channel, Serve: func(*Call) (any, error) {
		return nil, agentlab.Errorf(agentlab.CodeNotFound, "no such call")
	}}}
	p.mux.HandleFunc("/", p.handler(unknown))
	p.Add(services...)
	p.http = &http.Server{
		Handler:           http.HandlerFunc(p.serve),
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(p.log.Handler(), slog.LevelDebug),
		BaseContext:       func(l net.Listener) context.Context { return l.(*accepted).ctx },
	}
	return p
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

// Handler serves all calls of the guest plane for the sandbox with that VMID,
// which must be the only one that can reach it. Each handler has its own rate
// limits.
func (s *Plane) Handler(vmid int) http.Handler {
	g := s.newGuest(vmid)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.serve(w, r.WithContext(withGuest(r.Context(), g)))
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
	if own, ok := errors.AsType[*Refused](err); ok {
		st, code, msg = own.Status, own.Code, own.Message
		if own.RetryAfter > 0 {
			w.Header().Set("Retry-After", strconv.Itoa(own.RetryAfter))
		}
	} else if own, ok := errors.AsType[*agentlab.Error](err); ok && st < 500 {
		msg = own.Message
	}
	if st >= 500 && r.Context().Err() == nil { // otherwise the guest has disconnected
		g.log.Error("guest call failed", "method", r.Method, "pattern", r.Pattern, "err", err)
	} else {
		g.log.Debug("guest call refused", "method", r.Method, "pattern", r.Pattern, "code", code)
	}
	writeError(w, st, code, msg)
}

func writeError(w http.ResponseWriter, status int, code agentlab.Code, msg string) {
	// The rest of a refused body is not read.
	w.Header().Set("Connection", "close")
	writeJSON(w, status, guestapi.ErrorBody{Code: string(code), Message: msg})
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

// BodyError adds a code to an error from reading a body, which the guest
// causes.
func BodyError(err error) error {
	if _, ok := errors.AsType[*agentlab.Error](err); ok {
		return err
	}
	return &agentlab.Error{Code: agentlab.CodeInvalid, Message: "the request body was truncated", Err: err}
}
