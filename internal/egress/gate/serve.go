package gate

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab/internal/connlimit"
)

// Server answers DNS questions on sockets, for one guest or for many.
type Server struct {
	// Gate returns the gate of the guest with that source address. nil means
	// that there is none; then the question is not answered.
	Gate func(from net.Addr) *Gate
}

// ServePacket answers datagrams on conn until ctx ends, and then closes conn
// and waits for running answers. It returns early with an error if the socket
// fails.
func (s *Server) ServePacket(ctx context.Context, conn net.PacketConn) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer closeQuietly(conn)
	stop := context.AfterFunc(ctx, func() { closeQuietly(conn) })
	defer stop()
	buf := make([]byte, maxQuestion+1)
	for {
		size, from, err := conn.ReadFrom(buf)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			if !Pause(ctx, err) {
				return err
			}
			continue
		}
		g := s.Gate(from)
		if size > maxQuestion || g == nil || !g.asking.Acquire() {
			continue // a resolver repeats its question
		}
		wire := append([]byte(nil), buf[:size]...)
		wg.Go(func() {
			defer g.asking.Release()
			if answer := g.Answer(ctx, wire, true); answer != nil {
				_, _ = conn.WriteTo(answer, from)
			}
		})
	}
}

// Pause waits a short time after a temporary error of a listening socket, such
// as a lack of file descriptors: a guest must not be able to end the service
// for all. It returns false for other errors.
func Pause(ctx context.Context, err error) bool {
	if !connlimit.Temporary(err) {
		return false
	}
	select {
	case <-ctx.Done():
	case <-time.After(50 * time.Millisecond):
	}
	return true
}

// maxStreams limits the simultaneous DNS connections of one guest, because
// many guests share a Server.
const maxStreams = 32

// ServeListener answers questions on the connections of l until ctx ends, and
// then closes all.
func (s *Server) ServeListener(ctx context.Context, l net.Listener) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer closeQuietly(l)
	stop := context.AfterFunc(ctx, func() { closeQuietly(l) })
	defer stop()
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			if err == nil {
				closeQuietly(conn)
			}
			return nil
		}
		if err != nil {
			if !Pause(ctx, err) {
				return err
			}
			continue
		}
		g := s.Gate(conn.RemoteAddr())
		if g == nil || !g.streams.Acquire() {
			closeQuietly(conn)
			continue
		}
		wg.Go(func() {
			defer g.streams.Release()
			defer closeQuietly(conn)
			stop := context.AfterFunc(ctx, func() { closeQuietly(conn) })
			defer stop()
			g.ServeStream(conn)
		})
	}
}

// ServeStream answers the questions on one connection, one after the other,
// until it is idle or fails. The caller closes it.
func (g *Gate) ServeStream(conn net.Conn) {
	for {
		_ = conn.SetDeadline(time.Now().Add(dnsIdle))
		var head [2]byte
		if _, err := io.ReadFull(conn, head[:]); err != nil {
			return
		}
		size := binary.BigEndian.Uint16(head[:])
		if size > maxQuestion {
			return
		}
		wire := make([]byte, size)
		if _, err := io.ReadFull(conn, wire); err != nil {
			return
		}
		answer := g.Answer(g.ctx, wire, false)
		if answer == nil {
			return
		}
		_ = conn.SetDeadline(time.Now().Add(dnsIdle))
		framed := binary.BigEndian.AppendUint16(nil, uint16(len(answer)))
		if _, err := conn.Write(append(framed, answer...)); err != nil {
			return
		}
	}
}
