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

// guard follows the yamux frames of a guest and refuses what an honest one
// never sends and a hostile one could use: streams opened by the guest, pings
// (yamux answers each with a goroutine), and data beyond any window.
type guard struct {
	head [frameHeader]byte
	got  int
	body uint32 // bytes of the present frame's payload still to come
}

// check follows p, which may begin and end anywhere in a frame.
func (g *guard) check(p []byte) error {
	for len(p) > 0 {
		if g.body > 0 {
			n := min(uint64(g.body), uint64(len(p)))
			g.body -= uint32(n) //nolint:gosec // n ≤ g.body
			p = p[n:]
			continue
		}
		n := copy(g.head[g.got:], p)
		g.got += n
		p = p[n:]
		if g.got < frameHeader {
			return nil
		}
		g.got = 0
		if err := g.frame(); err != nil {
			return err
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
