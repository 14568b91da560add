package gate

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/sniff"
)

// unreadable is the name of a stream that a server may parse differently. No
// policy allows it.
const unreadable = "?"

// maxTargets limits how many addresses of a name are tried.
const maxTargets = 3

// DialNamed reads from the guest's half of a TCP flow until its name is known,
// decides on the name, and opens the outside half: to the address that the
// guest chose if that was a still valid answer for the name, otherwise to an
// address that the name resolves to now. The bytes that were read are sent on.
// After an error the caller resets the guest's half.
func (f *Flow) DialNamed(guest net.Conn) (net.Conn, error) {
	prefix, name := f.readName(guest)
	if f.ctx.Err() != nil {
		return nil, context.Cause(f.ctx)
	}
	rule, targets := f.setName(name)
	if rule != "" {
		return nil, f.deny(rule)
	}
	if targets == nil {
		targets = f.resolveName(name)
	}
	outside, err := f.dial(targets)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(f.ctx, func() { closeQuietly(outside) })
	defer stop()
	if _, err := outside.Write(prefix); err != nil {
		_ = outside.Close()
		return nil, err
	}
	return outside, nil
}

// readName reads until the flow's name is known; the name is "" if there is
// none.
func (f *Flow) readName(guest net.Conn) (prefix []byte, name string) {
	stop := context.AfterFunc(f.ctx, func() { _ = guest.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	_ = guest.SetReadDeadline(time.Now().Add(f.g.cfg.Limits.NameTimeout))
	defer func() { _ = guest.SetReadDeadline(time.Time{}) }()
	buf := make([]byte, 0, 4<<10)
	for {
		if len(buf) == cap(buf) {
			buf = append(make([]byte, 0, min(2*cap(buf), sniff.Max)), buf...)
		}
		n, err := guest.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if n > 0 {
			name, kind, more := sniff.Name(buf)
			switch {
			case more:
			case kind == sniff.Invalid:
				return buf, unreadable
			default:
				return buf, name
			}
		}
		if err != nil || len(buf) >= sniff.Max {
			return buf, ""
		}
	}
}

// setName decides on the flow's name. It returns the rule of a denial, or the
// addresses to dial, nil if the name must be resolved first.
func (f *Flow) setName(name string) (rule string, targets []netip.AddrPort) {
	f.g.mu.Lock() // no change of policy is possible in between
	defer f.g.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.shown, f.mayName = &name, false
	v := f.g.policy.Decide(f.flow)
	if v.Allow && v.NeedName {
		v = f.g.policy.DecideName(f.flow, name)
	}
	if !v.Allow {
		return v.Rule, nil
	}
	f.rule = v.Rule
	if slices.Contains(f.renew, name) {
		return "", nil
	}
	return "", []netip.AddrPort{f.flow.Dst}
}

// resolveName resolves the name of a flow again and returns the addresses that may
// be dialled.
func (f *Flow) resolveName(name string) []netip.AddrPort {
	addrs := f.g.resolveAgain(f.ctx, name, f.flow.Dst.Addr().Is4())
	p := f.g.Policy()
	var out []netip.AddrPort
	for _, a := range addrs {
		flow := egress.Flow{Proto: egress.TCP, Dst: netip.AddrPortFrom(a, f.flow.Dst.Port()), Names: []string{name}}
		v := p.Decide(flow)
		if v.Allow && v.NeedName {
			v = p.DecideName(flow, name)
		}
		if v.Allow && len(out) < maxTargets {
			out = append(out, flow.Dst)
		}
	}
	return out
}

// ServeTCP handles one TCP flow of the guest completely: conn is the guest's
// accepted connection, and dst the address that the guest dialled. It returns
// when the flow has ended and conn is closed.
func (g *Gate) ServeTCP(ctx context.Context, conn net.Conn, dst netip.AddrPort) {
	defer reset(conn)
	f, err := g.BeginTCP(ctx, dst)
	if err != nil {
		return
	}
	defer f.End()
	stop := context.AfterFunc(ctx, f.cut)
	defer stop()
	var outside net.Conn
	if f.NeedsName() {
		outside, err = f.DialNamed(conn)
	} else {
		outside, err = f.Dial()
	}
	if err != nil {
		return
	}
	if f.Relay(conn, outside, func() { reset(conn) }) {
		_ = conn.Close()
	}
}

var pieceBuffers = sync.Pool{New: func() any { return new([maxPiece / 2]byte) }}

// Relay copies in both directions between the halves of a TCP flow until both
// have ended, within the guest's bandwidth. The end of a stream is passed on
// as a half-close. After an error, or at the end of the flow's Context, it
// resets both halves (the guest's by abort) and returns false. Relay closes
// outside.
func (f *Flow) Relay(guest, outside net.Conn, abort func()) bool {
	defer func() { _ = outside.Close() }()
	broken := sync.OnceFunc(func() {
		abort()
		reset(outside)
	})
	stop := context.AfterFunc(f.ctx, broken)
	defer stop()
	sent := make(chan error, 1)
	go func() { sent <- f.copyHalf(outside, guest, &f.g.up, broken) }()
	received := f.copyHalf(guest, outside, &f.g.down, broken)
	return errors.Join(<-sent, received) == nil
}

// copyHalf copies one direction. It returns nil after a normal end.
func (f *Flow) copyHalf(dst, src net.Conn, t *throttle, broken func()) error {
	buf := pieceBuffers.Get().(*[maxPiece / 2]byte)
	defer pieceBuffers.Put(buf)
	for {
		n, err := src.Read(buf[:])
		if n > 0 {
			if werr := t.wait(f.ctx, n); werr != nil {
				broken()
				return werr
			}
			if _, werr := dst.Write(buf[:n]); werr != nil {
				broken()
				return werr
			}
		}
		switch {
		case err == nil:
			continue
		case !errors.Is(err, io.EOF):
			broken()
			return err
		}
		if half, ok := dst.(interface{ CloseWrite() error }); ok {
			if half.CloseWrite() == nil {
				return nil
			}
			// The peer has already closed the connection; data that it may
			// still have sent is lost, as in a real network.
		}
		broken()
		return io.ErrClosedPipe
	}
}

// reset closes a connection with a TCP reset, if it is a TCP connection.
func reset(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	_ = c.Close()
}

func closeQuietly(c io.Closer) { _ = c.Close() }
