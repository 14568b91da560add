package supervisor

import (
	"context"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentlab-vm/agentlab/internal/control"
)

// identityPause is the time between two questions to a guest that may have its
// identity.
const identityPause = 200 * time.Millisecond

// identity is whether a guest that continues from a saved memory has the identity
// of its sandbox. That of a copy is known from the answers that pass through the supervisor,
// because each question to an emulated guest that has just started is expensive.
// A daemon that restarts has no influence on it.
type identity struct {
	once sync.Once
	has  chan struct{} // closed when the guest has it
	ask  chan struct{} // gets a value if the guest may have it, and has not accepted it
}

func newIdentity() *identity {
	return &identity{has: make(chan struct{}), ask: make(chan struct{}, 1)}
}

func (i *identity) confirm() { i.once.Do(func() { close(i.has) }) }

// confirmed returns a channel that is closed when the guest has its identity.
func (i *identity) confirmed() <-chan struct{} { return i.has }

// watchIdentity waits until the guest has its identity or the VM ends. It asks a
// guest whose memory is its own, or whose answer was lost.
func (s *supervisor) watchIdentity(ctx context.Context) {
	guest := control.New(s.dialLink)
	var again <-chan time.Time
	if s.cfg.Own {
		s.identity.ask <- struct{}{}
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.identity.has:
			s.log.Info("the guest has its identity; its network is open")
			if c, ok := s.vm.(Continuer); ok {
				if err := c.Continued(); err != nil {
					s.log.Error("the guest has its identity", "err", err)
				}
			}
			return
		case <-s.identity.ask:
		case <-again:
		}
		if s.guestUp(ctx) != nil {
			return
		}
		if h, err := guest.Health(ctx); err == nil && h.Identity == s.cfg.Identity {
			s.identity.confirm()
		}
		again = time.After(identityPause)
	}
}

// watch returns a stream to the guest's control server that confirms the identity
// when the guest has accepted it. A guest is hostile: it can accept an identity
// and not use it, as it can lie about it later.
func (i *identity) watch(guest net.Conn) net.Conn {
	return &identityStream{Conn: guest, identity: i}
}

// identityStream is one stream with one request.
type identityStream struct {
	net.Conn
	identity *identity
	request  strings.Builder // its beginning
	answer   strings.Builder // its beginning
	sets     atomic.Bool
}

func (c *identityStream) Write(p []byte) (int, error) {
	if begins(&c.request, p, control.SetsIdentity) {
		c.sets.Store(true)
	}
	return c.Conn.Write(p)
}

func (c *identityStream) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if begins(&c.answer, p[:n], control.Accepts) && c.sets.Load() {
		c.identity.confirm()
	}
	return n, err
}

// Close ends the stream after the answer, if there is one.
func (c *identityStream) Close() error {
	if c.sets.Load() {
		select {
		case c.identity.ask <- struct{}{}: // has no effect after a confirmation
		default:
		}
	}
	return c.Conn.Close()
}

// begins adds p to a beginning, and reports whether want begins it. The beginning
// does not become longer than want.
func begins(have *strings.Builder, p []byte, want string) bool {
	have.Write(p[:min(len(p), len(want)-have.Len())])
	return have.String() == want
}
