package gate

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

// maxDatagram is the largest UDP payload that IP carries.
const maxDatagram = 65527

var datagrams = sync.Pool{New: func() any { return new([maxDatagram + 1]byte) }}

// pingTimeout is how long a reply to an echo request is waited for.
const pingTimeout = 10 * time.Second

// Ping sends the one echo request of an ICMP flow and returns the data of its
// reply. It ends the flow.
func (f *Flow) Ping(data []byte) ([]byte, error) {
	defer f.End()
	conn, err := f.Dial()
	if err != nil {
		return nil, err
	}
	defer closeQuietly(conn)
	defer context.AfterFunc(f.ctx, func() { closeQuietly(conn) })()
	_ = conn.SetDeadline(time.Now().Add(pingTimeout))
	if !f.g.up.admit(len(data)) {
		return nil, os.ErrDeadlineExceeded // lost, as on a wire
	}
	if _, err := conn.Write(data); err != nil {
		return nil, err
	}
	reply := make([]byte, len(data)+1)
	n, err := conn.Read(reply)
	return reply[:n], err
}

// RelayUDP carries datagrams both ways between the halves of a UDP flow until
// none came for idle, or the flow's Context ends, and closes both. Those over
// the guest's bandwidth are lost, as on a wire.
func (f *Flow) RelayUDP(guest, outside net.Conn, idle time.Duration) {
	stop := context.AfterFunc(f.ctx, func() {
		closeQuietly(guest)
		closeQuietly(outside)
	})
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		// The guest's side has no idle clock of its own: it ends when the
		// other direction closes it.
		f.copyDatagrams(outside, guest, f.g.up, func() bool { return true })
		closeQuietly(outside)
	}()
	f.arm(outside, idle)
	f.copyDatagrams(guest, outside, f.g.down, func() bool { return f.arm(outside, idle) })
	closeQuietly(outside)
	closeQuietly(guest)
	<-done
}

// arm sets the deadline at which the flow has been idle for long enough and
// reports whether that lies ahead.
func (f *Flow) arm(c net.Conn, idle time.Duration) bool {
	deadline := epoch.Add(time.Duration(f.last.Load()) + idle)
	return time.Until(deadline) > 0 && c.SetReadDeadline(deadline) == nil
}

// copyDatagrams carries one direction. On a read timeout goOn tells whether
// the flow is to live on.
func (f *Flow) copyDatagrams(dst, src net.Conn, t *throttle, goOn func() bool) {
	buf := datagrams.Get().(*[maxDatagram + 1]byte) //nolint:forcetypeassert // only this type is put in
	defer datagrams.Put(buf)
	for {
		size, err := src.Read(buf[:])
		switch {
		case err == nil:
			f.Touch()
			if t.admit(size) {
				// What cannot be sent is lost; a closed destination shows at
				// the next read.
				_, _ = dst.Write(buf[:size])
			}
		case IsTimeout(err):
			if !goOn() {
				return
			}
		case errors.Is(err, syscall.ECONNREFUSED):
			// An earlier datagram found no listener; the next one may.
		default:
			return
		}
	}
}

// IsDenied tells a refusal from a failure.
func IsDenied(err error) bool {
	_, ok := errors.AsType[*egress.DeniedError](err)
	return ok
}

// IsTimeout tells that something did not come in time.
func IsTimeout(err error) bool {
	t, ok := errors.AsType[net.Error](err)
	return ok && t.Timeout()
}
