package guestplane

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// Limits on the lines of one guest in the daemon's log: this many at once, then
// one per logEvery. All guests share the log, and its size is limited: one
// guest must not displace the lines of others.
const (
	logBurst = 50
	logEvery = 5 * time.Second
)

// guest is the state of one sandbox in the guest plane.
type guest struct {
	p    *Plane
	vmid int
	log  *slog.Logger

	ctx    context.Context // of all calls, until disconnect
	cancel context.CancelFunc
	idle   func() // called when the last connection was closed; may be nil

	mu     sync.Mutex
	open   map[*held]struct{}
	closed bool
	limits map[*Limits]*usage // by the limits of a lane or a route
}

// usage is the use of Limits by one guest.
type usage struct {
	rate  *rate.Limiter
	slots chan struct{}
}

func (g *guest) usage(l *Limits) *usage {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.limits == nil {
		g.limits = map[*Limits]*usage{}
	}
	if g.limits[l] == nil {
		g.limits[l] = &usage{rate.NewLimiter(rate.Limit(l.Rate), l.Burst), make(chan struct{}, l.Parallel)}
	}
	return g.limits[l]
}

// enter counts a call. leave must be called at its end.
func (g *guest) enter(ctx context.Context, l *Limits) (leave func(), err error) {
	if *l == (Limits{}) {
		return func() {}, nil
	}
	of := g.usage(l)
	if l.Rate > 0 && !of.rate.AllowN(g.p.cfg.Clock(), 1) {
		return nil, errTooMany
	}
	if l.Parallel == 0 {
		return func() {}, nil
	}
	leave = func() { <-of.slots }
	select {
	case of.slots <- struct{}{}:
		return leave, nil
	default:
	}
	if !l.Wait {
		return nil, errTooMany
	}
	select {
	case of.slots <- struct{}{}:
		return leave, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// line is what remains of a guest while it has no connections.
type line struct {
	s    *Plane
	vmid int

	mu      sync.Mutex
	g       *guest
	stopped bool
	drop    *time.Timer
}

func (l *line) accept(c net.Conn) {
	l.mu.Lock()
	if l.g == nil && !l.stopped {
		l.g = l.s.newGuest(l.vmid)
		l.g.idle = l.idle
	}
	g := l.g
	held := g.hold(c) // under the lock, so that forget sees it
	l.mu.Unlock()
	if held != nil {
		_ = l.s.http.Serve(&accepted{Conn: held, ctx: withGuest(g.ctx, g)}) // returns at once
	}
}

func (l *line) stop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopped = true
	if l.drop != nil {
		l.drop.Stop()
	}
	l.g.disconnect()
}

// idle is called after the last connection of the guest was closed.
func (l *line) idle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.stopped:
	case l.drop == nil:
		l.drop = time.AfterFunc(forgetAfter, l.forget)
	default:
		l.drop.Reset(forgetAfter)
	}
}

// forget deletes the state of a guest, unless it is connected.
func (l *line) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.stopped || l.g == nil || l.g.connected():
	case !bounded.Recovered(l.g.log):
		l.drop.Reset(forgetAfter)
	default:
		l.g.cancel()
		l.g, l.drop = nil, nil
	}
}

func (s *Plane) newGuest(vmid int) *guest {
	ctx, cancel := context.WithCancel(context.Background())
	return &guest{ctx: ctx, cancel: cancel, p: s, vmid: vmid, log: bounded.Lines(s.log.With("vmid", vmid), logBurst, logEvery, s.cfg.Clock)}
}

type guestKey struct{}

func withGuest(ctx context.Context, g *guest) context.Context {
	return context.WithValue(ctx, guestKey{}, g)
}

// guestOf returns the guest of a call. Every call has one.
func guestOf(ctx context.Context) *guest {
	return ctx.Value(guestKey{}).(*guest)
}

// held is an open connection of a guest.
type held struct {
	net.Conn
	g *guest
}

// hold returns the connection for a server, or closes it and returns nil if the
// guest has too many. A nil guest can have none.
func (g *guest) hold(c net.Conn) net.Conn {
	if g == nil {
		_ = c.Close()
		return nil
	}
	h := &held{Conn: c, g: g}
	g.mu.Lock()
	ok := !g.closed && len(g.open) < g.p.cfg.Limits.Connections
	if ok {
		if g.open == nil {
			g.open = map[*held]struct{}{}
		}
		g.open[h] = struct{}{}
	}
	g.mu.Unlock()
	if !ok {
		_ = c.Close()
		return nil
	}
	return h
}

// Close implements net.Conn.
func (h *held) Close() error {
	h.g.mu.Lock()
	_, open := h.g.open[h]
	delete(h.g.open, h)
	last := open && len(h.g.open) == 0
	h.g.mu.Unlock()
	if last && h.g.idle != nil {
		h.g.idle()
	}
	return h.Conn.Close()
}

func (g *guest) connected() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.open) > 0
}

// CloseWrite passes on the half close, which embedding hides.
func (h *held) CloseWrite() error { return stream.CloseWrite(h.Conn) }

// disconnect closes all connections of the guest. A nil guest has none.
func (g *guest) disconnect() {
	if g == nil {
		return
	}
	g.cancel()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	for h := range g.open {
		_ = h.Conn.Close()
	}
	clear(g.open)
}
