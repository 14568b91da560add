package nft

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

// reconcileEvery is the interval of checks that AgentLab's tables still exist,
// in case the kernel did not report their removal. Until then, after another
// program has flushed the ruleset, no policy is enforced and there is no NAT.
const reconcileEvery = 5 * time.Second

// Run applies the rules, answers DNS (and DHCP) questions on the bridge, relays flows
// that need a host name, and restores rules that others remove, until ctx ends. The
// rules stay loaded then, and whatever needs this process is denied.
func (m *Manager) Run(ctx context.Context) error {
	if err := m.Apply(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	bridge := bridgeIndex(m.opts.Config.Bridge)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	run := func(what string, f func(context.Context) error) {
		wg.Go(func() {
			if err := f(ctx); err != nil && ctx.Err() == nil {
				cancel(fmt.Errorf("%s: %w", what, err))
			}
		})
	}
	dns := gate.Server{Gate: m.gateOf}
	for _, a := range []netip.Addr{m.opts.Config.Gateway4, m.opts.Config.Gateway6} {
		if !a.IsValid() {
			continue
		}
		pc, l, err := m.listenDNS(ctx, netip.AddrPortFrom(a, egress.DNSPort))
		if err != nil {
			cancel(err)
			break
		}
		run("DNS", func(ctx context.Context) error { return dns.ServePacket(ctx, pc) })
		run("DNS", func(ctx context.Context) error { return dns.ServeListener(ctx, l) })
	}
	if m.opts.Config.DHCP {
		pc, err := m.listenDHCP(ctx)
		if err != nil {
			cancel(err)
		} else {
			run("DHCP", func(ctx context.Context) error { return m.serveDHCP(ctx, pc) })
		}
	}
	for _, network := range []string{"tcp4", "tcp6"} {
		l, err := m.listenProxy(ctx, network)
		if err != nil {
			cancel(err)
			break
		}
		run("proxy", func(ctx context.Context) error { return m.serveProxy(ctx, l) })
	}
	if ctx.Err() == nil {
		if err := m.serve(ctx, true); err != nil {
			cancel(err)
		}
	}
	run("NAT64", m.watchTranslators)
	run("watch", func(ctx context.Context) error { return m.watch(ctx, bridge) })
	if m.opts.Config.LogGroup != 0 {
		run("audit", m.auditLog)
	}
	<-ctx.Done()
	if err := m.serve(context.WithoutCancel(ctx), false); err != nil {
		m.log.Warn("DNS stays open to sandboxes for up to a minute", "err", err)
	}
	wg.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

func (m *Manager) gateOf(from net.Addr) *gate.Gate {
	ap, err := netip.ParseAddrPort(from.String())
	if err != nil {
		return nil
	}
	if x := m.sandboxAt(ap.Addr()); x != nil {
		return x.gate
	}
	return nil
}

func (m *Manager) listenDNS(ctx context.Context, at netip.AddrPort) (net.PacketConn, net.Listener, error) {
	lc := m.onBridge()
	pc, err := lc.ListenPacket(ctx, "udp", at.String())
	if err != nil {
		return nil, nil, err
	}
	l, err := lc.Listen(ctx, "tcp", at.String())
	if err != nil {
		return nil, nil, errors.Join(err, pc.Close())
	}
	return pc, l, nil
}

func (m *Manager) listenProxy(ctx context.Context, network string) (net.Listener, error) {
	lc := m.onBridge()
	return lc.Listen(ctx, network, fmt.Sprintf(":%d", m.opts.Config.ProxyPort))
}

// serveProxy accepts redirected flows and handles each by the address that its
// sandbox dialled, until ctx ends or the listener fails. It closes l.
func (m *Manager) serveProxy(ctx context.Context, l net.Listener) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer func() { _ = l.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		conn, err := l.Accept()
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
		g := m.gateOf(conn.RemoteAddr())
		dst, err := originalDst(conn)
		if g == nil || err != nil {
			_ = conn.Close()
			continue
		}
		wg.Go(func() { g.ServeTCP(ctx, conn, dst) })
	}
}

// compareEvery is the number of checks of the tables after which their content
// is compared too.
const compareEvery = 12

// reconcile loads the rules again if the host has changed, or if the rules are
// missing or differ.
func (m *Manager) reconcile(ctx context.Context, compare bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	loaded, err := m.kernel.tables()
	if err != nil {
		return err
	}
	around, err := m.readHostState(m.opts.Config)
	if err != nil {
		return err
	}
	good := !m.broken && len(loaded) == len(ours) && around.unchanged(m)
	if good && compare {
		drift, err := m.drift(ctx)
		if err != nil {
			return err
		}
		if good = len(drift) == 0; !good {
			m.log.Warn("another program changed AgentLab's rules; they are loaded again", "what", drift)
		}
	}
	if !good {
		if err := m.apply(ctx); err != nil {
			return err
		}
	} else if err := m.renewPorts(ctx); err != nil {
		return err
	}
	return m.pin() // a bridge that was down has lost them
}

// serve sets whether the DNS server answers; only then do the rules allow
// questions of sandboxes.
func (m *Manager) serve(ctx context.Context, yes bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case yes && !m.serving:
		close(m.served)
	case !yes && m.serving:
		m.served = make(chan struct{})
	}
	m.serving = yes
	return m.renewPorts(ctx)
}

// Served returns a channel that is closed while the DNS questions of sandboxes
// are answered. After that has ended, it returns a new channel.
func (m *Manager) Served() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.served
}

// ListenTCP opens a TCP listener that accepts connections only from the
// bridge. The bridge need not have the address yet.
func (m *Manager) ListenTCP(ctx context.Context, at netip.AddrPort) (net.Listener, error) {
	lc := m.onBridge()
	return lc.Listen(ctx, "tcp", at.String())
}

// DialTCP connects to an address through the bridge only.
func (m *Manager) DialTCP(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	lc := m.onBridge()
	d := net.Dialer{Control: lc.Control}
	return d.DialContext(ctx, "tcp", to.String())
}

// renewPorts renews the elements of AgentLab's ports in the kernel. They expire, so
// that the ports are closed after this process has died. The caller holds mu.
func (m *Manager) renewPorts(ctx context.Context) error {
	var text strings.Builder
	for _, key := range m.opts.Config.servedKeys() {
		e := binding{"inet", "served", key, "", servedFor}
		e.write(&text, "add")
		e.write(&text, "delete")
		if m.serving {
			e.write(&text, "add")
		}
	}
	return m.kernel.load(ctx, text.String())
}

// servedFor is the timeout of the set elements that open AgentLab's ports to
// sandboxes. The daemon renews them while it serves; without a daemon they
// expire, so that a wildcard socket of another program cannot answer.
const servedFor = "timeout 60s"

// servedKeys returns the set elements of these ports.
func (c Config) servedKeys() []string {
	if c.DHCP {
		return []string{"53", "67"}
	}
	return []string{"53"}
}
