package server

import (
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab/internal/stream/streamtest"
)

// TestSlowCallers checks that a client that sends a header or a body slowly,
// or does not read a response, holds a connection no longer than
// docs/access.md says. The limit starts again for each request.
func TestSlowCallers(t *testing.T) {
	const request = "GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n"
	// answer reads one whole answer.
	answer := func(t *testing.T, c net.Conn) {
		t.Helper()
		buf := make([]byte, 1<<16)
		if n, err := c.Read(buf); err != nil || !strings.HasPrefix(string(buf[:n]), "HTTP/1.1 200") {
			t.Errorf("answer %q, %v", buf[:n], err)
		}
	}
	for name, c := range map[string]struct {
		do   func(t *testing.T, c net.Conn)
		want time.Duration // until the connection is closed
	}{
		"nothing":       {func(*testing.T, net.Conn) {}, 10 * time.Second},
		"half a header": {func(_ *testing.T, c net.Conn) { _, _ = io.WriteString(c, request[:20]) }, 10 * time.Second},
		"half a body": {func(_ *testing.T, c net.Conn) {
			_, _ = io.WriteString(c, "POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
		}, bodyStallTimeout},
		"half of an unwanted body": {func(t *testing.T, c net.Conn) {
			_, _ = io.WriteString(c, "GET /v1/status HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
		}, drainTimeout},
		"an unwanted body": {func(t *testing.T, c net.Conn) {
			_, _ = io.WriteString(c, "GET /v1/status HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
			answer(t, c)
			_, _ = io.WriteString(c, request)
			answer(t, c)
		}, idleTimeout},
		"half a body of nowhere": {func(t *testing.T, c net.Conn) {
			_, _ = io.WriteString(c, "POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\na")
		}, drainTimeout},
		"idle": {func(t *testing.T, c net.Conn) { _, _ = io.WriteString(c, request); answer(t, c) }, idleTimeout},
		"idle, then used": {func(t *testing.T, c net.Conn) {
			_, _ = io.WriteString(c, request)
			answer(t, c)
			time.Sleep(idleTimeout / 2) // longer than an answer may take
			_, _ = io.WriteString(c, request)
			answer(t, c)
		}, idleTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			inSlowMotion(t, func(t *testing.T, p *streamtest.Pipes) {
				conn := p.Dial()
				c.do(t, conn)
				began := time.Now()
				_, _ = io.Copy(io.Discard, conn)
				if took := time.Since(began); took < c.want || took > c.want+time.Second {
					t.Errorf("closed after %s, want %s", took, c.want)
				}
			})
		})
	}
	t.Run("unread", func(t *testing.T) {
		inSlowMotion(t, func(t *testing.T, p *streamtest.Pipes) {
			conn := p.Dial()
			_, _ = io.WriteString(conn, request)
			time.Sleep(writeTimeout + time.Second)
			if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil {
				t.Errorf("the answer still waits: %d, %v", n, err)
			}
		})
	})
}

// inSlowMotion serves connections in memory, in fake time.
func inSlowMotion(t *testing.T, f func(t *testing.T, p *streamtest.Pipes)) {
	synctest.Test(t, func(t *testing.T) {
		s, err := New(Config{
			Services: newStub().services(), Rules: Rules{OwnUID: 1},
			PeerOf: func(net.Conn) (Peer, error) { return Peer{UID: 1}, nil },
		})
		if err != nil {
			t.Fatal(err)
		}
		p := streamtest.NewPipes()
		ended := make(chan error, 1)
		go func() { ended <- s.Serve(p) }()
		f(t, p)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
