package devproxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab/internal/connlimit"
)

const (
	// firstPort is the lowest port of this machine that is opened without being asked.
	firstPort = 1024
	// maxConns is the maximum number of connections to one address of a port.
	maxConns = 512
)

// front is a port of this machine for one port of guests.
type front struct {
	guest, host uint16
	listeners   []net.Listener
	problem     string // why it is not the same number, or why it is not served
}

// frontListener identifies the front of a connection.
type frontListener struct {
	net.Listener
	front *front
}

func (f *front) close() {
	for _, l := range f.listeners {
		_ = l.Close()
	}
}

// reconcile opens the ports on which a guest listens, or did so until recently, and
// closes all others. s.mu is locked.
func (s *Service) reconcile(ctx context.Context) {
	if s.closed {
		return
	}
	live := map[uint16]bool{}
	for _, w := range s.watchers {
		for _, l := range w.listeners {
			live[l.Port] = true
			delete(s.seen, seenKey{w.project, l.Port})
		}
	}
	recent := s.recent()
	for port, f := range s.fronts {
		if !live[port] && !recent[port] {
			f.close()
			delete(s.fronts, port)
		}
	}
	for _, port := range slices.Sorted(maps.Keys(live)) {
		if len(s.fronts) >= maxFronts {
			s.closeRecent(live)
		}
		s.open(ctx, port)
	}
	for _, port := range slices.Sorted(maps.Keys(recent)) {
		s.open(ctx, port)
	}
}

// recent returns the ports whose last listener has ended not long ago, and forgets the
// others, and the oldest ones of a project that has more than maxOfProject ports. s.mu
// is locked.
func (s *Service) recent() map[uint16]bool {
	ports := map[string]int{}
	for _, w := range s.watchers {
		if len(w.listeners) > 0 { // most have none
			ports[w.project] += len(w.listeners)
		}
	}
	keys := slices.SortedFunc(maps.Keys(s.seen), func(a, b seenKey) int {
		return cmp.Or(s.seen[b].Compare(s.seen[a]), cmp.Compare(a.port, b.port)) // the newest first
	})
	out := map[uint16]bool{}
	for _, k := range keys {
		if ports[k.project]++; ports[k.project] > maxOfProject || s.byID[k.project] == nil || s.cfg.Clock().Sub(s.seen[k]) > linger {
			delete(s.seen, k)
			continue
		}
		out[k.port] = true
	}
	return out
}

// closeRecent closes one port on which nothing listens. s.mu is locked.
func (s *Service) closeRecent(live map[uint16]bool) {
	for port, f := range s.fronts {
		if !live[port] {
			f.close()
			delete(s.fronts, port)
			maps.DeleteFunc(s.seen, func(k seenKey, _ time.Time) bool { return k.port == port })
			return
		}
	}
}

// open opens a port of this machine for a port of guests: the one that it had before,
// the one with the same number, or a free one. It does nothing for a port that is open,
// and at the limit. s.mu is locked.
func (s *Service) open(ctx context.Context, guest uint16) {
	old := s.fronts[guest]
	if old != nil && old.host != 0 || old == nil && len(s.fronts) >= maxFronts {
		return
	}
	f := &front{guest: guest}
	s.fronts[guest] = f
	choices := []uint16{guest, 0, 0, 0} // a free port of one family may be in use in the other
	if had := s.hostPort[guest]; had != 0 && had != guest {
		choices = slices.Insert(choices, 0, had)
	}
	var err error
	for _, port := range choices {
		if port != 0 && port < firstPort {
			err = fmt.Errorf("port %d is privileged", port)
			continue
		}
		var lerr error
		if f.listeners, f.host, lerr = listen(ctx, port); lerr == nil {
			break
		}
		err = lerr
	}
	if f.host == 0 {
		if f.problem = err.Error(); old == nil {
			s.log.Warn("no port of this machine for a port of guests", "port", guest, "err", err)
		}
		return
	}
	if f.host != guest {
		f.problem = fmt.Sprintf("port %d of this machine is in use or privileged", guest)
	}
	s.hostPort[guest] = f.host
	for _, l := range f.listeners {
		s.wg.Go(func() { _ = s.http.Serve(&frontListener{connlimit.New(l, maxConns, maxConns), f}) })
	}
}

// listen opens a port on both loopback addresses, or on 127.0.0.1 if there is no IPv6. A
// port that is in use on one of them is in use: a browser tries both. Port 0 is any. Linux
// refuses a socket beside one that listens on all addresses, too. It does not try to
// connect: a guest chooses the port, and would make the daemon connect to any program.
func listen(ctx context.Context, port uint16) ([]net.Listener, uint16, error) {
	var lc net.ListenConfig
	l4, err := lc.Listen(ctx, "tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
	if err != nil {
		return nil, 0, err
	}
	at, err := netip.ParseAddrPort(l4.Addr().String())
	if err != nil {
		_ = l4.Close()
		return nil, 0, err
	}
	l6, err := lc.Listen(ctx, "tcp6", net.JoinHostPort("::1", strconv.Itoa(int(at.Port()))))
	switch {
	case err == nil:
		return []net.Listener{l4, l6}, at.Port(), nil
	case errors.Is(err, syscall.EADDRNOTAVAIL), errors.Is(err, syscall.EAFNOSUPPORT):
		return []net.Listener{l4}, at.Port(), nil
	}
	_ = l4.Close()
	return nil, 0, err
}
