package gate

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// Dialer opens every connection that leaves the sandbox. The network is "tcp",
// "udp" or "icmp" and addr a literal IP address and port (for icmp the port is
// 0). A TCP connection should have CloseWrite for half-closes; the others are
// connected and preserve message boundaries. On an icmp connection each Write
// sends one echo request with that data, and each Read returns the data of one
// reply.
type Dialer interface {
	DialContext(ctx context.Context, network, addr string) (net.Conn, error)
}

// Config is the configuration of a Gate. Only Policy is required.
type Config struct {
	Policy   *egress.Policy
	Limits   Limits   // if the policy has none
	Dialer   Dialer   // nil means NewHostDialer
	Resolver Resolver // nil means the host's name servers, asked through Dialer
	// Server is the address of the DNS server for guests, and of the host
	// if the policy allows one of its ports.
	Server netip.AddrPort
	// Reserved lists the ports of the host that no policy can allow: those
	// of the daemon's own API.
	Reserved []uint16
	// NoIPv6 means that the guest has no IPv6: the answers to AAAA questions
	// are empty. They are also empty while Dialer cannot reach IPv6
	// addresses.
	NoIPv6 bool
	// Audit is called with decisions, one at a time, in a separate
	// goroutine.
	Audit func(agentlab.EgressRecord)
	// Learned, which may be nil, is called before the guest gets the answer
	// that the canonical name resolves to addrs, valid for ttl. The answer
	// waits for it.
	Learned func(name string, addrs []netip.Addr, ttl time.Duration)
	Now     func() time.Time // nil means time.Now
}

// Limits are the limits of one guest. A zero field means its default.
type Limits struct {
	TCPFlows    int           // open or opening TCP connections; 512
	UDPFlows    int           // pairs of addresses and ports; above the limit the longest idle flow is ended; 256
	Pings       int           // echo requests waiting for a reply; 32
	DialTimeout time.Duration // 20 s
	NameTimeout time.Duration // until the name of a TCP flow is known, if it is required; 10 s
	DNSRate     int           // questions per second; 200
	DNSInFlight int           // questions being answered; 64
	DNSTimeout  time.Duration // per question; 8 s
	AuditRate   int           // records per second; 100, in bursts of five times that
}

func (l Limits) withDefaults() Limits {
	l.TCPFlows = cmp.Or(l.TCPFlows, 512)
	l.UDPFlows = cmp.Or(l.UDPFlows, 256)
	l.Pings = cmp.Or(l.Pings, 32)
	l.DialTimeout = cmp.Or(l.DialTimeout, 20*time.Second)
	l.NameTimeout = cmp.Or(l.NameTimeout, 10*time.Second)
	l.DNSRate = cmp.Or(l.DNSRate, 200)
	l.DNSInFlight = cmp.Or(l.DNSInFlight, 64)
	l.DNSTimeout = cmp.Or(l.DNSTimeout, 8*time.Second)
	l.AuditRate = cmp.Or(l.AuditRate, 100)
	return l
}

// with replaces the defaults by a policy's own limits.
func (l Limits) with(n agentlab.NetworkLimits) Limits {
	if n.Flows > 0 {
		l.TCPFlows, l.UDPFlows = n.Flows, n.Flows
	}
	if n.DNSPerSecond > 0 {
		l.DNSRate = n.DNSPerSecond
	}
	return l
}

// Gate controls the network access of one guest. It is safe for concurrent
// use.
type Gate struct {
	cfg      Config
	names    *names
	audit    *recorder
	dnsLimit *rate.Limiter
	asking   Slots
	streams  Slots // connections with DNS questions
	up, down throttle

	ctx    context.Context // done after Close
	cancel context.CancelFunc

	mu     sync.Mutex
	policy *egress.Policy
	limits Limits
	closed bool
	flows  map[egress.Proto]map[*Flow]struct{}
}

// New returns a Gate. Close ends it. The error has agentlab.CodeInvalid and
// the name of the field.
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

// Close closes all flows, waits until all records were passed on, and refuses
// later flows. It may be called more than once.
func (g *Gate) Close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.cancel()
	g.audit.close()
}

// closeTimeout is how long SetPolicy waits for the end of flows that it has
// closed.
const closeTimeout = 2 * time.Second

// SetPolicy replaces the policy. When it returns, the new policy decides on
// all flows, and flows that it denies are closed.
func (g *Gate) SetPolicy(p *egress.Policy) {
	cut := g.setPolicy(p)
	limit := time.After(closeTimeout)
	for _, f := range cut {
		select {
		case <-f.ended:
		case <-limit:
			return // its sockets are closed; its goroutine has not noticed yet
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

// Policy returns the current policy.
func (g *Gate) Policy() *egress.Policy {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.policy
}

// Flows returns how many flows of a protocol are open or opening.
func (g *Gate) Flows(p egress.Proto) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.flows[p])
}

// Record records a decision that was made elsewhere. Time, Last and Count are
// set here.
func (g *Gate) Record(r agentlab.EgressRecord) { g.audit.record(r) }

// Remember stores that an earlier process resolved the canonical name to an
// address for the guest, valid for ttl.
func (g *Gate) Remember(name string, addr netip.Addr, ttl time.Duration) {
	g.names.learn(addr.Unmap(), name, ttl)
}

// Slots is a counting semaphore without waiting; its capacity is the limit.
type Slots chan struct{}

// Acquire takes a slot and reports whether there was one.
func (s Slots) Acquire() bool {
	select {
	case s <- struct{}{}:
		return true
	default:
		return false
	}
}

// Release returns a slot.
func (s Slots) Release() { <-s }
