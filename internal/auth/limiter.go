package auth

import (
	"net/netip"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab/internal/connlimit"
)

// Limits limit the rate of invalid tokens. Zero means the default.
type Limits struct {
	Burst  int           // invalid tokens of one address before it must wait; default 10
	Every  time.Duration // after which one more is checked; default 6 s
	Source int           // addresses with a separate count; default 4096
}

// limiter limits attempts with invalid tokens. A recently valid token is
// always accepted, so that its owner is not locked out by another client with
// the same address. Tokens of 256 random bits do not need this protection
// against guessing; it limits the log lines and the work.
type limiter struct {
	l     Limits
	clock func() time.Time

	mu      sync.Mutex
	sources map[netip.Prefix]*source
	good    map[string]bool // hashes
}

// source is a source of invalid tokens: its remaining attempts at a time.
type source struct {
	left float64
	at   time.Time
}

// overflowSource is the shared source of further addresses if there are too many for
// separate counts.
var overflowSource = netip.PrefixFrom(netip.IPv6Unspecified(), 0)

// maxValid is how many valid tokens are remembered: the maximum number of
// tokens.
const maxValid = 1000

func newLimiter(l Limits, clock func() time.Time) *limiter {
	if l.Burst <= 0 {
		l.Burst = 10
	}
	if l.Every <= 0 {
		l.Every = 6 * time.Second
	}
	if l.Source <= 0 {
		l.Source = 4096
	}
	return &limiter{l: l, clock: clock, sources: map[netip.Prefix]*source{}, good: map[string]bool{}}
}

// allow reports whether a token from that address is checked. It counts as
// invalid until it is known to be valid, so that concurrent attempts have no
// advantage.
func (l *limiter) allow(from netip.Addr, hash string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.good[hash] {
		return true
	}
	s := l.source(connlimit.Host(from))
	if s.left < 1 {
		return false
	}
	s.left--
	return true
}

// markValid records that a token is valid.
func (l *limiter) markValid(from netip.Addr, hash string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.good[hash] {
		return
	}
	s := l.source(connlimit.Host(from))
	s.left = min(s.left+1, float64(l.l.Burst))
	if len(l.good) < maxValid {
		l.good[hash] = true
	}
}

// forget lets a token be counted again.
func (l *limiter) forget(hash string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.good, hash)
}

// source returns the source of an address with its current count.
func (l *limiter) source(p netip.Prefix) *source {
	now := l.clock()
	if l.sources[p] == nil && len(l.sources) >= l.l.Source {
		if l.sweep(now); len(l.sources) >= l.l.Source {
			p = overflowSource
		}
	}
	s := l.sources[p]
	if s == nil {
		s = &source{left: float64(l.l.Burst), at: now}
		l.sources[p] = s
	}
	if d := now.Sub(s.at); d > 0 {
		s.left = min(float64(l.l.Burst), s.left+d.Seconds()/l.l.Every.Seconds())
		s.at = now
	}
	return s
}

// sweep removes addresses without recent invalid tokens.
func (l *limiter) sweep(now time.Time) {
	for p, s := range l.sources {
		if s.left+now.Sub(s.at).Seconds()/l.l.Every.Seconds() >= float64(l.l.Burst) {
			delete(l.sources, p)
		}
	}
}
