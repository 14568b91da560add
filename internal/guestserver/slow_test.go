package guestserver_test

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab/internal/guestserver"
	"github.com/agentlab-vm/agentlab/internal/stream/streamtest"
)

// inSlowMotion serves a guest whose connections are pipes, in fake time.
func inSlowMotion(t *testing.T, f func(t *testing.T, p *streamtest.Pipes)) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		p, ended := streamtest.NewPipes(), make(chan struct{})
		go func() {
			defer close(ended)
			_ = guestserver.New(guestserver.Config{}).Serve(ctx, 42, p)
		}()
		f(t, p)
		cancel()
		<-ended
	})
}

// closedAfter returns how long it takes until the server closes an idle
// connection.
func closedAfter(c net.Conn) time.Duration {
	began := time.Now()
	_, _ = io.Copy(io.Discard, c)
	return time.Since(began)
}

// A header that drips, or never comes, ends its connection in seconds.
func TestSlowHeader(t *testing.T) {
	inSlowMotion(t, func(t *testing.T, p *streamtest.Pipes) {
		silent := p.Dial()
		if d := closedAfter(silent); d > 15*time.Second {
			t.Errorf("a silent connection lives for %s", d)
		}
		dripping := p.Dial()
		var wg sync.WaitGroup
		wg.Go(func() {
			for _, b := range []byte("GET / HTTP/1.1\r\nHost: " + string(make([]byte, 1000))) {
				if _, err := dripping.Write([]byte{b}); err != nil {
					return
				}
				time.Sleep(time.Second)
			}
		})
		if d := closedAfter(dripping); d > 15*time.Second {
			t.Errorf("a dripping header lives for %s", d)
		}
		_ = dripping.Close()
		wg.Wait()
	})
}

// A guest that does not read what it is answered holds its connection for a
// while, and then no more.
func TestUnreadAnswer(t *testing.T) {
	inSlowMotion(t, func(t *testing.T, p *streamtest.Pipes) {
		c := p.Dial()
		if _, err := io.WriteString(c, "GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(45 * time.Second)
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Errorf("after 45 s the answer still waits: %d, %v", n, err)
		}
		_ = c.Close()
	})
}
