package qemu

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// streamEnd is the end of a socket from which a migration stream is received.
type streamEnd struct {
	conn    net.Conn
	between atomic.Bool // see migration.Receive

	mu      sync.Mutex
	waiting bool // Read has found the socket empty
}

// Read implements io.Reader.
func (s *streamEnd) Read(p []byte) (n int, err error) {
	raw, err := s.conn.(syscall.Conn).SyscallConn()
	if err != nil {
		return 0, err
	}
	rerr := raw.Read(func(fd uintptr) bool {
		s.mu.Lock() // so that what was read is never neither in the socket nor received
		defer s.mu.Unlock()
		for n, err = unix.Read(int(fd), p); errors.Is(err, unix.EINTR); n, err = unix.Read(int(fd), p) {
		}
		s.waiting = errors.Is(err, unix.EAGAIN)
		return !s.waiting
	})
	switch {
	case rerr != nil:
		return 0, rerr
	case err != nil:
		return 0, err
	case n == 0 && len(p) > 0:
		return 0, io.EOF
	}
	return n, nil
}

// drained reports whether everything that was sent was received, and the pages in it
// are written.
func (s *streamEnd) drained() bool {
	raw, err := s.conn.(syscall.Conn).SyscallConn()
	if err != nil {
		return false
	}
	empty := false
	err = raw.Control(func(fd uintptr) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.waiting || !s.between.Load() {
			return
		}
		_, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		empty = errors.Is(err, unix.EAGAIN)
	})
	return err == nil && empty
}
