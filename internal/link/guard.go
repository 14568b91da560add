package link

import (
	"encoding/binary"
	"errors"
)

const (
	frameHeader = 12 // version, type, flags (2), stream (4), length (4)
	window      = 256 << 10

	frameData   = 0
	frameWindow = 1
	framePing   = 2
	frameGoAway = 3

	flagSYN = 1
	flagACK = 2
)

var errGuard = errors.New("link: the guest broke the protocol")

// guard checks the yamux frames of a guest and rejects frames that AgentLab's
// guest never sends and that an attacker could use: streams opened by the
// guest, pings (yamux answers each with a goroutine), and data beyond any
// window. It passes only complete frames: yamux holds the lock of a stream
// while it waits for the rest of a frame, and then deadlines have no effect.
type guard struct {
	head [frameHeader]byte
	got  int
	body uint32 // missing bytes of the current frame's payload
	open int    // received bytes of the current frame; 0 between frames
	held []byte // those bytes
}

// take processes p and returns all complete frames, which may be p itself.
func (g *guard) take(p []byte) ([]byte, error) {
	if err := g.check(p); err != nil {
		return nil, err
	}
	if len(g.held) == 0 && g.open == 0 {
		return p, nil
	}
	g.held = append(g.held, p...)
	whole := g.held[:len(g.held)-g.open]
	if len(whole) == 0 {
		return nil, nil
	}
	g.held = append([]byte(nil), g.held[len(whole):]...) // the caller keeps the rest
	return whole, nil
}

// check processes p, which may begin and end anywhere in a frame.
func (g *guard) check(p []byte) error {
	for len(p) > 0 {
		if g.body > 0 {
			n := min(uint64(g.body), uint64(len(p)))
			g.body -= uint32(n)
			p = p[n:]
			if g.open += int(n); g.body == 0 {
				g.open = 0
			}
			continue
		}
		n := copy(g.head[g.got:], p)
		g.got += n
		g.open = g.got
		p = p[n:]
		if g.got < frameHeader {
			return nil
		}
		g.got = 0
		if err := g.frame(); err != nil {
			return err
		}
		if g.body == 0 {
			g.open = 0
		}
	}
	return nil
}

func (g *guard) frame() error {
	flags := binary.BigEndian.Uint16(g.head[2:])
	length := binary.BigEndian.Uint32(g.head[8:])
	if g.head[0] != 0 || flags&flagSYN != 0 {
		return errGuard
	}
	switch g.head[1] {
	case frameData:
		if length > window {
			return errGuard
		}
		g.body = length
	case frameWindow:
		if length > window {
			return errGuard
		}
	case framePing:
		if flags != flagACK {
			return errGuard
		}
	case frameGoAway:
	default:
		return errGuard
	}
	return nil
}
