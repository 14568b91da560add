package link

import (
	"net"
	"sync"
	"time"

	"github.com/hashicorp/yamux"
)

// session is one yamux session and the streams open in it.
type session struct {
	mux *yamux.Session
	sc  *sessConn

	mu    sync.Mutex
	dead  bool
	conns map[*streamConn]struct{}
}

func newSession(mux *yamux.Session, sc *sessConn) *session {
	return &session{mux: mux, sc: sc, conns: make(map[*streamConn]struct{})}
}

// open opens a new stream; it blocks while the peer does not read.
func (s *session) open() (net.Conn, error) {
	ys, err := s.mux.OpenStream()
	if err != nil {
		return nil, err
	}
	if c := s.wrap(ys); c != nil {
		return c, nil
	}
	return nil, errSessionGone
}

// wrap returns ys as a streamConn, nil if the session has ended.
func (s *session) wrap(ys *yamux.Stream) *streamConn {
	c := &streamConn{Stream: ys, sess: s}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dead {
		return nil
	}
	s.conns[c] = struct{}{}
	return c
}

// end closes the session without waiting. After it returns, no more data of
// the session is written.
func (s *session) end() {
	s.mu.Lock()
	s.dead = true
	conns := s.conns
	s.conns = nil
	s.mu.Unlock()
	for c := range conns {
		c.kill()
	}
	_ = s.sc.Close()
	go func() { _ = s.mux.Close() }()
}

func (s *session) forget(c *streamConn) {
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
}

// streamConn is a yamux stream whose blocked calls return at once when the
// session ends. Without it they spin in yamux until Close gets their locks.
type streamConn struct {
	*yamux.Stream
	sess *session

	mu     sync.Mutex // orders kill and SetDeadline
	killed bool
}

var _ net.Conn = (*streamConn)(nil)

func (c *streamConn) kill() {
	c.mu.Lock()
	c.killed = true
	_ = c.Stream.SetDeadline(time.Unix(1, 0))
	c.mu.Unlock()
}

func (c *streamConn) isKilled() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.killed
}

// sessionError replaces the error of a call that the end of the session interrupted.
func (c *streamConn) sessionError(err error) error {
	if err != nil && (c.isKilled() || c.sess.mux.IsClosed()) {
		return errSessionGone
	}
	return err
}

func (c *streamConn) Read(p []byte) (int, error) {
	if c.isKilled() {
		return 0, errSessionGone
	}
	n, err := c.Stream.Read(p)
	return n, c.sessionError(err)
}

func (c *streamConn) Write(p []byte) (int, error) {
	if c.isKilled() {
		return 0, errSessionGone
	}
	n, err := c.Stream.Write(p)
	return n, c.sessionError(err)
}

func (c *streamConn) Close() error {
	c.sess.forget(c)
	return c.Stream.Close()
}

func (c *streamConn) SetDeadline(t time.Time) error {
	return c.deadline(t, c.Stream.SetDeadline)
}

func (c *streamConn) SetReadDeadline(t time.Time) error {
	return c.deadline(t, c.Stream.SetReadDeadline)
}

func (c *streamConn) SetWriteDeadline(t time.Time) error {
	return c.deadline(t, c.Stream.SetWriteDeadline)
}

func (c *streamConn) deadline(t time.Time, set func(time.Time) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.killed {
		return errSessionGone
	}
	return set(t)
}
