package regcache

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
	"github.com/agentlab-vm/agentlab/internal/guestplane/outside"
)

// Services returns the guest services; a cache that is off has none. An index of Python
// is in memory while it is sent, so a guest has few at a time.
func (s *Service) Services() []guestplane.Service {
	if s == nil {
		return nil
	}
	service := func(name string, parallel int, match func(*http.Request) bool) guestplane.Service {
		return guestplane.Service{
			Name: name, Lane: guestplane.Limits{Parallel: parallel, Wait: true},
			Protocol: &guestplane.Protocol{Match: match, Serve: func(c *guestplane.Call, w http.ResponseWriter) { s.Serve(c.VMID, w, c.Request) }},
		}
	}
	return []guestplane.Service{
		service("registry cache: index of Python", maxIndexes, func(r *http.Request) bool {
			return strings.HasPrefix(r.URL.Path, guestapi.PathCache+string(PyPI)+"/simple/")
		}),
		service("registry cache", maxRequests, s.Wants),
	}
}

// Wants reports whether a request of a guest is for the cache. Docker and npm also
// use paths outside of guestapi.PathCache, and apt sends requests to a proxy.
func (s *Service) Wants(r *http.Request) bool {
	p := r.URL.Path
	return r.URL.IsAbs() || strings.HasPrefix(p, guestapi.PathCache) || p == "/v2" || strings.HasPrefix(p, "/v2/") || npmTarball.MatchString(p)
}

// answer is an answer that is not the content of an object. It is an error of the
// functions that return one.
type answer struct {
	status            int
	result            string
	contentType, body string
}

// Error implements error.
func (a *answer) Error() string { return a.body }

func text(status int, result, message string) *answer {
	return &answer{status, result, "text/plain; charset=utf-8", "AgentLab's registry cache: " + message + "\n"}
}

func bad(status int, message string) error { return text(status, ResultBad, message) }

var (
	errNoObject          = bad(http.StatusNotFound, "the registry cache does not serve this path")
	errCredentials       = bad(http.StatusForbidden, "the registry cache serves public packages only and accepts no credentials: configure the private registry or scope with its own URL")
	errOptOut      error = text(http.StatusForbidden, ResultDenied, "the profile of this sandbox does not use the registry cache")
	// pong is the answer to the ping of Docker.
	pong error = &answer{http.StatusOK, ResultHit, "application/json", "{}"}
)

// Serve answers a request of the guest of a sandbox.
func (s *Service) Serve(vmid int, rw http.ResponseWriter, r *http.Request) {
	w := &writer{ResponseWriter: rw, rc: http.NewResponseController(rw), s: s, ctx: r.Context()}
	if !r.URL.IsAbs() && strings.HasPrefix(r.URL.Path, "/v2") {
		w.Header().Set("Docker-Distribution-Api-Version", "registry/2.0")
	}
	result, err := s.serve(vmid, w, r)
	began := w.wrote
	if err != nil && !began {
		result = w.fail(err)
	}
	_ = w.rc.SetWriteDeadline(time.Time{})
	s.cfg.Metrics.CacheRequest(result)
	if err != nil {
		s.log.Debug("a request to the registry cache failed", "vmid", vmid, "path", r.URL.Path, "result", result, "err", err)
		if began && result != ResultHit {
			panic(http.ErrAbortHandler) // the guest must not take the answer for complete
		}
	}
}

// serve returns the result of a request. The caller answers with the error, unless the
// answer has begun.
func (s *Service) serve(vmid int, w *writer, r *http.Request) (string, error) {
	t, err := s.target(r)
	if err != nil {
		return "", err
	}
	g, err := s.cfg.Outside.Guest(r.Context(), vmid)
	if err == nil {
		err = s.optedOut(g.Profile)
	}
	if err != nil {
		return "", err
	}
	ctx, cancel := g.Context(r.Context())
	defer cancel()
	w.ctx = ctx
	srv, err := g.Permit(ctx, outside.HostPort(t.url))
	if err != nil {
		return "", err
	}
	t.scope = scope(srv)
	if t.key != "" {
		// The upstream may send this guest to a server that its policy allows.
		if o := s.store.open(t.kind, t.name()); o != nil {
			defer o.close()
			if permitVia(ctx, g, t, o.meta.Via) == nil {
				w.describe(t, o.meta)
				http.ServeContent(w, r, "", o.meta.Modified, o.content())
				return ResultHit, w.err
			}
		}
	}
	if err := s.missing(ctx, g, t, w, r); err != nil {
		return ResultError, err
	}
	return ResultMiss, nil
}

// missing serves what is not stored: by a download that is stored and shared, or else by
// one for this guest.
func (s *Service) missing(ctx context.Context, g *outside.Guest, t *target, w *writer, r *http.Request) error {
	if t.tarball[0] != "" && r.Method == http.MethodGet {
		if t.digest = s.tarballDigest(ctx, g, t); t.digest.hex == "" {
			t.key = "" // only what was verified is stored for others
		}
	}
	if t.key != "" && r.Method == http.MethodGet && s.store.space.Keep() == nil {
		w.sum = sha256.New()
		f, joined := s.fly(g, t)
		err := f.send(ctx, g, t, w)
		f.leave()
		// The guest that has started the download may have another policy.
		if other := joined && !w.wrote && ctx.Err() == nil; err == nil || !other && !errors.Is(err, errDirect) {
			return err
		}
	}
	return s.direct(ctx, g, t, w, r)
}

// direct passes on an answer of the upstream, and stores nothing. It continues after the
// bytes that were already sent.
func (s *Service) direct(ctx context.Context, g *outside.Guest, t *target, w *writer, r *http.Request) error {
	method, header := r.Method, http.Header{"Accept-Encoding": {"identity"}}
	switch {
	case t.rewrite != nil:
		method, header = http.MethodGet, http.Header{}
	case t.key == "":
		for _, name := range []string{"Accept-Encoding", "If-None-Match", "If-Modified-Since"} {
			if v := r.Header.Get(name); v != "" {
				header.Set(name, v)
			}
		}
	}
	resp, _, err := s.fetch(ctx, g, t, method, header)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	body := io.TeeReader(resp.Body, counter{s})
	if t.rewrite != nil {
		return s.rewritten(t, body, resp.Header.Get("Content-Type"), w, r)
	}
	if !w.wrote {
		w.describe(t, metaOf(t, resp, nil))
		for _, name := range passed {
			if v := resp.Header.Get(name); v != "" {
				w.Header().Set(name, v)
			}
		}
	}
	if method == http.MethodHead || resp.StatusCode == http.StatusNotModified {
		w.WriteHeader(resp.StatusCode)
		return nil
	}
	return t.pass(body, w)
}

// passed are the headers of upstreams that are passed on with a content, in addition to
// those of a stored object.
var passed = []string{"Cache-Control", "Content-Encoding", "Content-Length", "Docker-Content-Digest"}

// counter counts what is received from upstreams.
type counter struct{ s *Service }

// Write implements io.Writer.
func (c counter) Write(p []byte) (int, error) {
	c.s.cfg.Metrics.CacheBytes(true, int64(len(p)))
	return len(p), nil
}

// pass sends a body from the first byte that was not sent yet.
func (t *target) pass(body io.Reader, w *writer) error {
	v := verifier{r: body, sum: t.digest.hash(), want: t.digest}
	if w.sent > 0 {
		again := sha256.New()
		_, err := io.CopyN(io.MultiWriter(v.sum, again), body, w.sent)
		if err == nil && !bytes.Equal(again.Sum(nil), w.sum.Sum(nil)) {
			err = errors.New("the upstream has another content than before")
		}
		if err != nil {
			return err
		}
	}
	_, err := io.Copy(struct{ io.Writer }{w}, &v)
	return err
}

// rewritten sends an index with other URLs.
func (s *Service) rewritten(t *target, body io.Reader, contentType string, w *writer, r *http.Request) error {
	index, err := io.ReadAll(io.LimitReader(body, s.cfg.Limits.Whole+1))
	if err == nil && int64(len(index)) > s.cfg.Limits.Whole {
		err = fmt.Errorf("the index has more than %d bytes", s.cfg.Limits.Whole)
	}
	if err != nil {
		return err
	}
	s.rewrites <- struct{}{} // it takes several times their size of memory
	index, contentType, err = t.rewrite(index, contentType)
	<-s.rewrites
	if err != nil {
		return err
	}
	sum := sha256.Sum256(index)
	w.describe(t, meta{ContentType: contentType, ETag: `"` + hex.EncodeToString(sum[:16]) + `"`})
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(index))
	return w.err
}
