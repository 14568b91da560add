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

// guard limits the rate, the number and the duration of a guest's calls, and
// recovers from panics.
func guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
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
			writeError(w, http.StatusInternalServerError, string(agentlab.CodeInternal), "internal error")
		}()
		w.Header().Set("Cache-Control", "no-store")
		if path.Clean(r.URL.Path) != r.URL.Path { // the mux would send a redirect
			writeError(w, http.StatusNotFound, string(agentlab.CodeNotFound), "no such call")
			return
		}
		if !g.calls.AllowN(g.s.cfg.Clock(), 1) {
			tooMany(w)
			return
		}
		select {
		case g.slots <- struct{}{}:
			defer func() { <-g.slots }()
		default:
			tooMany(w)
			return
		}
		r.Body = &body{
			ReadCloser: r.Body, rc: http.NewResponseController(w), clock: g.s.cfg.Clock, began: g.s.cfg.Clock(),
			stall: g.s.cfg.Limits.StallTimeout, rate: g.s.cfg.Limits.MinBodyRate,
		}
		next.ServeHTTP(w, r)
	})
}

func tooMany(w http.ResponseWriter) {
	w.Header().Set("Retry-After", "1")
	writeError(w, http.StatusTooManyRequests, string(agentlab.CodeBusy), "too many calls")
}

// withGrant admits a call whose bearer token is a grant of that kind for this
// sandbox and a job. The response is the same for every invalid token.
func withGrant(kind string, next handler) func(*guest, http.ResponseWriter, *http.Request) {
	return func(g *guest, w http.ResponseWriter, r *http.Request) {
		grant, err := g.grant(r.Context(), kind, r.Header.Get("Authorization"))
		if err != nil {
			g.fail(w, r, err)
			return
		}
		next(g, w, r, grant.JobID)
	}
}

// whileRunning is withGrant for calls that change the artifacts or the log of a
// job, or read its repository: those of a final job do not change.
func whileRunning(kind string, next handler) func(*guest, http.ResponseWriter, *http.Request) {
	return withGrant(kind, func(g *guest, w http.ResponseWriter, r *http.Request, jobID string) {
		if err := g.jobRunning(r, kind); err != nil {
			g.fail(w, r, err)
			return
		}
		next(g, w, r, jobID)
	})
}

// jobRunning returns an error when the job of a call has ended. A body may take
// long, so it is called again at its end.
func (g *guest) jobRunning(r *http.Request, kind string) error {
	grant, err := g.grant(r.Context(), kind, r.Header.Get("Authorization"))
	if err != nil {
		return err
	}
	j, err := g.s.cfg.Jobs.Get(r.Context(), grant.JobID)
	if err == nil && j.Status.Final() {
		return errNoGrant
	}
	return err
}

var errNoGrant = agentlab.Errorf(agentlab.CodeDenied, "denied")

func (g *guest) grant(ctx context.Context, kind, header string) (agentlab.Grant, error) {
	token, ok := strings.CutPrefix(header, "Bearer ")
	if !ok || !plausibleToken(token) {
		return agentlab.Grant{}, errNoGrant
	}
	grant, err := g.s.cfg.Tokens.GrantByHash(ctx, hashToken(token), kind)
	switch agentlab.CodeOf(err) {
	case "":
	case agentlab.CodeNotFound, agentlab.CodeDenied:
		return agentlab.Grant{}, errNoGrant
	default:
		return agentlab.Grant{}, err
	}
	if grant.VMID != g.vmid || grant.JobID == "" && kind != agentlab.GrantMessages || !g.s.cfg.Clock().Before(grant.ExpiresAt) {
		return agentlab.Grant{}, errNoGrant
	}
	return grant, nil
}

const maxTokenBytes = 256

func plausibleToken(t string) bool { return t != "" && len(t) <= maxTokenBytes }

func hashToken(t string) string {
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
}

var errSlow = agentlab.Errorf(agentlab.CodeTimeout, "the request body is sent too slowly")

func (b *body) Read(p []byte) (int, error) {
	_ = b.rc.SetReadDeadline(time.Now().Add(b.stall)) // not supported by every ResponseWriter of tests
	n, err := b.ReadCloser.Read(p)
	b.n += int64(n)
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
