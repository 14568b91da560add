package server

import (
	"errors"
	"io"
	"net/http"
	"time"
)

// Limits of what is read of a body that no handler wanted, so that the
// connection can be used again: bytes, and the time that they may take.
const (
	drainBytes   = 256 << 10
	drainTimeout = 5 * time.Second
)

// steady limits how long a call may stall in either direction. done must be
// called when the call is over: net/http would wait for the rest of a body
// without an end.
func steady(w http.ResponseWriter, r *http.Request) (_ http.ResponseWriter, done func()) {
	rc := http.NewResponseController(w)
	// The limit of the answer before on the same connection may be over, and
	// asking for a body is a write too.
	_ = rc.SetWriteDeadline(time.Time{})
	b := &body{ReadCloser: r.Body, rc: rc, whole: r.ContentLength == 0}
	r.Body = b
	return &steadyWriter{ResponseWriter: w, rc: rc, body: b}, func() {
		if !b.whole {
			_ = rc.SetReadDeadline(time.Now())
		}
	}
}

// steadyWriter limits how long the reader of an answer may take nothing. A
// connection that becomes a stream has no such limit: terminals are paused.
type steadyWriter struct {
	http.ResponseWriter
	rc   *http.ResponseController
	body *body
	sent bool
}

func (s *steadyWriter) WriteHeader(status int) {
	if !s.sent {
		s.sent = true
		if h := s.Header(); h.Get("Connection") == "" && !s.body.drain() {
			h.Set("Connection", "close")
		}
	}
	_ = s.rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	s.ResponseWriter.WriteHeader(status)
}

func (s *steadyWriter) Write(p []byte) (int, error) {
	if !s.sent {
		s.WriteHeader(http.StatusOK)
	}
	_ = s.rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	return s.ResponseWriter.Write(p)
}

// Unwrap lets a ResponseController find what else the writer can.
func (s *steadyWriter) Unwrap() http.ResponseWriter { return s.ResponseWriter }

// body limits how long a request's body may stall, and leaves no deadline
// behind that would cut a long answer short.
type body struct {
	io.ReadCloser
	rc    *http.ResponseController
	whole bool  // all of it was read
	err   error // what reading ended with
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
		b.whole = true
		_ = b.rc.SetReadDeadline(time.Time{})
	}
	return n, err
}

// drain reads what is left of a body, if it is little and comes soon, and
// tells whether that was all of it.
func (b *body) drain() bool {
	if b.whole || b.err != nil {
		return b.whole
	}
	_ = b.rc.SetReadDeadline(time.Now().Add(drainTimeout))
	_, _ = io.CopyN(io.Discard, readerFunc(b.read), drainBytes+1)
	return b.whole
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// Close does not wait for the rest, as the body below would.
func (b *body) Close() error {
	if !b.whole {
		_ = b.rc.SetReadDeadline(time.Now())
	}
	return b.ReadCloser.Close()
}
