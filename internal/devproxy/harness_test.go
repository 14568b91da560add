package devproxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// world has sandboxes whose guests are servers of this test.
type world struct {
	t *testing.T
	s *Service

	mu        sync.Mutex
	sandboxes []agentlab.Sandbox
	sessions  []agentlab.Session
	guests    map[int]*guestWorld
	now       time.Time
	dials     int
	lists     int // reads of the sandboxes
	asked     int
	held      int // guests that wait with their answers
	mostHeld  int
	maxHeld   int           // 0: the service's own
	changed   chan struct{} // closed at each change of a guest
}

type guestWorld struct {
	state     int
	listeners []guestapi.Listener
	err       error
	dial      map[uint16]string // address of a server by port
}

func (w *world) List(context.Context, agentlab.SandboxFilter) ([]agentlab.Sandbox, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lists++
	return slices.Clone(w.sandboxes), nil
}

type sessionsOf struct{ *world }

func (w sessionsOf) List(context.Context) ([]agentlab.Session, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.sessions), nil
}

func (w *world) Listeners(ctx context.Context, vmid int, state string, wait time.Duration) (guestapi.Listeners, error) {
	w.mu.Lock()
	w.asked++
	if wait > 0 {
		w.held++
		w.mostHeld = max(w.mostHeld, w.held)
		defer func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.held--
		}()
	}
	w.mu.Unlock()
	for {
		w.mu.Lock()
		g, changed := w.guests[vmid], w.changed
		l, err := guestapi.Listeners{State: strconv.Itoa(g.state), Listeners: slices.Clone(g.listeners)}, g.err
		w.mu.Unlock()
		if err != nil || l.State != state || wait == 0 {
			return l, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return guestapi.Listeners{}, ctx.Err()
		}
	}
}

func (w *world) DialGuest(ctx context.Context, vmid int, port uint16) (net.Conn, error) {
	w.mu.Lock()
	at := w.guests[vmid].dial[port]
	w.dials++
	w.mu.Unlock()
	if at == "" {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "nothing listens on port %d", port)
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", at)
}

func (w *world) DialLocal(ctx context.Context, vmid int, port uint16) (net.Conn, error) {
	return w.DialGuest(ctx, vmid, port)
}

func (w *world) clock() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.now
}

// change changes the world, and lets the service see it.
func (w *world) change(fn func()) {
	w.mu.Lock()
	fn()
	close(w.changed)
	w.changed = make(chan struct{})
	w.mu.Unlock()
	w.s.changed()
}

// add adds a running sandbox; serve gives it a server.
func (w *world) add(vmid int, name string) {
	w.change(func() {
		w.guests[vmid] = &guestWorld{dial: map[uint16]string{}}
		w.sandboxes = append(w.sandboxes, agentlab.Sandbox{
			VMID: vmid, UID: fmt.Sprintf("uid%d", vmid), Name: name, State: agentlab.SandboxReady, Desired: agentlab.DesiredRunning,
			CreatedAt: time.Unix(int64(vmid), 0),
		})
	})
}

// serve makes h the server at a port of a guest.
func (w *world) serve(vmid int, l guestapi.Listener, h http.Handler) {
	server := httptest.NewUnstartedServer(h)
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetHTTP1(true)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	w.t.Cleanup(server.Close)
	w.listen(vmid, l, server.Listener.Addr().String())
}

func (w *world) listen(vmid int, l guestapi.Listener, at string) {
	w.change(func() {
		g := w.guests[vmid]
		g.state++
		g.listeners = append(g.listeners, l)
		slices.SortFunc(g.listeners, func(a, b guestapi.Listener) int { return int(a.Port) - int(b.Port) })
		g.dial[l.Port] = at
	})
}

func (w *world) set(vmid int, fn func(*agentlab.Sandbox)) {
	w.change(func() {
		i := slices.IndexFunc(w.sandboxes, func(sb agentlab.Sandbox) bool { return sb.VMID == vmid })
		fn(&w.sandboxes[i])
	})
}

// newWorld returns a running service without sandboxes.
func newWorld(t *testing.T, file string) *world {
	t.Helper()
	w := &world{t: t, guests: map[int]*guestWorld{}, changed: make(chan struct{}), now: time.Unix(1e9, 0)}
	w.start(file)
	return w
}

// start starts another service on the same world, and returns what stops it.
func (w *world) start(file string) (stop func()) {
	w.s = New(Config{Sandboxes: w, Sessions: sessionsOf{w}, First: time.Millisecond, File: file, Clock: w.clock, Logger: slog.New(slog.DiscardHandler)})
	if w.maxHeld > 0 {
		w.s.maxHeld = w.maxHeld
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.s.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	})
	w.t.Cleanup(stop)
	return stop
}

// until waits until ok holds.
func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	end := time.After(guard.Patience)
	for !ok() {
		select {
		case <-tick.C:
		case <-end:
			w.t.Fatalf("never happened: %s; ports %+v", what, w.s.Ports(0))
		}
	}
}

// served waits until a port of a guest is served, and returns it.
func (w *world) served(vmid int, port uint16) (p Port) {
	w.t.Helper()
	w.until(fmt.Sprintf("port %d of %d is served", port, vmid), func() bool {
		for _, p = range w.s.Ports(vmid) {
			if p.Port == port && p.HostPort != 0 {
				return true
			}
		}
		return false
	})
	return p
}

// dialHost connects to a port of this machine.
func dialHost(t testing.TB, port uint16) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(guard.Patience))
	return c
}

// browser is a client that resolves all names to this machine.
func browser(t testing.TB, http2 bool) *http.Client {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(!http2)
	protocols.SetUnencryptedHTTP2(http2)
	tr := &http.Transport{Protocols: protocols, DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		_, port, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		var d net.Dialer
		return d.DialContext(ctx, network, "127.0.0.1:"+port)
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: guard.Patience, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// get makes a request; header are pairs.
func (w *world) get(raw string, header ...string) (*http.Response, string) {
	w.t.Helper()
	return w.do(browser(w.t, false), http.MethodGet, raw, header...)
}

func (w *world) do(c *http.Client, method, raw string, header ...string) (*http.Response, string) {
	w.t.Helper()
	if _, err := url.Parse(raw); err != nil {
		w.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(w.t.Context(), method, raw, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return resp, string(body)
}

// say answers with a text and what the request looked like.
func say(text string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s %s host=%s origin=%s query=%s forwarded=%s%s", text, r.Proto, r.URL.Path, r.Host, r.Header.Get("Origin"), r.URL.RawQuery,
			r.Header.Get("X-Forwarded-For"), r.Header.Get("Forwarded"))
	})
}

// freePort returns a port that nothing uses.
func freePort(t testing.TB) uint16 {
	t.Helper()
	ls, port, err := listen(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range ls {
		_ = l.Close()
	}
	return port
}

// exchange sends text and reads a response.
func exchange(t testing.TB, c net.Conn, text string) (*http.Response, *bufio.Reader) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(c)
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	return resp, r
}
