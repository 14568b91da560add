package hostnet

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/egress/nft"
)

// service is the running part of the network: DNS, DHCP, the proxy, and the
// guest plane's listeners.
type service struct {
	cancel context.CancelFunc // nil if it must not run
	ended  chan struct{}      // closed after it has ended
	up     chan struct{}      // closed while the guest plane's ports are open
	failed error              // of the last attempt; nil while it runs
}

// retryServing is the pause before a new attempt after a failure: a port of
// another program may be free later.
const retryServing = 5 * time.Second

// serve starts serving, unless it already runs, until stopServing.
func (l *Local) serve(m *nft.Manager) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.service.cancel != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	l.service = service{cancel: cancel, ended: ended, up: make(chan struct{})}
	go func() {
		defer close(ended)
		l.keepServing(ctx, func(ctx context.Context) error { return l.serveOnce(ctx, m) }, retryServing)
	}()
}

// keepServing calls run again and again until ctx ends, also after errors.
func (l *Local) keepServing(ctx context.Context, run func(context.Context) error, pause time.Duration) {
	for ctx.Err() == nil {
		err := run(ctx)
		if ctx.Err() != nil {
			return
		}
		l.mu.Lock()
		l.service.failed = err
		l.mu.Unlock()
		l.log.Error("DNS and DHCP on the bridge have stopped; retrying", "err", err)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// stopServing stops serving and waits for its end.
func (l *Local) stopServing() {
	l.mu.Lock()
	s := l.service
	l.service.cancel = nil
	l.mu.Unlock()
	if s.cancel != nil {
		s.cancel()
		<-s.ended
	}
}

// serveOnce serves until ctx ends or a part of it fails.
func (l *Local) serveOnce(ctx context.Context, m *nft.Manager) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	defer wg.Wait()
	listeners, err := l.listenGuests(ctx, m)
	if err != nil {
		return err
	}
	for _, ln := range listeners {
		wg.Go(func() {
			if err := l.demultiplex(ctx, m, ln); err != nil {
				cancel(err)
			}
		})
	}
	l.setServing(true)
	defer l.setServing(false)
	err = m.Run(ctx)
	cancel(err)
	return context.Cause(ctx)
}

func (l *Local) setServing(up bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if up {
		l.service.failed = nil
		close(l.service.up)
	} else {
		l.service.up = make(chan struct{})
	}
}

// serving reports whether guests are served now.
func (l *Local) serving() bool {
	l.mu.Lock()
	m, up, goes := l.manager, l.service.up, l.service.cancel != nil
	l.mu.Unlock()
	return goes && isClosed(up) && isClosed(m.Served())
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// servedTimeout limits the time from the start of serving until guests are
// served.
const servedTimeout = 3 * time.Second

// served waits at most servedTimeout until guests are served.
func (l *Local) served(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, servedTimeout)
	defer cancel()
	l.mu.Lock()
	m, s := l.manager, l.service
	l.mu.Unlock()
	no := func(why string, args ...any) error {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the guests on %s are not served%s", l.network.Bridge, why).
			WithHint("see the daemon's log; the daemon retries every few seconds")
	}
	if s.cancel == nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the network of the sandboxes on %s is not applied", l.network.Bridge).
			WithHint("agentlab host network apply")
	}
	for _, up := range []<-chan struct{}{s.up, m.Served()} {
		select {
		case <-up:
		case <-ctx.Done():
			l.mu.Lock()
			err := l.service.failed
			l.mu.Unlock()
			if err != nil {
				return no(": " + err.Error())
			}
			return no(" yet")
		}
	}
	return nil
}

// listenGuests opens the ports of the guest plane on the gateway's addresses.
func (l *Local) listenGuests(ctx context.Context, m *nft.Manager) (out []net.Listener, err error) {
	for _, gw := range []netip.Addr{l.network.Gateway4, l.network.Gateway6} {
		if !gw.IsValid() {
			continue
		}
		for _, port := range l.network.GuestPorts {
			ln, err := m.ListenTCP(ctx, netip.AddrPortFrom(gw, port))
			if err != nil {
				for _, o := range out {
					_ = o.Close()
				}
				return nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot use the port for guests: %w", err)
			}
			out = append(out, ln)
		}
	}
	return out, nil
}

// demultiplex passes each connection to the listener of its guest. Connections
// without a guest or a listener are closed.
func (l *Local) demultiplex(ctx context.Context, m *nft.Manager, ln net.Listener) error {
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
	defer stop()
	defer ln.Close()
	for {
		conn, err := ln.Accept()
		if ctx.Err() != nil {
			if err == nil {
				_ = conn.Close()
			}
			return nil
		}
		if err != nil {
			if !gate.Pause(ctx, err) {
				return err
			}
			continue
		}
		if to := l.listenerOf(m, conn); to == nil || !to.offer(conn) {
			_ = conn.Close()
		}
	}
}

// listenerOf returns the listener of the guest of a connection.
func (l *Local) listenerOf(m *nft.Manager, conn net.Conn) *listener {
	from, err := netip.ParseAddrPort(conn.RemoteAddr().String())
	if err != nil {
		return nil
	}
	vmid, ok := m.Owner(from.Addr())
	if !ok {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if g := l.guests[vmid]; g != nil {
		return l.listeners[g.ID]
	}
	return nil
}

// maxPending limits the connections of one guest that are not accepted yet.
// The server of the guest plane limits the open ones.
const maxPending = 16

// listener is the listener for a guest's connections to the guest plane.
type listener struct {
	addr    net.Addr
	pending chan net.Conn
	once    sync.Once
	done    chan struct{}
	gone    func()
}

// offer queues a connection, unless there are too many.
func (l *listener) offer(c net.Conn) bool {
	select {
	case <-l.done:
		return false
	default:
	}
	select {
	case l.pending <- c:
	default:
		return false
	}
	if isClosed(l.done) { // it was closed in the meantime, so the connection would not be accepted
		l.drain()
	}
	return true
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case <-l.done:
		return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: l.addr, Err: net.ErrClosed}
	case c := <-l.pending:
		return c, nil
	}
}

// Close implements net.Listener.
func (l *listener) Close() error {
	l.once.Do(func() {
		close(l.done)
		l.drain()
		l.gone()
	})
	return nil
}

func (l *listener) drain() {
	for {
		select {
		case c := <-l.pending:
			_ = c.Close()
		default:
			return
		}
	}
}

// Addr implements net.Listener.
func (l *listener) Addr() net.Addr { return l.addr }

// addListener adds a listener of a guest to all, which mu guards. It closes the one
// before. A listener that is closed is removed.
func addListener(mu *sync.Mutex, all map[ID]*listener, id ID, addr net.Addr) *listener {
	ln := &listener{pending: make(chan net.Conn, maxPending), done: make(chan struct{}), addr: addr}
	ln.gone = func() {
		mu.Lock()
		defer mu.Unlock()
		if all[id] == ln {
			delete(all, id)
		}
	}
	mu.Lock()
	old := all[id]
	all[id] = ln
	mu.Unlock()
	if old != nil {
		_ = old.Close()
	}
	return ln
}

// Listen returns a listener for the connections of a guest to the guest plane:
// those from its address, which Put binds to its port. It may be called before
// Put. A new listener replaces the one before.
func (l *Local) Listen(ctx context.Context, id ID) (net.Listener, error) {
	if _, err := l.open(ctx); err != nil {
		return nil, err
	}
	if err := validID(id); err != nil {
		return nil, err
	}
	at := netip.AddrPortFrom(l.network.Gateway4, 0)
	if p := l.network.GuestPorts; len(p) > 0 {
		at = netip.AddrPortFrom(l.network.Gateway4, p[0])
	}
	return addListener(&l.mu, l.listeners, id, net.TCPAddrFromAddrPort(at)), nil
}

// Dial opens a TCP connection to an address of a guest that is on the bridge.
// Any other address is denied, so that an address from a guest's report cannot
// be used to reach another host.
func (l *Local) Dial(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	m, err := l.open(ctx)
	if err != nil {
		return nil, err
	}
	if _, ok := m.Owner(to.Addr()); !ok {
		return nil, agentlab.Errorf(agentlab.CodeDenied, "%s is not the address of a sandbox on %s", to.Addr(), l.network.Bridge)
	}
	conn, err := m.DialTCP(ctx, to)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the guest at %s does not answer: %w", to, err)
	}
	return conn, nil
}

// Run serves guests until ctx ends: at once if rules are in force and no
// driver has claimed the bridge, otherwise after Restore or Apply. It does
// nothing on a host without rules, or if mayLook is false.
func (l *Local) Run(ctx context.Context, mayLook bool) error {
	l.mu.Lock()
	claimed := l.claimed
	l.mu.Unlock()
	if mayLook && !claimed {
		if m, err := l.open(ctx); err == nil {
			if st, err := m.Status(ctx); err == nil && st.Applied() {
				l.serve(m)
			}
		}
	}
	<-ctx.Done()
	l.stopServing()
	return nil
}

// Close stops serving guests in this process. The rules stay in force.
func (l *Local) Close() error {
	l.stopServing()
	l.mu.Lock()
	m, guests := l.manager, l.guests
	l.guests = map[int]*guest{}
	l.mu.Unlock()
	var errs []error
	if m != nil {
		m.Close()
	}
	for _, g := range guests {
		errs = append(errs, g.log.Close(), g.names.Close())
	}
	return errors.Join(errs...)
}
