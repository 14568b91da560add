package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// streamContext returns a context that ends with ctx and when the server
// drains.
func (s *Server) streamContext(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(s.drain, cancel)
	return ctx, func() { stop(); cancel() }
}

// stream answers with the data of a reader, as it arrives. open gets a context
// that ends with the caller's connection and when the server drains; a waiting
// Read must end with it. A caller that reads nothing for writeTimeout is
// disconnected.
func (s *Server) stream(ctx context.Context, open func(context.Context) (io.ReadCloser, map[string]string, error)) (*huma.StreamResponse, error) {
	ctx, cancel := s.streamContext(ctx)
	r, header, err := open(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		defer cancel()
		defer func() { _ = r.Close() }()
		for k, v := range header {
			hc.SetHeader(k, v)
		}
		_, w := humago.Unwrap(hc)
		if err := copyOut(w, r); err != nil {
			if ctx.Err() == nil {
				s.log.Warn("stream failed", "path", hc.URL().Path, "err", err)
			}
			panic(http.ErrAbortHandler) // a partial answer must not look complete
		}
	}}, nil
}

// copyOut sends each part of r as soon as it is available.
func copyOut(w http.ResponseWriter, r io.Reader) error {
	rc := http.NewResponseController(w)
	w.WriteHeader(http.StatusOK)
	if err := rc.Flush(); err != nil { // the caller receives the header even if the log is empty
		return err
	}
	buf := make([]byte, 64<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			_ = rc.SetWriteDeadline(time.Now().Add(writeTimeout))
			if _, err := w.Write(buf[:n]); err != nil {
				return err
			}
			if err := rc.Flush(); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// textHeader is the header of logs. A guest wrote them, so a browser must not guess
// their type.
var textHeader = map[string]string{"Content-Type": "text/plain; charset=utf-8", "X-Content-Type-Options": "nosniff"}

// sse writes server-sent events.
type sse struct {
	w  http.ResponseWriter
	rc *http.ResponseController
}

func newSSE(hc huma.Context) (*sse, error) {
	_, w := humago.Unwrap(hc)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	out := &sse{w: w, rc: http.NewResponseController(w)}
	return out, out.rc.Flush()
}

// eventStream returns an answer for which run sends events until ctx ends, which is
// when the client or the server ends, or until an error, which is sent as the last
// event. what is the kind of the stream, for the log.
func (s *Server) eventStream(what string, run func(ctx context.Context, hc huma.Context, out *sse) error) *huma.StreamResponse {
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		ctx, cancel := s.streamContext(hc.Context())
		defer cancel()
		out, err := newSSE(hc)
		if err != nil {
			return
		}
		if err := run(ctx, hc, out); err != nil && ctx.Err() == nil {
			s.log.Debug(what+" stream ended", "err", err)
			_ = out.send("error", "", problemOf(err))
		}
	}}
}

// send writes one event and flushes it. An id of "" is omitted.
func (s *sse) send(event, id string, data any) error {
	p, err := json.Marshal(data) // JSON contains no raw line break
	if err != nil {
		return err
	}
	var b strings.Builder
	if id != "" {
		fmt.Fprintf(&b, "id: %s\n", id)
	}
	fmt.Fprintf(&b, "event: %s\ndata: %s\n\n", event, p)
	_ = s.rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	if _, err := io.WriteString(s.w, b.String()); err != nil {
		return err
	}
	return s.rc.Flush()
}

// requireUpgrade rejects a request without an upgrade to the protocol, before
// anything is started for it.
func requireUpgrade(got, protocol string) error {
	if !strings.EqualFold(got, protocol) {
		return agentlab.Errorf(agentlab.CodeInvalid, "this call requires a connection upgrade").
			WithField("Upgrade").WithHint("send the headers Connection: Upgrade and Upgrade: %s", protocol)
	}
	return nil
}

// upgrade answers 101 and copies between the caller's connection and far until
// both directions or one of the connections have ended, or the server drains.
func (s *Server) upgrade(far net.Conn, protocol string) *huma.StreamResponse {
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		_, w := humago.Unwrap(hc)
		s.streams.Add(1) // before Hijack: from then on http.Server.Shutdown does not wait for the call
		defer s.streams.Done()
		near, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			_ = far.Close()
			writeProblem(w, agentlab.Errorf(agentlab.CodeUnsupported, "this connection cannot be upgraded"))
			return
		}
		defer func() { _, _ = near.Close(), far.Close() }()
		stop := context.AfterFunc(s.drain, func() { _, _ = near.Close(), far.Close() })
		defer stop()
		if good := callerOf(hc.Context()).tokenCtx; good != nil { // a stream ends with its token
			uncut := context.AfterFunc(good, func() { _, _ = near.Close(), far.Close() })
			defer uncut()
		}
		_, err = fmt.Fprintf(near, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", protocol)
		if err != nil {
			return
		}
		stream.Splice(stream.Unread(near, rw.Reader), far)
	}}
}
