package nft

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

// Options say what a Manager works with. Config is required.
type Options struct {
	Config   Config
	Dialer   gate.Dialer   // of the proxy and of DNS; nil means the host's own
	Resolver gate.Resolver // nil means the host's name servers
	// Audit is told of the decisions about a sandbox. It must not block for long.
	Audit func(vmid int, r agentlab.EgressRecord)
	// Told is told of each answer to a sandbox's DNS question that opened an
	// address, to be given back as Sandbox.Told. It must be quick and call
	// nothing here; nil means nobody.
	Told   func(vmid int, t Told)
	Logger *slog.Logger     // nil means none
	Now    func() time.Time // nil means time.Now
}

// Manager keeps the kernel's rules in step with the sandboxes on the bridge,
// and answers their DNS questions. It is safe for concurrent use.
type Manager struct {
	opts   Options
	kernel kernel
	log    *slog.Logger

	// mu orders transactions, so that none is made from a state that another
	// one changed.
	mu      sync.Mutex
	members map[int]*member
	at      atomic.Pointer[map[netip.Addr]*member] // members by address; see index
	ports   []string
	broken  bool          // what the kernel has is not known; all is loaded again
	serving bool          // our DNS server listens
	lessons lessons       // answers that wait for their addresses
	served  chan struct{} // closed while serving

	translators *gate.Translators
	nat64       atomic.Pointer[[]netip.Prefix] // what is known of them; nil: nothing was asked

	tamper func(*ruleset) // nil but in tests that break the rules
}

// member is a sandbox with what was told to it.
type member struct {
	Sandbox
	plan  *plan
	gate  *gate.Gate
	told  map[netip.Addr]map[string]time.Time // until when a name stands for an address
	pairs int                                 // in told
	elems map[netip.Addr]opened               // in the kernel because of told
	opens int                                 // in elems
	dhcp  dhcpLeases

	gateway4 netip.Addr // of the bridge
}

// New makes a Manager for this host. It changes nothing before Apply.
func New(ctx context.Context, opts Options) (*Manager, error) {
	if err := opts.Config.Validate(); err != nil {
		return nil, err
	}
	k, err := findNFT()
	if err != nil {
		return nil, err
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	opts.Config.BridgeMeta = k.hasBridgeMeta(ctx)
	host := gate.NewHostDialer()
	if opts.Resolver != nil {
		host.AskTranslators(opts.Resolver)
	}
	if opts.Dialer == nil {
		c := opts.Config
		opts.Dialer = lanDialer{host, c, func() ([]netip.Prefix, error) { return hostNets(c) }}
	}
	return &Manager{opts: opts, kernel: k, translators: host.Translators(), log: opts.Logger, members: map[int]*member{}, broken: true, served: make(chan struct{})}, nil
}

// state is what is to be in the kernel. mu is held.
func (m *Manager) state() State {
	s := State{Config: m.opts.Config, Ports: m.ports, Serving: m.serving}
	now := m.opts.Now()
	for _, vmid := range slices.Sorted(maps.Keys(m.members)) {
		x := m.members[vmid]
		s.Sandboxes = append(s.Sandboxes, x.Sandbox)
		for _, a := range slices.SortedFunc(maps.Keys(x.told), netip.Addr.Compare) {
			if l := x.learned(a, now); l.TTL > 0 {
				s.Learned = append(s.Learned, l)
			}
		}
	}
	return s
}

// learned is what a sandbox knows about an address now.
func (x *member) learned(a netip.Addr, now time.Time) Learned {
	l := Learned{Sandbox: x.Sandbox, Addr: a}
	for _, name := range slices.Sorted(maps.Keys(x.told[a])) {
		if left := x.told[a][name].Sub(now); left > 0 {
			l.Names = append(l.Names, name)
			l.TTL = max(l.TTL, left)
		}
	}
	return l
}

// Apply loads all rules anew in one transaction, and then makes sure of the
// bridge and of forwarding. Flows that are allowed go on.
func (m *Manager) Apply(ctx context.Context) error {
	m.learnTranslators(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.apply(ctx); err != nil {
		return err
	}
	if err := m.Prepare(); err != nil {
		return err
	}
	return m.pin()
}

// Load loads all rules anew in one transaction, and does nothing else. Flows
// that are allowed go on.
func (m *Manager) Load(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.apply(ctx)
}

// pin pins the address of the bridge and the neighbour entries of all
// sandboxes. mu is held.
func (m *Manager) pin() error {
	if err := fixAddress(m.opts.Config.Bridge, m.log); err != nil { // first: a new address drops the entries
		return err
	}
	for _, x := range m.members {
		if err := pinNeighbours(m.opts.Config.Bridge, x.Sandbox); err != nil {
			return err
		}
	}
	return nil
}

// Prepare makes sure of the bridge, its addresses and forwarding. The rules
// must be in force before.
func (m *Manager) Prepare() error { return prepare(m.opts.Config, m.log) }

func (m *Manager) apply(ctx context.Context) error {
	around, err := m.look(m.opts.Config)
	if err != nil {
		return err
	}
	m.ports = around.ports
	around.put(&m.opts.Config)
	s := m.state()
	rules, err := build(s)
	if err != nil {
		return err
	}
	if m.tamper != nil {
		m.tamper(rules)
	}
	text := rules.text()
	m.broken = true
	if err := m.kernel.load(ctx, text); err != nil {
		return err
	}
	m.broken = false
	for _, x := range m.members {
		x.elems, x.opens = map[netip.Addr]opened{}, 0
	}
	for _, l := range s.Learned {
		x := m.members[l.Sandbox.VMID]
		list, weight := l.elements(x.plan)
		x.keep(l.Addr, list, weight)
	}
	return nil
}

// Remove takes all of ours out of the kernel. The bridge is down before:
// without rules, sandboxes would find the host and its networks open.
func (m *Manager) Remove(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.broken = true
	if err := downBridge(m.opts.Config.Bridge); err != nil {
		return err
	}
	if err := m.kernel.load(ctx, removal(ours...)); err != nil {
		return err
	}
	return removeBridge(m.opts.Config.Bridge)
}

// Set puts a sandbox on the bridge, or changes it. When it returns without an
// error the new policy is in force, flows that it forbids are cut, and those
// that it allows go on. After an error the sandbox has no network.
func (m *Manager) Set(ctx context.Context, s Sandbox) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := s.Validate(m.opts.Config, m.sandboxes()); err != nil {
		return err
	}
	old := m.members[s.VMID]
	x, err := m.newMember(s, old)
	if err != nil {
		return err
	}
	if err := pinNeighbours(m.opts.Config.Bridge, s); err != nil {
		return err
	}
	var text strings.Builder
	if old != nil {
		x.writeAbsent(&text, old)
	} else if err := cutFlows(s); err != nil { // a process that died may not have come to it
		x.gate.Close()
		return err
	}
	x.writePresent(&text, m)
	m.members[s.VMID] = x
	m.index()
	if old != nil && old.gate != x.gate {
		old.gate.Close()
	}
	if err := m.commit(ctx, text.String()); err != nil {
		return errors.Join(err, m.forget(context.WithoutCancel(ctx), s.VMID))
	}
	x.gate.SetPolicy(s.Policy)
	m.sweep(ctx, old)
	if old != nil && (old.IPv4 != s.IPv4 || old.IPv6 != s.IPv6) {
		return cutFlows(old.Sandbox)
	}
	return nil
}

// newMember makes what is kept of a sandbox, with what old was told where it
// has its addresses.
func (m *Manager) newMember(s Sandbox, old *member) (*member, error) {
	x := &member{
		Sandbox: s, plan: planOf(s), gateway4: m.opts.Config.Gateway4, told: map[netip.Addr]map[string]time.Time{}, elems: map[netip.Addr]opened{},
		dhcp: dhcpLeases{limit: rate.NewLimiter(dhcpAnswers, dhcpAnswers)},
	}
	if old != nil && old.IPv4 == s.IPv4 && old.IPv6 == s.IPv6 {
		x.gate, x.told, x.pairs, x.dhcp = old.gate, old.told, old.pairs, old.dhcp
		x.fit(m.opts.Now())
		return x, nil
	}
	var err error
	if x.gate, err = m.newGate(x); err != nil {
		return nil, err
	}
	now := m.opts.Now()
	for _, t := range s.Told {
		if left := t.Until.Sub(now); left > 0 && left <= maxToldFor && t.Addr.IsValid() && len(t.Name) <= 255 {
			x.tell(t.Addr.Unmap(), t.Name, t.Until, now)
			x.gate.Remember(t.Name, t.Addr, left)
		}
	}
	x.Sandbox.Told = nil
	x.fit(now)
	return x, nil
}

// maxToldFor is longer than any answer of ours holds.
const maxToldFor = 2 * time.Hour

func (m *Manager) sandboxes() []Sandbox {
	var out []Sandbox
	for _, x := range m.members {
		out = append(out, x.Sandbox)
	}
	return out
}

// Forget takes a sandbox off the bridge. It may be called again.
func (m *Manager) Forget(ctx context.Context, vmid int) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.forget(ctx, vmid)
}

func (m *Manager) forget(ctx context.Context, vmid int) error {
	x := m.members[vmid]
	if x == nil {
		return nil
	}
	delete(m.members, vmid)
	m.index()
	x.gate.Close()
	var text strings.Builder
	x.writeAbsent(&text, x)
	err := m.commit(ctx, text.String())
	m.sweep(ctx, x)
	return errors.Join(err, cutFlows(x.Sandbox), unpinNeighbours(m.opts.Config.Bridge, x.Sandbox))
}

// commit loads a change, or everything when it is not known what the change
// would meet.
func (m *Manager) commit(ctx context.Context, text string) error {
	if !m.broken {
		err := m.kernel.load(ctx, text)
		if err == nil {
			return nil
		}
		m.log.Warn("a change of the rules was refused; all are loaded again", "err", err)
	}
	return m.apply(ctx)
}

// sweep removes the chains of a policy that no sandbox has any more. What
// cannot be removed does no harm.
func (m *Manager) sweep(ctx context.Context, old *member) {
	if old == nil || m.broken {
		return
	}
	for _, x := range m.members {
		if x.plan.id == old.plan.id {
			return
		}
	}
	t := m.planTable(old)
	var text strings.Builder
	for _, c := range t.chains {
		fmt.Fprintf(&text, "flush chain inet %s %s\n", tableName, c.name)
	}
	for _, c := range t.chains {
		fmt.Fprintf(&text, "delete chain inet %s %s\n", tableName, c.name)
	}
	for _, s := range t.sets {
		fmt.Fprintf(&text, "delete set inet %s %s\n", tableName, s.name)
	}
	if err := m.kernel.load(ctx, text.String()); err != nil {
		m.log.Warn("rules of a policy that nobody uses stay", "policy", old.plan.describe(), "err", err)
	}
}

// planTable is what one policy needs.
func (m *Manager) planTable(x *member) *table {
	b := newBuilder(State{Config: m.opts.Config, Sandboxes: []Sandbox{x.Sandbox}})
	b.policies()
	return b.inet
}

// writePresent writes what brings a sandbox in.
func (x *member) writePresent(w *strings.Builder, m *Manager) {
	x.elems, x.opens = map[netip.Addr]opened{}, 0
	m.planTable(x).writeChains(w)
	for _, e := range bindings(x.Sandbox, x.plan, m.opts.Config.Gateway4) {
		e.write(w, "add")
	}
	now := m.opts.Now()
	for a := range x.told {
		x.open(w, a, now)
	}
}

// writeAbsent writes what takes the elements of a sandbox out. Each is added
// first, because those with a time to live may be gone already.
func (x *member) writeAbsent(w *strings.Builder, old *member) {
	list := bindings(old.Sandbox, old.plan, x.gateway4)
	for _, o := range old.elems {
		list = append(list, o.list...)
	}
	for _, e := range list {
		if e.set == "ports" {
			continue // it is on the bridge, whoever owns it
		}
		e.write(w, "add")
		e.write(w, "delete")
	}
}

func (b binding) write(w *strings.Builder, verb string) {
	e := elem{key: b.key, verdict: b.verdict, options: b.options}
	if verb == "delete" {
		e = elem{key: b.key, verdict: b.verdict}
	}
	fmt.Fprintf(w, "%s element %s %s %s { %s }\n", verb, b.family, tableName, b.set, e)
}

// graceTTL is how much longer than the answer says an address is open, so
// that one who asked in its last moment can still use it.
const graceTTL = 5 * time.Second

func (m *Manager) newGate(x *member) (*gate.Gate, error) {
	vmid := x.VMID
	var g *gate.Gate
	cfg := gate.Config{
		Policy: x.Policy, Dialer: m.opts.Dialer, Resolver: m.opts.Resolver,
		Reserved: m.opts.Config.Reserved,
		Server:   netip.AddrPortFrom(m.opts.Config.Gateway4, egress.DNSPort), NoIPv6: !x.IPv6.IsValid(), Now: m.opts.Now,
		Learned: func(name string, addrs []netip.Addr, ttl time.Duration) {
			if err := m.learn(vmid, g, name, addrs, ttl); err != nil {
				m.log.Warn("addresses could not be opened", "vmid", vmid, "err", err) // they stay closed
			}
		},
	}
	if m.opts.Audit != nil {
		cfg.Audit = func(r agentlab.EgressRecord) {
			r.VMID = vmid
			m.opts.Audit(vmid, r)
		}
	}
	var err error
	g, err = gate.New(cfg)
	return g, err
}

// Close ends the DNS and proxy work for all sandboxes. The rules stay: what
// they let through goes on, what needs a name is refused.
func (m *Manager) Close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, x := range m.members {
		x.gate.Close()
	}
}
