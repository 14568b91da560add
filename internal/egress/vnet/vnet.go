package vnet

import (
	"cmp"
	"context"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

// The default addresses and sizes of a Config.
var (
	DefaultGateway  = netip.AddrFrom4([4]byte{10, 77, 0, 1})
	DefaultGuest    = netip.AddrFrom4([4]byte{10, 77, 0, 2})
	DefaultGateway6 = netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x77, 15: 1})
	DefaultGuest6   = netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x77, 15: 2})
	DefaultMAC      = net.HardwareAddr{0x02, 0xa9, 0x1a, 0x4d, 0x00, 0x01} // of the gateway
)

// Limits of Config.MTU, in bytes of an IP packet. The maximum is that of
// QEMU's frames without the Ethernet header.
const (
	MinMTU     = 576
	MaxMTU     = 65520
	DefaultMTU = 16370

	minMTU6 = 1280 // RFC 8200
)

// Dialer opens every connection that leaves the sandbox.
type Dialer = gate.Dialer

// Resolver answers the sandbox's DNS questions.
type Resolver = gate.Resolver

// Config is the configuration of a Network. Only Link and Policy are required.
type Config struct {
	// Link carries Ethernet frames, each with its length as a prefix of
	// four bytes in big-endian order: a socket of QEMU's "-netdev stream".
	// The Network closes it.
	Link io.ReadWriteCloser
	// Guest and Gateway are IPv4; the zero value means the defaults.
	Guest, Gateway netip.Addr
	// Guest6 and Gateway6 are IPv6; the zero value means the defaults.
	Guest6, Gateway6 netip.Addr
	NoIPv6           bool             // also implied by an MTU below the minimum of IPv6, 1280
	MAC              net.HardwareAddr // of the gateway; nil means DefaultMAC
	MTU              int              // MinMTU to MaxMTU; 0 means DefaultMTU. The guest's must be the same.
	Policy           *egress.Policy
	// Hold drops the guest's frames until it is closed; nil means not at all.
	Hold     <-chan struct{}
	Dialer   Dialer   // nil means gate.NewHostDialer
	Resolver Resolver // nil means the host's name servers, asked through Dialer
	// Services are TCP ports on the gateway's address. A service owns the
	// connection until it returns; then it is closed. All connections end
	// with the Network. Port 53 is reserved for the Network.
	Services map[uint16]func(net.Conn)
	// Reserved are the ports of the host that no policy can allow.
	Reserved []uint16
	// Audit is called with decisions, one at a time, in a separate
	// goroutine. It sets Seq and VMID.
	Audit  func(agentlab.EgressRecord)
	Logger *slog.Logger // nil means none
	Limits Limits
	Now    func() time.Time // nil means time.Now
}

// Limits are the limits of one guest. A zero field means its default.
type Limits struct {
	gate.Limits
	ServiceFlows int           // TCP connections to the gateway's services; 64
	UDPIdle      time.Duration // a UDP flow ends after this long without a datagram; 60 s
	CloseTimeout time.Duration // how long a closed TCP flow may take to drain to the guest; 30 s
}

func (l Limits) withDefaults() Limits {
	l.ServiceFlows = cmp.Or(l.ServiceFlows, 64)
	l.UDPIdle = cmp.Or(l.UDPIdle, time.Minute)
	l.CloseTimeout = cmp.Or(l.CloseTimeout, 30*time.Second)
	return l
}

// Network is the userspace network of one sandbox.
type Network struct {
	cfg   Config
	log   *slog.Logger
	stack *stack.Stack
	link  *linkEndpoint
	gate  *gate.Gate
	// errorLimit limits the ICMP errors that the guest gets.
	errorLimit *rate.Limiter
	guestCard  atomic.Pointer[[6]byte]
	dns        []net.PacketConn

	ctx    context.Context // done after Close
	cancel context.CancelFunc
	ran    atomic.Bool
	closed sync.Once
	done   chan struct{} // closed when Close has finished

	mu      sync.Mutex // guards ending and the first Add of wg after it
	ending  bool
	wg      sync.WaitGroup
	service gate.Slots
	stats   counters
}

// New returns a Network; Run starts it and Close ends it. The error has
// agentlab.CodeInvalid and the name of the field.
func New(cfg Config) (*Network, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	n := &Network{
		cfg:        cfg,
		log:        cfg.Logger,
		done:       make(chan struct{}),
		errorLimit: rate.NewLimiter(icmpErrors, icmpErrors),
		service:    make(gate.Slots, cfg.Limits.ServiceFlows),
	}
	g, err := gate.New(gate.Config{
		Policy: cfg.Policy, Limits: cfg.Limits.Limits,
		Dialer: cfg.Dialer, Resolver: cfg.Resolver, Server: netip.AddrPortFrom(cfg.Gateway, dnsPort),
		NoIPv6: cfg.NoIPv6, Reserved: cfg.Reserved, Audit: cfg.Audit, Now: cfg.Now,
	})
	if err != nil {
		return nil, err
	}
	n.gate = g
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.link = newLinkEndpoint(cfg.Link, cfg.MTU, tcpip.LinkAddress(cfg.MAC), &n.stats)
	if err := n.buildStack(); err != nil {
		n.cancel()
		g.Close()
		return nil, err
	}
	for _, p := range n.pairs() {
		conn, err := n.takeDNSPort(p.gateway)
		if err != nil {
			n.Close()
			return nil, err
		}
		n.dns = append(n.dns, conn)
	}
	return n, nil
}

func (c *Config) complete() error {
	bad := func(field, why string) error {
		return agentlab.Errorf(agentlab.CodeInvalid, "%s", why).WithField(field)
	}
	if c.Link == nil {
		return bad("Link", "missing")
	}
	if c.Policy == nil {
		return bad("Policy", "missing")
	}
	if !c.Guest.IsValid() {
		c.Guest = DefaultGuest
	}
	if !c.Gateway.IsValid() {
		c.Gateway = DefaultGateway
	}
	if !c.Guest.Is4() || !c.Gateway.Is4() || c.Guest == c.Gateway {
		return bad("Guest", "guest and gateway must be two different IPv4 addresses")
	}
	if !c.Guest6.IsValid() {
		c.Guest6 = DefaultGuest6
	}
	if !c.Gateway6.IsValid() {
		c.Gateway6 = DefaultGateway6
	}
	if !c.Guest6.Is6() || !c.Gateway6.Is6() || c.Guest6 == c.Gateway6 {
		return bad("Guest6", "guest and gateway must be two different IPv6 addresses")
	}
	if c.MAC == nil {
		c.MAC = DefaultMAC
	}
	if len(c.MAC) != 6 || c.MAC[0]&1 != 0 {
		return bad("MAC", "not a unicast Ethernet address")
	}
	if c.MTU == 0 {
		c.MTU = DefaultMTU
	}
	if c.MTU < MinMTU || c.MTU > MaxMTU {
		return agentlab.Errorf(agentlab.CodeInvalid, "%d is not in %d to %d", c.MTU, MinMTU, MaxMTU).WithField("MTU")
	}
	c.NoIPv6 = c.NoIPv6 || c.MTU < minMTU6
	if _, taken := c.Services[dnsPort]; taken {
		return bad("Services", "port 53 is reserved for the DNS server")
	}
	if c.Dialer == nil {
		c.Dialer = gate.NewHostDialer()
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	c.Limits = c.Limits.withDefaults()
	return nil
}

// Run processes frames until ctx ends, Close is called or the link fails, and
// then closes the Network. It returns nil in the first two cases and the
// link's error in the last; io.EOF means that the peer closed the link. It may
// be called once.
func (n *Network) Run(ctx context.Context) error {
	if n.ran.Swap(true) {
		return agentlab.Errorf(agentlab.CodeConflict, "the network was already started")
	}
	defer n.Close()
	stop := context.AfterFunc(ctx, n.cancel)
	defer stop()
	unlink := context.AfterFunc(n.ctx, n.link.shut)
	defer unlink()
	for _, conn := range n.dns {
		if !n.spawn(func() { n.serveDNS(conn) }) {
			return nil
		}
	}
	err := n.link.receive(n.afterHold(n.filter()))
	if n.ctx.Err() != nil {
		return nil
	}
	n.log.Info("the guest's network link ended", "err", err)
	return err
}

// Close ends the Network: it closes the link, ends every connection and waits
// for all goroutines. It may be called more than once, at any time after New.
func (n *Network) Close() {
	n.closed.Do(func() {
		defer close(n.done)
		n.cancel()
		n.link.shut()
		n.mu.Lock()
		n.ending = true
		n.mu.Unlock()
		n.gate.Close()
		n.abortUntilIdle()
		n.stack.Destroy()
	})
	<-n.done
}

// abortUntilIdle waits for the flows. A connection in its handshake may be
// registered with the stack late, so the abort is repeated.
func (n *Network) abortUntilIdle() {
	idle := make(chan struct{})
	go func() {
		n.wg.Wait()
		close(idle)
	}()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		for _, ep := range n.stack.RegisteredEndpoints() {
			ep.Abort()
		}
		select {
		case <-idle:
			return
		case <-tick.C:
		}
	}
}

// SetPolicy replaces the policy. When it returns, the new policy decides on
// all flows, and flows that it denies are closed.
func (n *Network) SetPolicy(p *egress.Policy) { n.gate.SetPolicy(p) }

func (n *Network) isGateway(a netip.Addr) bool {
	return a == n.cfg.Gateway || a == n.cfg.Gateway6 && !n.cfg.NoIPv6
}

// enter counts a goroutine of the Network; false means that the Network is
// ending. After true the caller must call n.wg.Done.
func (n *Network) enter() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ending {
		return false
	}
	n.wg.Add(1)
	return true
}

func (n *Network) spawn(f func()) bool {
	if !n.enter() {
		return false
	}
	go func() {
		defer n.wg.Done()
		f()
	}()
	return true
}

type counters struct {
	framesIn, framesOut, framesDropped atomic.Uint64
}
