package link

import (
	"context"
	"io"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/agentlab-vm/agentlab"
)

const (
	syncEvery = 100 * time.Millisecond
	// minSession is the minimum time between two session starts, so that a
	// guest that always ends its sessions causes little work for the host.
	minSession = 100 * time.Millisecond
	maxStreams = 256
)

// HostLink is the controller's end of a link. Its methods may be called from
// many goroutines.
type HostLink struct {
	conn io.ReadWriteCloser
	w    *writer
	stop func() bool   // removes the ctx hook
	pace time.Duration // minSession, less in tests
	done chan struct{}
	once sync.Once
	wg   sync.WaitGroup
	kick chan struct{} // wakes the sync loop

	mu      sync.Mutex
	err     error
	want    nonce
	sess    *session // nil while not synchronised with the guest
	guard   guard
	began   time.Time
	changed chan struct{} // closed and replaced when sess changes
}

// Host starts the controller's end on conn, which it owns from now on. It ends
// when ctx ends, when Close is called or when conn fails.
func Host(ctx context.Context, conn io.ReadWriteCloser) *HostLink {
	return newHost(ctx, conn, minSession)
}

func newHost(ctx context.Context, conn io.ReadWriteCloser, pace time.Duration) *HostLink {
	h := &HostLink{
		conn: conn, pace: pace, done: make(chan struct{}), kick: make(chan struct{}, 1),
		want: newNonce(), changed: make(chan struct{}),
	}
	h.w = newWriter(conn, h.done)
	h.wg.Go(func() { h.fail(h.w.run()) })
	h.wg.Go(func() { h.fail(h.read()) })
	h.wg.Go(h.syncLoop)
	h.stop = context.AfterFunc(ctx, func() { h.fail(context.Cause(ctx)) })
	return h
}

// Dial opens a stream to the guest. It fails at once with code unavailable
// while the guest is not synchronised, and with busy while too many streams
// are open; use WaitUp to wait.
func (h *HostLink) Dial(ctx context.Context) (net.Conn, error) {
	h.mu.Lock()
	sess := h.sess
	h.mu.Unlock()
	if sess == nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the guest does not answer yet")
	}
	if sess.mux.NumStreams() >= maxStreams {
		return nil, agentlab.Errorf(agentlab.CodeBusy, "%d streams to the guest are open", maxStreams)
	}
	type result struct {
		c   net.Conn
		err error
	}
	ch := make(chan result, 1)
	go func() {
		c, err := sess.open()
		ch <- result{c, err}
	}()
	select {
	case r := <-ch:
		if r.err != nil {
			return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the guest does not answer: %w", r.err)
		}
		return r.c, nil
	case <-ctx.Done():
		go func() { // a stream that is opened too late is closed
			if r := <-ch; r.err == nil {
				_ = r.c.Close()
			}
		}()
		return nil, agentlab.Errorf(agentlab.CodeTimeout, "opening a stream to the guest: %w", context.Cause(ctx))
	}
}

// WaitUp returns nil as soon as the guest answers, or an error when ctx or the
// link ends first.
func (h *HostLink) WaitUp(ctx context.Context) error {
	for {
		h.mu.Lock()
		up, changed := h.sess != nil, h.changed
		h.mu.Unlock()
		if up {
			return nil
		}
		select {
		case <-changed:
		case <-h.done:
			return agentlab.Errorf(agentlab.CodeUnavailable, "the link to the guest is closed: %w", h.Err())
		case <-ctx.Done():
			return agentlab.Errorf(agentlab.CodeTimeout, "waiting for the guest: %w", context.Cause(ctx))
		}
	}
}

// Err returns why the link ended, nil before that.
func (h *HostLink) Err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}

// Close ends the link and all its streams and waits for its goroutines.
func (h *HostLink) Close() error {
	h.fail(net.ErrClosed)
	h.stop()
	h.wg.Wait()
	return nil
}

func (h *HostLink) fail(err error) {
	h.once.Do(func() {
		if err == nil {
			err = net.ErrClosed
		}
		h.mu.Lock()
		h.err = err
		h.mu.Unlock()
		close(h.done)
		_ = h.conn.Close()
		h.drop(nil)
	})
}

// drop ends the current session (only if it is sess, when sess is not nil) and
// requests a new one.
func (h *HostLink) drop(sess *session) {
	h.mu.Lock()
	old := h.sess
	if old == nil || (sess != nil && sess != old) {
		h.mu.Unlock()
		return
	}
	h.sess, h.want = nil, newNonce()
	h.notify()
	h.mu.Unlock()
	old.end() // first, so that no data of it follows the next SYNC
	h.wake()
}

func (h *HostLink) notify() {
	close(h.changed)
	h.changed = make(chan struct{})
}

func (h *HostLink) wake() {
	select {
	case h.kick <- struct{}{}:
	default:
	}
}

// syncLoop sends SYNC until it is acknowledged, again for each new session.
func (h *HostLink) syncLoop() {
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-h.done:
			return
		case <-h.kick:
		case <-t.C:
		}
		h.mu.Lock()
		up, want, wait := h.sess != nil, h.want, h.pace-time.Since(h.began)
		h.mu.Unlock()
		switch {
		case up: // woken again by drop
		case wait > 0:
			t.Reset(wait)
		default:
			h.w.control(recSync, want)
			t.Reset(syncEvery)
		}
	}
}

func (h *HostLink) read() error {
	buf := make([]byte, chunk)
	var d decoder
	for {
		n, err := h.conn.Read(buf)
		d.feed(buf[:n], h.onData, h.onRecord)
		if err != nil {
			return err
		}
	}
}

func (h *HostLink) onData(p []byte) {
	h.mu.Lock()
	sess := h.sess
	h.mu.Unlock()
	if sess == nil {
		return
	}
	whole, err := h.guard.take(p)
	if err != nil {
		h.drop(sess)
		return
	}
	if len(whole) > 0 {
		sess.sc.deliver(whole)
	}
}

func (h *HostLink) onRecord(kind byte, n nonce) {
	switch kind {
	case recAck:
		h.start(n)
	case recReset:
		h.drop(nil)
	}
}

// start begins a session if the guest has acknowledged the current nonce.
func (h *HostLink) start(n nonce) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.sess != nil || n != h.want || h.err != nil {
		return
	}
	sc := newSessConn(h.w)
	mux, err := yamux.Client(sc, yamuxConfig(true))
	if err != nil {
		return // only an invalid config fails, which the tests exclude
	}
	sess := newSession(mux, sc)
	h.sess, h.guard, h.began = sess, guard{}, time.Now()
	h.notify()
	h.wg.Go(func() {
		<-mux.CloseChan()
		h.drop(sess)
	})
}
