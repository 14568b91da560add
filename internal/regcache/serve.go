package regcache

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
)

// Service returns the guest service; a cache that is off has no requests.
func (s *Service) Service() guestplane.Service {
	out := guestplane.Service{Name: "registry cache"}
	if s != nil {
		out.Lane = guestplane.Limits{Parallel: s.cfg.Limits.Requests, Wait: true}
		out.Protocol = &guestplane.Protocol{Match: s.Wants, Serve: func(c *guestplane.Call, w http.ResponseWriter) { s.Serve(c.VMID, w, c.Request) }}
	}
	return out
}

// Wants reports whether a request of a guest is for the cache. Docker and npm also
// use paths outside of guestapi.PathCache, and apt sends requests to a proxy.
func (s *Service) Wants(r *http.Request) bool {
	p := r.URL.Path
	return s != nil && (r.URL.IsAbs() || strings.HasPrefix(p, guestapi.PathCache) || p == "/v2" || strings.HasPrefix(p, "/v2/") || isTarballPath(p))
}

// badRequest is the answer to a request that the cache does not answer.
type badRequest struct {
	status  int
	message string
}

func (e *badRequest) Error() string { return e.message }

func bad(status int, message string) error { return &badRequest{status, message} }

var (
	errNoObject    = bad(http.StatusNotFound, "the registry cache does not serve this path")
	errCredentials = bad(http.StatusForbidden, "the registry cache serves public packages only and accepts no credentials: configure the private registry or scope with its own URL")
)

// Serve answers a request of the guest of a sandbox.
func (s *Service) Serve(vmid int, rw http.ResponseWriter, r *http.Request) {
	w := &stallWriter{ResponseWriter: rw, rc: http.NewResponseController(rw), s: s}
	result, err := s.serve(vmid, w, r)
	s.cfg.Metrics.CacheRequest(result)
	if err != nil {
		s.log.Debug("a request to the registry cache failed", "vmid", vmid, "path", r.URL.Path, "result", result, "err", err)
	}
	if w.broken {
		panic(http.ErrAbortHandler) // the guest must not take the answer for complete
	}
}

// serve returns the result of a request, and the error that it has answered.
func (s *Service) serve(vmid int, w *stallWriter, r *http.Request) (string, error) {
	defer w.end()
	t, err := s.target(r)
	if err == nil && t == nil { // the ping of Docker
		return ResultHit, w.pong()
	}
	if err != nil {
		return ResultBad, w.fail(err)
	}
	g, err := s.guestOf(r.Context(), vmid)
	if err != nil {
		return ResultDenied, w.fail(err)
	}
	g.mu.Lock()
	changed := g.changed
	g.mu.Unlock()
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	defer context.AfterFunc(changed, func() { cancel(errors.New("the network policy has changed")) })()
	w.ctx = ctx
	srv, err := g.permit(ctx, hostPort(t.url))
	if err != nil {
		return w.failed(err)
	}
	t.scope = srv.scope()
	return s.object(ctx, g, t, w, r)
}

// target reads a request. It returns nil for the ping of Docker.
func (s *Service) target(r *http.Request) (*target, error) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return nil, bad(http.StatusMethodNotAllowed, "the registry cache only answers GET and HEAD")
	}
	for _, name := range []string{"Authorization", "Proxy-Authorization", "Cookie"} {
		if r.Header.Get(name) != "" {
			return nil, errCredentials
		}
	}
	if r.URL.User != nil {
		return nil, errCredentials
	}
	p := r.URL.Path
	if r.URL.IsAbs() {
		p = strings.ReplaceAll(p, "/./", "/") // apt asks so for repositories without suites
	}
	if p == "" || len(p) > 2048 || path.Clean(p) != strings.TrimSuffix(p, "/") && p != "/" || strings.ContainsFunc(p, func(c rune) bool { return c < ' ' || c == 0x7f || c == '\\' }) {
		return nil, errNoObject
	}
	if r.URL.IsAbs() {
		return s.aptTarget(r)
	}
	if rest, ok := strings.CutPrefix(p, guestapi.PathCache); ok {
		kind, name, _ := strings.Cut(rest, "/")
		switch Kind(kind) {
		case NPM:
			return s.npmTarget(r, name)
		case PyPI:
			return s.pypiTarget(r, name)
		case Go:
			return s.goTarget(name)
		}
		return nil, errNoObject
	}
	if isTarballPath(p) {
		return s.npmTarget(r, strings.TrimPrefix(p, "/"))
	}
	return s.dockerTarget(r)
}

// object serves an object: the stored one, or a download.
func (s *Service) object(ctx context.Context, g *guest, t *target, w *stallWriter, r *http.Request) (string, error) {
	var o *object
	if t.index || !strings.Contains(r.Header.Get("Cache-Control"), "no-cache") {
		o = s.store.open(t.kind, t.name())
	}
	if o != nil {
		defer o.close()
		fresh := !t.index || time.Since(o.checked) < s.cfg.Limits.Fresh
		// The upstream may send this guest to a server that its policy allows.
		if fresh && g.permitVia(ctx, t, o.meta.Via) == nil {
			return s.stored(ctx, g, t, o, w, r)
		}
	}
	for attempt := 0; ; attempt++ {
		f, joined := s.fly(g, t, attempt == 0)
		result, err := s.follow(ctx, g, t, f, w, r)
		f.leave()
		// The guest that has started the download may have another policy, or may
		// have been cut. What cannot be stored has one reader.
		if err != nil && !w.wrote && ctx.Err() == nil && attempt == 0 && (joined || errors.Is(err, errTaken)) {
			continue
		}
		if err != nil && !w.wrote {
			return w.failed(err)
		}
		if err != nil {
			w.broken, result = true, ResultError
		}
		return result, err
	}
}

// permitVia checks that the policy allows all servers that an object came from.
func (g *guest) permitVia(ctx context.Context, t *target, via []string) error {
	for _, step := range via {
		at, private := strings.CutPrefix(step, scopePrivate)
		if step == t.scope+hostPort(t.url) {
			continue // it was checked
		}
		srv, err := g.permit(ctx, at)
		if err == nil && private && !srv.private {
			err = &egress.DeniedError{Rule: egress.RuleRebinding}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// stored serves an object of the store, whose servers the policy allows.
func (s *Service) stored(ctx context.Context, g *guest, t *target, o *object, w *stallWriter, r *http.Request) (string, error) {
	if t.whole() {
		return s.whole(ctx, g, t, o.meta, func() ([]byte, error) { return io.ReadAll(o.content()) }, w, r)
	}
	w.describe(t, o.meta)
	http.ServeContent(w, r, "", o.meta.Modified, o.content())
	return ResultHit, w.err
}

// whole serves an object that must be in memory. Few of one guest are at a time.
func (s *Service) whole(ctx context.Context, g *guest, t *target, m meta, read func() ([]byte, error), w *stallWriter, r *http.Request) (string, error) {
	select {
	case g.wholes <- struct{}{}:
		defer func() { <-g.wholes }()
	case <-ctx.Done():
		return ResultError, context.Cause(ctx)
	}
	body, err := s.prepare(t, &m, read)
	if err != nil {
		return w.failed(err)
	}
	w.describe(t, m)
	http.ServeContent(w, r, "", m.Modified, bytes.NewReader(body))
	return ResultHit, w.err
}

// prepare reads and rewrites a content. Few are rewritten at a time, because that
// takes several times their size of memory.
func (s *Service) prepare(t *target, m *meta, read func() ([]byte, error)) ([]byte, error) {
	s.rewrites <- struct{}{}
	defer func() { <-s.rewrites }()
	body, err := read()
	if err == nil && t.rewrite != nil {
		body, m.ContentType, err = t.rewrite(body, m.ContentType)
		m.Modified = time.Time{} // the rewritten content also depends on the configuration
	}
	sum := sha256.Sum256(body)
	m.Digest = "sha256:" + hex.EncodeToString(sum[:])
	m.ETag = `"` + hex.EncodeToString(sum[:16]) + `"`
	return body, err
}

// follow serves a download.
func (s *Service) follow(ctx context.Context, g *guest, t *target, f *flight, w *stallWriter, r *http.Request) (string, error) {
	select {
	case <-f.begun:
	case <-ctx.Done():
		return ResultError, context.Cause(ctx)
	}
	if f.failed != nil {
		return ResultError, f.failed
	}
	if err := g.permitVia(ctx, t, f.meta.Via); err != nil {
		return ResultDenied, err
	}
	switch {
	case f.status != http.StatusOK && f.status != http.StatusNotModified:
		return ResultError, w.pass(f)
	case f.status == http.StatusOK && t.whole():
		_, err := s.whole(ctx, g, t, f.meta, func() ([]byte, error) { return f.body, nil }, w, r)
		return ResultMiss, err
	case f.status == http.StatusNotModified:
		if err := f.wait(ctx); err != nil {
			return ResultError, err
		}
		o := s.store.open(t.kind, t.name())
		if o == nil {
			return ResultError, agentlab.Errorf(agentlab.CodeUnavailable, "the cache was cleared")
		}
		defer o.close()
		if err := g.permitVia(ctx, t, o.meta.Via); err != nil {
			return ResultDenied, err
		}
		return s.stored(ctx, g, t, o, w, r)
	}
	w.describe(t, f.meta)
	if f.size >= 0 {
		w.Header().Set("Content-Length", strconv.FormatInt(f.size, 10))
	}
	if r.Method == http.MethodHead {
		w.WriteHeader(http.StatusOK)
		return ResultMiss, nil
	}
	_, err := io.Copy(struct{ io.Writer }{w}, &reader{f: f, ctx: ctx})
	return ResultMiss, err
}

// wait waits until the download is complete.
func (f *flight) wait(ctx context.Context) error {
	select {
	case <-f.ended:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// stallWriter is a ResponseWriter that disconnects a guest that reads nothing.
type stallWriter struct {
	http.ResponseWriter
	rc    *http.ResponseController
	s     *Service
	ctx   context.Context
	wrote bool
	err   error

	broken bool // the answer has begun and cannot be completed
}

// WriteHeader implements http.ResponseWriter.
func (w *stallWriter) WriteHeader(status int) {
	w.wrote = true
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *stallWriter) Write(p []byte) (int, error) {
	w.wrote = true
	if w.ctx != nil && w.ctx.Err() != nil {
		w.err = context.Cause(w.ctx)
		return 0, w.err
	}
	_ = w.rc.SetWriteDeadline(time.Now().Add(w.s.cfg.Limits.Stall)) // not supported by every ResponseWriter of tests
	n, err := w.ResponseWriter.Write(p)
	w.s.cfg.Metrics.CacheBytes(false, int64(n))
	if err != nil {
		w.err = err
	}
	return n, err
}

func (w *stallWriter) end() { _ = w.rc.SetWriteDeadline(time.Time{}) }

// forget deletes the headers of an object that was about to be sent.
func (w *stallWriter) forget() {
	for _, name := range []string{"Content-Length", "Etag", "Last-Modified", "Docker-Content-Digest"} {
		w.Header().Del(name)
	}
}

// describe sets the headers of an object.
func (w *stallWriter) describe(t *target, m meta) {
	w.forget()
	h := w.Header()
	h.Set("Content-Type", m.ContentType)
	if m.ContentType == "" {
		h.Set("Content-Type", "application/octet-stream")
	}
	if m.ETag != "" {
		h.Set("Etag", m.ETag)
	}
	if !m.Modified.IsZero() {
		h.Set("Last-Modified", m.Modified.UTC().Format(http.TimeFormat))
	}
	h.Set("X-Content-Type-Options", "nosniff")
	if t.header != nil {
		t.header(h, m)
	}
}

// pass passes on an error of the upstream.
func (w *stallWriter) pass(f *flight) error {
	status := f.status
	if status < 400 || status == http.StatusUnauthorized || status == http.StatusProxyAuthRequired {
		status = http.StatusForbidden // the cache has no credentials, and the guest's are not accepted
	}
	if status == http.StatusForbidden && f.status != status || f.meta.ContentType == "" {
		return w.text(status, "the upstream answers "+strconv.Itoa(f.status))
	}
	w.Header().Set("Content-Type", f.meta.ContentType)
	w.WriteHeader(status)
	_, err := w.Write(f.body)
	return err
}

func (w *stallWriter) text(status int, message string) error {
	w.forget()
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, err := io.WriteString(w, "AgentLab's registry cache: "+message+"\n")
	return err
}

// failed answers an error, and returns its result.
func (w *stallWriter) failed(err error) (string, error) {
	result := ResultError
	if _, ok := asDenied(err); ok {
		result = ResultDenied
	}
	return result, w.fail(err)
}

// fail answers an error, and returns it.
func (w *stallWriter) fail(err error) error {
	status, message := http.StatusBadGateway, "the upstream cannot be reached"
	var b *badRequest
	denied, ok := asDenied(err)
	switch {
	case ok:
		status, message = http.StatusForbidden, "the network policy of this sandbox denies the upstream (rule "+denied.Rule+")"
	case errors.As(err, &b):
		status, message = b.status, b.message
	case errors.Is(err, errOptOut):
		status, message = http.StatusForbidden, errOptOut.Error()
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		status, message = http.StatusForbidden, "the sandbox is not known"
	}
	_ = w.text(status, message)
	return err
}
