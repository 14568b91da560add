package guestplane

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"runtime/debug"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// serve finds the call of a request. A panic of a service ends only this request.
func (s *Plane) serve(w http.ResponseWriter, r *http.Request) {
	g := guestOf(r.Context())
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
			panic(p)
		}
		g.log.Error("panic in a guest call", "method", r.Method, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
		writeError(w, http.StatusInternalServerError, agentlab.CodeInternal, "internal error")
	}()
	for i := range s.protocols {
		if e := &s.protocols[i]; e.Match(r) {
			s.within(e.lane, w, r, func(g *guest) error {
				r.Body = http.NoBody // bodies are not read
				e.Protocol.Serve(&Call{VMID: g.vmid, Log: g.log, Request: r, g: g, e: &e.entry}, w)
				return nil
			})
			return
		}
	}
	w.Header().Set("Cache-Control", "no-store")
	if path.Clean(r.URL.Path) != r.URL.Path { // the mux would send a redirect
		writeError(w, http.StatusNotFound, agentlab.CodeNotFound, "no such call")
		return
	}
	s.mux.ServeHTTP(w, r)
}

// within calls serve within the limits of a lane, and answers with its error. serve
// has sent nothing when it returns an error.
func (s *Plane) within(lane *Limits, w http.ResponseWriter, r *http.Request, serve func(g *guest) error) {
	g := guestOf(r.Context())
	leave, err := g.enter(r.Context(), lane)
	if err == nil {
		defer leave()
		err = serve(g)
	}
	if err != nil {
		g.fail(w, r, err)
	}
}

// handler returns the handler of a route.
func (s *Plane) handler(e *entry) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s.within(e.lane, w, r, func(g *guest) error { return s.call(g, e, w, r) })
	}
}

// call applies the token and the limits of a route, and calls its service.
func (s *Plane) call(g *guest, e *entry, w http.ResponseWriter, r *http.Request) (err error) {
	r.Body = &body{
		ReadCloser: r.Body, rc: http.NewResponseController(w), clock: s.cfg.Clock, began: s.cfg.Clock(),
		stall: s.cfg.Limits.StallTimeout, rate: s.cfg.Limits.MinBodyRate, most: e.Body,
	}
	c := &Call{VMID: g.vmid, Log: g.log, Request: r, g: g, e: e}
	if c.JobID, err = g.admit(r, e.Token); err != nil {
		return err
	}
	leaveRoute, err := g.enter(r.Context(), &e.Limits)
	if err != nil {
		return err
	}
	defer leaveRoute()
	answer, err := e.Serve(c)
	if err != nil {
		return err
	}
	switch out := answer.(type) {
	case nil:
		w.WriteHeader(http.StatusNoContent)
	case *Stream:
		out.send(c, w)
	default:
		writeJSON(w, http.StatusOK, answer)
	}
	return nil
}

var errTooMany = &Refused{Status: http.StatusTooManyRequests, Code: agentlab.CodeBusy, Message: "too many calls", RetryAfter: 1}

// admit returns the job of the grant that a request has. The error is the same for
// every invalid token.
func (g *guest) admit(r *http.Request, t Token) (jobID string, err error) {
	if t == Channel {
		return "", nil
	}
	kind, atWork := t.grant()
	if kind == "" {
		return "", errNoGrant
	}
	grant, err := g.grant(r.Context(), kind, r.Header.Get("Authorization"))
	if err != nil || !atWork {
		return grant.JobID, err
	}
	// The artifacts and the log of an ended job do not change.
	j, err := g.p.cfg.Store.Job(r.Context(), grant.JobID)
	if err == nil && j.Status.Final() {
		err = errNoGrant
	}
	return grant.JobID, err
}

var errNoGrant = agentlab.Errorf(agentlab.CodeDenied, "denied")

func (g *guest) grant(ctx context.Context, kind, header string) (agentlab.Grant, error) {
	token, ok := strings.CutPrefix(header, "Bearer ")
	if !ok || !Plausible(token) {
		return agentlab.Grant{}, errNoGrant
	}
	grant, err := g.p.cfg.Store.GrantByHash(ctx, Hash(token), kind)
	switch agentlab.CodeOf(err) {
	case "":
	case agentlab.CodeNotFound, agentlab.CodeDenied:
		return agentlab.Grant{}, errNoGrant
	default:
		return agentlab.Grant{}, err
	}
	if grant.VMID != g.vmid || grant.JobID == "" && kind != agentlab.GrantMessages || !g.p.cfg.Clock().Before(grant.ExpiresAt) {
		return agentlab.Grant{}, errNoGrant
	}
	return grant, nil
}

const maxTokenBytes = 256

// Plausible reports whether a text can be a token.
func Plausible(t string) bool { return t != "" && len(t) <= maxTokenBytes }

// Hash returns the lower-case hex SHA-256 of a token, by which it is stored.
func Hash(t string) string {
	sum := sha256.Sum256([]byte(t))
	return hex.EncodeToString(sum[:])
}

// body reads a request's body as long as it makes progress.
type body struct {
	io.ReadCloser
	rc    *http.ResponseController
	clock func() time.Time
	began time.Time
	stall time.Duration
	rate  float64
	n     int64
	most  int64 // maximum of n; AnyBody: none
}

var errSlow = agentlab.Errorf(agentlab.CodeTimeout, "the request body is sent too slowly")

func (b *body) Read(p []byte) (int, error) {
	_ = b.rc.SetReadDeadline(time.Now().Add(b.stall)) // not supported by every ResponseWriter of tests
	n, err := b.ReadCloser.Read(p)
	b.n += int64(n)
	if b.most != AnyBody && b.n > b.most {
		return 0, agentlab.Errorf(agentlab.CodeLimit, "the body exceeds %d bytes", b.most)
	}
	if err != nil {
		_ = b.rc.SetReadDeadline(time.Time{})
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = errSlow
		}
		return n, err
	}
	if d := b.clock().Sub(b.began); d > b.stall && float64(b.n) < b.rate*d.Seconds() {
		return n, errSlow
	}
	return n, nil
}

func (b *body) Close() error {
	defer func() { _ = b.rc.SetReadDeadline(time.Time{}) }()
	return b.ReadCloser.Close()
}

// deadlineWriter is a ResponseWriter with a new write deadline for each write,
// so that only a reader that makes no progress is disconnected.
type deadlineWriter struct {
	w     http.ResponseWriter
	rc    *http.ResponseController
	stall time.Duration
}

func (s *deadlineWriter) Write(p []byte) (int, error) {
	_ = s.rc.SetWriteDeadline(time.Now().Add(s.stall))
	return s.w.Write(p)
}

func (s *deadlineWriter) end() { _ = s.rc.SetWriteDeadline(time.Time{}) }
