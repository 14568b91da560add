package devproxy

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// BenchmarkAdded compares requests through a port of this machine with requests over
// the connections that DialGuest opens, in turn. The difference of the medians must be
// 1 ms or less.
func BenchmarkAdded(b *testing.B) {
	w := &world{guests: map[int]*guestWorld{}, changed: make(chan struct{})}
	w.s = New(Config{Sandboxes: w, Sessions: sessionsOf{w}, First: time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan error, 1)
	go func() { done <- w.s.Run(ctx) }()
	defer func() { cancel(); <-done }()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") }))
	defer server.Close()
	port := freePort(b)
	w.add(1001, "shop")
	w.listen(1001, guestapi.Listener{Port: port}, server.Listener.Addr().String())
	for len(w.s.Ports(0)) == 0 || w.s.Ports(0)[0].URL == "" {
		runtime.Gosched()
	}
	url := w.s.Ports(0)[0].URL
	direct := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return w.DialGuest(ctx, 1001, port)
	}}}
	defer direct.CloseIdleConnections()
	proxied := browser(b, false)
	fetch := func(c *http.Client) time.Duration {
		start := time.Now()
		resp, err := c.Get(url)
		if err != nil {
			b.Fatal(err)
		}
		defer resp.Body.Close()
		if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "hello" {
			b.Fatalf("%q, %v", body, err)
		}
		return time.Since(start)
	}
	var far, near []time.Duration
	for range 500 {
		far, near = append(far, fetch(direct)), append(near, fetch(proxied))
	}
	median := func(d []time.Duration) time.Duration { return slices.Sorted(slices.Values(d))[len(d)/2] }
	added := median(near) - median(far)
	b.Logf("%v through the port, %v directly: %v added", median(near), median(far), added)
	b.ReportMetric(float64(added.Microseconds()), "µs-added")
	if added > time.Millisecond {
		b.Errorf("the port adds %v to a request", added)
	}
}
