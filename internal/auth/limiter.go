package auth

import (
	"net/netip"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab/internal/connlimit"
)

// Limits bound how often tokens that are not good may come. Zero fields take
// the default.
type Limits struct {
	Burst  int           // bad tokens of one address before it has to wait; default 10
	Every  time.Duration // after which one more is let through; default 6 s
	Source int           // addresses that are told apart; default 4096
}

// limiter slows down whoever tries tokens. One that was good lately is let
// through all the same, so that nobody locks its bearer out from the address
// that both share. 256 random bits need no such help against guessing; it
// keeps the noise, and the work that it makes, small.
type limiter struct {
	l     Limits
	clock func() time.Time

	mu      sync.Mutex
	sources map[netip.Prefix]*source
	good    map[string]bool // hashes
}

// source is where bad tokens come from: how many it has left, as of a time.
type source struct {
	left float64
	at   time.Time
}

// everyone is the account that the rest shares when bad tokens come from more
// addresses than are told apart.
var everyone = netip.PrefixFrom(netip.IPv6Unspecified(), 0)

// maxGood bounds how many good tokens are remembered: all that can exist.
const maxGood = 1000

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

// take tells whether a token from that address is looked at. Until it is known
// to be good it counts as a bad one, so that many at once win nothing.
func (l *limiter) take(from netip.Addr, hash string) bool {
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

// passed notes that a token that was taken is good.
func (l *limiter) passed(from netip.Addr, hash string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.good[hash] {
		return
	}
	s := l.source(connlimit.Host(from))
	s.left = min(s.left+1, float64(l.l.Burst))
	if len(l.good) < maxGood {
		l.good[hash] = true
	}
}

// forget lets a token be counted again.
func (l *limiter) forget(hash string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.good, hash)
}

// source returns the account of an address, brought up to now.
func (l *limiter) source(p netip.Prefix) *source {
	now := l.clock()
	if l.sources[p] == nil && len(l.sources) >= l.l.Source {
		if l.sweep(now); len(l.sources) >= l.l.Source {
			p = everyone
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

// sweep forgets the addresses that have done nothing bad for long enough.
func (l *limiter) sweep(now time.Time) {
	for p, s := range l.sources {
		if s.left+now.Sub(s.at).Seconds()/l.l.Every.Seconds() >= float64(l.l.Burst) {
			delete(l.sources, p)
		}
	}
}
