package guestplane_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
	"github.com/agentlab-vm/agentlab/internal/stream/streamtest"
)

// inSlowMotion serves a guest whose connections are pipes, in fake time.
func inSlowMotion(t *testing.T, plane func() *guestplane.Plane, f func(t *testing.T, p *streamtest.Pipes)) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		p, ended := streamtest.NewPipes(), make(chan struct{})
		go func() {
			defer close(ended)
			_ = plane().Serve(ctx, 42, p)
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
	inSlowMotion(t, func() *guestplane.Plane { return guestplane.New(guestplane.Config{}) }, func(t *testing.T, p *streamtest.Pipes) {
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
	inSlowMotion(t, func() *guestplane.Plane { return guestplane.New(guestplane.Config{}) }, func(t *testing.T, p *streamtest.Pipes) {
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

// A body that drips or stalls is cut; one that flows may take longer than any
// of the timeouts.
func TestSlowBodies(t *testing.T) {
	c := setup(t, artifact.Limits{}) // outside the fake time, for its tokens and its store
	inSlowMotion(t, func() *guestplane.Plane { return c.Plane(guestplane.Config{}) }, func(t *testing.T, p *streamtest.Pipes) {
		for _, body := range []struct {
			name   string
			chunk  string
			every  time.Duration
			chunks int
			stored bool
		}{
			{"dripping", "x", 5 * time.Second, 1000, false},
			{"stalling", "x", 2 * time.Minute, 2, false},
			{"flowing", strings.Repeat("x", 1000), time.Second, 1000, true},
		} {
			began := time.Now()
			status := sendSlowly(t, p, c.uploads(), body.chunk, body.every, body.chunks)
			took := time.Since(began)
			if stored := slices.Contains(c.Paths(), "a"); stored != body.stored || (status == http.StatusOK) != body.stored {
				t.Errorf("%s body: %d after %s, stored: %v", body.name, status, took, stored)
			}
			if !body.stored && took > 2*time.Minute {
				t.Errorf("%s body: it is cut after %s", body.name, took)
			}
		}
	})
}

// sendSlowly uploads chunks with a time between them. It returns the status of the
// answer, 0 if there is none.
func sendSlowly(t *testing.T, p *streamtest.Pipes, token, chunk string, every time.Duration, chunks int) int {
	t.Helper()
	pr, pw := io.Pipe()
	answered := make(chan struct{})
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(answered)
	defer pr.Close()
	wg.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for range chunks {
			if _, err := io.WriteString(pw, chunk); err != nil {
				return
			}
			select {
			case <-tick.C:
			case <-answered:
			}
		}
		_ = pw.Close()
	})
	req, err := http.NewRequestWithContext(context.Background(), http.MethodPut, "http://guest"+guestapi.PathUpload+"a", pr)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := (&http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(context.Context, string, string) (net.Conn, error) { return p.Dial(), nil },
	}).RoundTrip(req)
	if err != nil {
		return 0
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}
