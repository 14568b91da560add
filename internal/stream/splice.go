package stream

import (
	"bufio"
	"errors"
	"io"
	"net"
	"time"
)

// closeTimeout is how long near may take to close after far has ended.
const closeTimeout = 5 * time.Second

// Splice copies in both directions between two connections until far has
// ended, and closes both. The end of near is passed on as a half close, so
// that far can still answer; if near fails, far is closed.
//
// The last data of far (an exit status, a closed port) ends the stream. near
// may still be writing. Splice reads and drops that data for up to 5 s, because
// closing near at once would break its write and its read of the last data.
func Splice(near, far net.Conn) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, err := io.Copy(far, near)
		if err != nil && !readFailed(err) {
			_, err = io.Copy(io.Discard, near) // far may have failed: it is still read
		}
		if err != nil { // near has failed: it takes no answer either
			_ = far.Close()
		}
		_ = CloseWrite(far)
	}()
	_, _ = io.Copy(near, far)
	_ = CloseWrite(near)
	_ = far.Close()
	_ = near.SetReadDeadline(time.Now().Add(closeTimeout))
	<-done
	_ = near.Close()
}

// readFailed reports whether a copy ended because a connection could not be read.
func readFailed(err error) bool {
	for op := (*net.OpError)(nil); errors.As(err, &op); err = op.Err {
		if op.Op == "read" {
			return true
		}
	}
	return false
}

// CloseWrite ends the sending direction of a connection. A connection without
// half close is closed.
func CloseWrite(c net.Conn) error {
	if half, ok := c.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}

// Unread returns conn with the bytes that r, a reader of conn, has read ahead.
func Unread(conn net.Conn, r *bufio.Reader) net.Conn {
	if r.Buffered() == 0 {
		return conn
	}
	return &unread{Conn: conn, r: r}
}

type unread struct {
	net.Conn
	r *bufio.Reader
}

func (u *unread) Read(p []byte) (int, error) { return u.r.Read(p) }

// CloseWrite passes on the half close, which embedding hides.
func (u *unread) CloseWrite() error { return CloseWrite(u.Conn) }
