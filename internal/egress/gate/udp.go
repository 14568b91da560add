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

// maxDatagram is the maximum size of a UDP payload.
const maxDatagram = 65527

var datagrams = sync.Pool{New: func() any { return new([maxDatagram + 1]byte) }}

// pingTimeout limits the wait for the reply to an echo request.
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
		return nil, os.ErrDeadlineExceeded // lost, as in a real network
	}
	if _, err := conn.Write(data); err != nil {
		return nil, err
	}
	reply := make([]byte, len(data)+1)
	n, err := conn.Read(reply)
	return reply[:n], err
}

// RelayUDP copies datagrams in both directions between the halves of a UDP
// flow until there was none for the time idle, or the flow's Context ends, and
// closes both. Datagrams above the guest's bandwidth are lost, as in a real
// network.
func (f *Flow) RelayUDP(guest, outside net.Conn, idle time.Duration) {
	stop := context.AfterFunc(f.ctx, func() {
		closeQuietly(guest)
		closeQuietly(outside)
	})
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		// The guest's side has no idle timeout: it ends when the other
		// direction closes it.
		f.copyDatagrams(outside, guest, &f.g.up, func() bool { return true })
		closeQuietly(outside)
	}()
	f.Touch() // the idle time does not include the time that Dial took
	f.arm(outside, idle)
	f.copyDatagrams(guest, outside, &f.g.down, func() bool { return f.arm(outside, idle) })
	closeQuietly(outside)
	closeQuietly(guest)
	<-done
}

// arm sets the deadline for the idle time of the flow and reports whether it
// is in the future. A deadline in the past is set too: a read without one would
// never end.
func (f *Flow) arm(c net.Conn, idle time.Duration) bool {
	deadline := epoch.Add(time.Duration(f.last.Load()) + idle)
	return c.SetReadDeadline(deadline) == nil && time.Until(deadline) > 0
}

// copyDatagrams copies one direction. After a read timeout goOn reports
// whether the flow continues.
func (f *Flow) copyDatagrams(dst, src net.Conn, t *throttle, goOn func() bool) {
	buf := datagrams.Get().(*[maxDatagram + 1]byte)
	defer datagrams.Put(buf)
	for {
		size, err := src.Read(buf[:])
		switch {
		case err == nil:
			f.Touch()
			if t.admit(size) {
				// A datagram that cannot be sent is lost; the next read
				// returns the error of a closed destination.
				_, _ = dst.Write(buf[:size])
			}
		case IsTimeout(err):
			if !goOn() {
				return
			}
		case errors.Is(err, syscall.ECONNREFUSED):
			// An earlier datagram had no listener; the next one may
			// have.
		default:
			return
		}
	}
}

// IsDenied reports whether an error is a denial, not a failure.
func IsDenied(err error) bool {
	_, ok := errors.AsType[*egress.DeniedError](err)
	return ok
}

// IsTimeout reports whether an error is a timeout.
func IsTimeout(err error) bool {
	t, ok := errors.AsType[net.Error](err)
	return ok && t.Timeout()
}
