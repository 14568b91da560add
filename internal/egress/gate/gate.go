package gate

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// Dialer opens every connection that leaves the sandbox. The network is
// "tcp", "udp" or "icmp" and addr a literal IP address and port (for icmp the
// port is 0). A TCP connection should have CloseWrite, so that half-closes
// pass; the others are connected and keep datagram borders. On an icmp
// connection each Write sends one echo request with that data, and each Read
// gives the data of one reply.
type Dialer interface {
	DialContext(ctx context.Context, network, addr string) (net.Conn, error)
}

// Config says what a Gate is made of. Only Policy is required.
type Config struct {
	Policy   *egress.Policy
	Limits   Limits   // where the policy names none
	Dialer   Dialer   // nil means NewHostDialer
	Resolver Resolver // nil means the host's name servers, asked through Dialer
	// Server is the address that guests see as their DNS server and as the
	// host, where the policy opens a port of that.
	Server netip.AddrPort
	// Reserved are the ports of the host that no policy opens: those of the
	// daemon's own API.
	Reserved []uint16
	// NoIPv6 says that the guest has no IPv6: AAAA questions get no address.
	// They get none either while Dialer can reach no IPv6 address.
	NoIPv6 bool
	// Audit is told of decisions, one at a time, by a goroutine of its own.
	Audit func(agentlab.EgressRecord)
	// Learned, which may be nil, is called before the guest is told that name
	// (canonical) resolves to addrs, good for ttl. Answers wait for it.
	Learned func(name string, addrs []netip.Addr, ttl time.Duration)
	Now     func() time.Time // nil means time.Now
}

// Limits bound what one guest can hold. A zero field means its default.
type Limits struct {
	TCPFlows    int           // open or opening TCP connections; 512
	UDPFlows    int           // pairs of addresses and ports; beyond that the longest idle one ends; 256
	Pings       int           // echo requests waiting for a reply; 32
	DialTimeout time.Duration // 20 s
	NameTimeout time.Duration // until a TCP flow that must show a name has done so; 10 s
	DNSRate     int           // questions per second; 200
	DNSInFlight int           // questions being answered; 64
	DNSTimeout  time.Duration // per question; 8 s
	AuditRate   int           // records per second; 100, in bursts of five times that
}

func (l Limits) withDefaults() Limits {
	number := func(p *int, v int) {
		if *p <= 0 {
			*p = v
		}
	}
	span := func(p *time.Duration, v time.Duration) {
		if *p <= 0 {
			*p = v
		}
	}
	number(&l.TCPFlows, 512)
	number(&l.UDPFlows, 256)
	number(&l.Pings, 32)
	span(&l.DialTimeout, 20*time.Second)
	span(&l.NameTimeout, 10*time.Second)
	number(&l.DNSRate, 200)
	number(&l.DNSInFlight, 64)
	span(&l.DNSTimeout, 8*time.Second)
	number(&l.AuditRate, 100)
	return l
}

// with puts a policy's own limits in the place of the defaults.
func (l Limits) with(n agentlab.NetworkLimits) Limits {
	if n.Flows > 0 {
		l.TCPFlows, l.UDPFlows = n.Flows, n.Flows
	}
	if n.DNSPerSecond > 0 {
		l.DNSRate = n.DNSPerSecond
	}
	return l
}

// Gate stands between one guest and the network. It is safe for concurrent
// use.
type Gate struct {
	cfg      Config
	names    *names
	audit    *recorder
	dnsLimit *rate.Limiter
	asking   Slots
	streams  Slots // connections that questions come on
	up, down *throttle

	ctx    context.Context // ends with Close
	cancel context.CancelFunc

	mu     sync.Mutex
	policy *egress.Policy
	limits Limits
	closed bool
	flows  map[egress.Proto]map[*Flow]struct{}
}

// New makes a Gate; Close ends it. The error is agentlab.CodeInvalid and
// names the field.
func New(cfg Config) (*Gate, error) {
	if cfg.Policy == nil {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "missing").WithField("Policy")
	}
	if cfg.Dialer == nil {
		cfg.Dialer = NewHostDialer()
	}
	if cfg.Resolver == nil {
		cfg.Resolver = NewUpstream(cfg.Dialer)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	cfg.Limits = cfg.Limits.withDefaults()
	g := &Gate{
		cfg:    cfg,
		names:  newNames(cfg.Now),
		audit:  newRecorder(cfg.Audit, cfg.Now, cfg.Limits.AuditRate),
		asking: make(Slots, cfg.Limits.DNSInFlight), streams: make(Slots, maxStreams),
		up:   newThrottle(),
		down: newThrottle(),
		flows: map[egress.Proto]map[*Flow]struct{}{
			egress.TCP: {}, egress.UDP: {}, egress.ICMP: {},
		},
	}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	l := cfg.Limits.with(cfg.Policy.Limits()).DNSRate
	g.dnsLimit = rate.NewLimiter(rate.Limit(l), 2*l)
	g.setPolicy(cfg.Policy)
	return g, nil
}

// Close cuts all flows, waits for records to be handed over, and refuses
// whatever comes later. It may be called again.
func (g *Gate) Close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.cancel()
	g.audit.close()
}

// cutPatience is how long SetPolicy waits for flows that it has cut.
const cutPatience = 2 * time.Second

// SetPolicy puts another policy in force. When it returns, all is decided by
// the new one, and the flows that it forbids are cut.
func (g *Gate) SetPolicy(p *egress.Policy) {
	cut := g.setPolicy(p)
	deadline := time.NewTimer(cutPatience)
	defer deadline.Stop()
	for _, f := range cut {
		select {
		case <-f.ended:
		case <-deadline.C:
			return // its sockets are closed; who held it is slow to notice
		case <-g.ctx.Done():
			return
		}
	}
}

func (g *Gate) setPolicy(p *egress.Policy) (cut []*Flow) {
	limits := p.Limits()
	g.mu.Lock()
	g.policy, g.limits = p, g.cfg.Limits.with(limits)
	dnsRate := g.limits.DNSRate
	for _, table := range g.flows {
		for f := range table {
			if !f.allowedBy(p) {
				cut = append(cut, f)
			}
		}
	}
	g.mu.Unlock()
	now := g.cfg.Now()
	g.dnsLimit.SetLimitAt(now, rate.Limit(dnsRate))
	g.dnsLimit.SetBurstAt(now, 2*dnsRate)
	g.up.set(limits.BandwidthMbps)
	g.down.set(limits.BandwidthMbps)
	for _, f := range cut {
		f.cut()
	}
	return cut
}

// Policy returns the policy in force.
func (g *Gate) Policy() *egress.Policy {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.policy
}

// Flows tells how many flows of a kind are open or opening.
func (g *Gate) Flows(p egress.Proto) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.flows[p])
}

// Record records a decision that was made elsewhere. Time, Last and Count are
// set here.
func (g *Gate) Record(r agentlab.EgressRecord) { g.audit.record(r) }

// Remember makes the gate know that its guest was told that name (canonical)
// resolves to an address, good for ttl: by the process before this one.
func (g *Gate) Remember(name string, addr netip.Addr, ttl time.Duration) {
	g.names.learn(addr.Unmap(), name, ttl)
}

// Slots is a counting semaphore that never waits; its capacity is the limit.
type Slots chan struct{}

// Take takes a slot, and reports whether there was one.
func (s Slots) Take() bool {
	select {
	case s <- struct{}{}:
		return true
	default:
		return false
	}
}

// Give gives back a slot that was taken.
func (s Slots) Give() { <-s }
