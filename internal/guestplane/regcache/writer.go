package regcache

import (
	"context"
	"errors"
	"hash"
	"io"
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// writer is a ResponseWriter that disconnects a guest that reads nothing, and whose
// policy has changed.
type writer struct {
	http.ResponseWriter
	rc  *http.ResponseController
	s   *Service
	ctx context.Context

	wrote bool
	sent  int64     // bytes of the body
	sum   hash.Hash // of these bytes; nil: not wanted
	err   error     // of Write
}

// WriteHeader implements http.ResponseWriter.
func (w *writer) WriteHeader(status int) {
	w.wrote = true
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *writer) Write(p []byte) (n int, err error) {
	w.wrote = true
	if err = context.Cause(w.ctx); err == nil {
		_ = w.rc.SetWriteDeadline(time.Now().Add(w.s.cfg.Limits.Stall)) // not supported by every ResponseWriter of tests
		n, err = w.ResponseWriter.Write(p)
		w.s.cfg.Metrics.CacheBytes(false, int64(n))
	}
	if w.sent += int64(n); w.sum != nil {
		_, _ = w.sum.Write(p[:n])
	}
	if err != nil {
		w.err = err
	}
	return n, err
}

// forget deletes the headers of a content that was about to be sent.
func (w *writer) forget() {
	for _, name := range append([]string{"Etag", "Last-Modified"}, passed...) {
		w.Header().Del(name)
	}
}

// describe sets the headers of a content.
func (w *writer) describe(t *target, m meta) {
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
	if t.kind == Docker && t.digest.hex != "" {
		h.Set("Docker-Content-Digest", t.digest.String())
	}
}

// fail answers an error, and returns its result.
func (w *writer) fail(err error) string {
	a, ok := errors.AsType[*answer](err)
	denied, isDenied := errors.AsType[*egress.DeniedError](err)
	switch {
	case ok:
	case isDenied:
		a = text(http.StatusForbidden, ResultDenied, "the network policy of this sandbox denies the upstream (rule "+denied.Rule+")")
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		a = text(http.StatusForbidden, ResultDenied, "the sandbox is not known")
	default:
		a = text(http.StatusBadGateway, ResultError, "the upstream cannot be reached")
	}
	w.forget()
	w.Header().Set("Content-Type", a.contentType)
	w.ctx = context.Background()
	w.WriteHeader(a.status)
	_, _ = io.WriteString(w, a.body)
	return a.result
}
