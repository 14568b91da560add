package server

import (
	"errors"
	"io"
	"net/http"
	"time"
)

// Limits for reading the rest of a body that no handler read, so that the
// connection can be reused: bytes and time.
const (
	drainBytes   = 256 << 10
	drainTimeout = 5 * time.Second
)

// limitStalls limits how long a call may stall in either direction. done must be
// called after the call: net/http would wait for the rest of the body without
// a time limit.
func limitStalls(w http.ResponseWriter, r *http.Request) (_ http.ResponseWriter, done func()) {
	rc := http.NewResponseController(w)
	// The deadline of the previous answer on the same connection may have
	// passed, and a "100 Continue" is a write too.
	_ = rc.SetWriteDeadline(time.Time{})
	b := &body{ReadCloser: r.Body, rc: rc, complete: r.ContentLength == 0}
	r.Body = b
	return &stallWriter{ResponseWriter: w, rc: rc, body: b}, func() {
		if !b.complete {
			_ = rc.SetReadDeadline(time.Now())
		}
	}
}

// stallWriter limits how long the reader of an answer may read nothing. A
// connection that becomes a stream has no such limit, because users pause
// terminals.
type stallWriter struct {
	http.ResponseWriter
	rc   *http.ResponseController
	body *body
	sent bool
}

func (s *stallWriter) WriteHeader(status int) {
	if !s.sent {
		s.sent = true
		if h := s.Header(); h.Get("Connection") == "" && !s.body.drain() {
			h.Set("Connection", "close")
		}
	}
	_ = s.rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	s.ResponseWriter.WriteHeader(status)
}

func (s *stallWriter) Write(p []byte) (int, error) {
	if !s.sent {
		s.WriteHeader(http.StatusOK)
	}
	_ = s.rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	return s.ResponseWriter.Write(p)
}

// Unwrap returns the underlying writer for http.ResponseController.
func (s *stallWriter) Unwrap() http.ResponseWriter { return s.ResponseWriter }

// body limits how long a request's body may stall. It resets its deadline,
// which would otherwise interrupt a long answer.
type body struct {
	io.ReadCloser
	rc       *http.ResponseController
	complete bool  // it was read completely
	err      error // the error that ended reading
}

func (b *body) Read(p []byte) (int, error) {
	_ = b.rc.SetReadDeadline(time.Now().Add(bodyStallTimeout))
	return b.read(p)
}

func (b *body) read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == nil {
		return n, nil
	}
	b.err = err
	if errors.Is(err, io.EOF) {
		b.complete = true
		_ = b.rc.SetReadDeadline(time.Time{})
	}
	return n, err
}

// drain reads the rest of a body, within limits of size and time, and reports
// whether it reached the end.
func (b *body) drain() bool {
	if b.complete || b.err != nil {
		return b.complete
	}
	_ = b.rc.SetReadDeadline(time.Now().Add(drainTimeout))
	_, _ = io.CopyN(io.Discard, readerFunc(b.read), drainBytes+1)
	return b.complete
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// Close does not wait for the rest, unlike Close of the underlying body.
func (b *body) Close() error {
	if !b.complete {
		_ = b.rc.SetReadDeadline(time.Now())
	}
	return b.ReadCloser.Close()
}
