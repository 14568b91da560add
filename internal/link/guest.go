package link

import (
	"io"
	"net"
	"sync"

	"github.com/hashicorp/yamux"
)

// GuestLink is the guest's end of a link: a net.Listener for the streams that
// the host opens, across any number of sessions.
type GuestLink struct {
	conn    io.ReadWriteCloser
	w       *writer
	done    chan struct{}
	once    sync.Once
	wg      sync.WaitGroup
	streams chan net.Conn

	mu        sync.Mutex
	err       error
	sess      *session
	have      nonce
	resetSent bool // RESET was sent since the last SYNC
}

// Guest starts the guest's end on rw, which it owns from now on. An error of
// rw, io.EOF included, ends the link.
func Guest(rw io.ReadWriteCloser) *GuestLink {
	g := &GuestLink{conn: rw, done: make(chan struct{}), streams: make(chan net.Conn), resetSent: true}
	g.w = newWriter(rw, g.done)
	g.w.control(recReset, nonce{})
	g.wg.Go(func() { g.fail(g.w.run()) })
	g.wg.Go(func() { g.fail(g.read()) })
	return g
}

// Accept returns the next stream.
func (g *GuestLink) Accept() (net.Conn, error) {
	select {
	case c := <-g.streams:
		return c, nil
	case <-g.done:
		g.mu.Lock()
		defer g.mu.Unlock()
		return nil, g.err
	}
}

// Close ends the link and all its streams.
func (g *GuestLink) Close() error {
	g.fail(net.ErrClosed)
	g.wg.Wait()
	return nil
}

// Addr returns the type of the link.
func (g *GuestLink) Addr() net.Addr { return addr{} }

type addr struct{}

func (addr) Network() string { return "agentlab-link" }
func (addr) String() string  { return "agentlab-link" }

func (g *GuestLink) fail(err error) {
	g.once.Do(func() {
		if err == nil {
			err = net.ErrClosed
		}
		g.mu.Lock()
		g.err = err
		g.mu.Unlock()
		close(g.done)
		_ = g.conn.Close()
		g.drop(nil)
	})
}

// drop ends the current session (only if it is sess, when sess is not nil).
func (g *GuestLink) drop(sess *session) {
	g.mu.Lock()
	old := g.sess
	if old == nil || (sess != nil && sess != old) {
		g.mu.Unlock()
		return
	}
	g.sess = nil
	g.mu.Unlock()
	old.end()
}

func (g *GuestLink) read() error {
	buf := make([]byte, chunk)
	var d decoder
	for {
		n, err := g.conn.Read(buf)
		d.feed(buf[:n], g.onData, g.onRecord)
		if err != nil {
			return err
		}
	}
}

func (g *GuestLink) onData(p []byte) {
	g.mu.Lock()
	sess := g.sess
	g.mu.Unlock()
	if sess == nil {
		g.sendReset()
		return
	}
	sess.sc.deliver(p)
}

// sendReset sends RESET, because there is no session; once is enough until the
// next SYNC.
func (g *GuestLink) sendReset() {
	g.mu.Lock()
	sent := g.resetSent
	g.resetSent = true
	g.mu.Unlock()
	if !sent {
		g.w.control(recReset, nonce{})
	}
}

func (g *GuestLink) onRecord(kind byte, n nonce) {
	if kind != recSync {
		return
	}
	g.mu.Lock()
	same := g.sess != nil && n == g.have
	g.mu.Unlock()
	if same { // the answer was sent; a repetition does no harm
		g.w.control(recAck, n)
		return
	}
	g.drop(nil)
	g.start(n)
}

func (g *GuestLink) start(n nonce) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err != nil {
		return
	}
	g.w.control(recAck, n) // before the session can write
	sc := newSessConn(g.w)
	mux, err := yamux.Server(sc, yamuxConfig(false))
	if err != nil {
		return // only an invalid config fails, which the tests exclude
	}
	sess := newSession(mux, sc)
	g.sess, g.have, g.resetSent = sess, n, false
	g.wg.Go(func() { g.acceptLoop(sess) })
}

// acceptLoop passes on the streams of one session until it ends.
func (g *GuestLink) acceptLoop(sess *session) {
	for {
		ys, err := sess.mux.AcceptStream()
		if err != nil {
			break
		}
		c := sess.wrap(ys)
		if c == nil {
			break
		}
		select {
		case g.streams <- c:
		case <-sess.mux.CloseChan():
		case <-g.done:
		}
	}
	g.mu.Lock()
	ours := g.sess == sess
	g.mu.Unlock()
	g.drop(sess)
	if ours {
		g.sendReset()
	}
}
