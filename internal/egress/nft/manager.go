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

// Options are the options of a Manager. Config is required.
type Options struct {
	Config   Config
	Dialer   gate.Dialer   // of the proxy and of DNS; nil means the host's own
	Resolver gate.Resolver // nil means the host's name servers
	// Audit is called with the decisions about a sandbox. It must not block for
	// long.
	Audit func(vmid int, r agentlab.EgressRecord)
	// Answered is called with each DNS answer that allowed an address for a
	// sandbox; after a restart the caller passes it as Sandbox.Answers. It must
	// be quick and must not call the Manager; nil is allowed.
	Answered func(vmid int, a Answer)
	Logger   *slog.Logger     // nil means none
	Now      func() time.Time // nil means time.Now

	every time.Duration // between checks; 0 means reconcileEvery; tests change it
}

// Manager updates the kernel's rules for the sandboxes on the bridge, and
// answers their DNS questions. It is safe for concurrent use.
type Manager struct {
	opts   Options
	kernel kernel
	log    *slog.Logger

	// mu serialises transactions, so that each is based on the current
	// state.
	mu      sync.Mutex
	members map[int]*member
	at      atomic.Pointer[map[netip.Addr]*member] // members by address; see index
	ports   []string
	broken  bool           // the kernel's state is not known; everything is loaded again
	serving bool           // the DNS server listens
	pending pendingAnswers // DNS answers that wait until their addresses are loaded
	served  chan struct{}  // closed while serving

	translators *gate.Translators
	nat64       atomic.Pointer[[]netip.Prefix] // the known prefixes; nil: not asked yet

	tamper func(*ruleset) // nil except in tests that break the rules
}

// member is a sandbox with its DNS answers.
type member struct {
	Sandbox
	plan    *plan
	gate    *gate.Gate
	answers map[netip.Addr]map[string]time.Time // until when a name resolves to an address
	pairs   int                                 // in answers
	elems   map[netip.Addr]opened               // elements in the kernel because of answers
	opens   int                                 // in elems
	dhcp    dhcpLeases

	gateway4 netip.Addr // of the bridge
}

// New returns a Manager for this host. It changes nothing before Apply.
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

// state returns the desired state of the kernel. The caller holds mu.
func (m *Manager) state() State {
	s := State{Config: m.opts.Config, Ports: m.ports, Serving: m.serving}
	now := m.opts.Now()
	for _, vmid := range slices.Sorted(maps.Keys(m.members)) {
		x := m.members[vmid]
		s.Sandboxes = append(s.Sandboxes, x.Sandbox)
		for _, a := range slices.SortedFunc(maps.Keys(x.answers), netip.Addr.Compare) {
			if l := x.learned(a, now); l.TTL > 0 {
				s.Learned = append(s.Learned, l)
			}
		}
	}
	return s
}

// learned returns the names that a sandbox currently has for an address.
func (x *member) learned(a netip.Addr, now time.Time) Learned {
	l := Learned{Sandbox: x.Sandbox, Addr: a}
	for _, name := range slices.Sorted(maps.Keys(x.answers[a])) {
		if left := x.answers[a][name].Sub(now); left > 0 {
			l.Names = append(l.Names, name)
			l.TTL = max(l.TTL, left)
		}
	}
	return l
}

// Apply loads all rules again in one transaction, and then ensures that the
// bridge and forwarding are set up. Allowed flows continue.
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

// Load loads all rules again in one transaction, and does nothing else.
// Allowed flows continue.
func (m *Manager) Load(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.apply(ctx)
}

// pin fixes the MAC address of the bridge and sets the permanent neighbour
// entries of all sandboxes. The caller holds mu.
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

// Prepare ensures that the bridge, its addresses and forwarding are set up.
// The rules must be loaded before.
func (m *Manager) Prepare() error { return prepare(m.opts.Config, m.log) }

func (m *Manager) apply(ctx context.Context) error {
	around, err := m.readHostState(m.opts.Config)
	if err != nil {
		return err
	}
	m.ports = around.ports
	around.applyTo(&m.opts.Config)
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
		x.setElements(l.Addr, list, weight)
	}
	return nil
}

// Remove removes all tables of AgentLab from the kernel. It sets the bridge
// down first: without rules, sandboxes could reach the host and its networks.
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

// Set adds a sandbox to the bridge, or changes it. When it returns without an
// error, the new policy is in force, flows that it denies are closed, and
// flows that it allows continue. After an error the sandbox has no network.
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
	err = pinNeighbours(m.opts.Config.Bridge, s)
	if err == nil && old == nil {
		err = cutFlows(s) // a process that died may not have done it
	}
	if err != nil {
		if old == nil || old.gate != x.gate {
			x.gate.Close()
		}
		return err
	}
	var text strings.Builder
	if old != nil {
		x.writeAbsent(&text, old)
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

// newMember returns a member for a sandbox, with the DNS answers of old if the
// addresses are the same.
func (m *Manager) newMember(s Sandbox, old *member) (*member, error) {
	x := &member{
		Sandbox: s, plan: planOf(s), gateway4: m.opts.Config.Gateway4, answers: map[netip.Addr]map[string]time.Time{}, elems: map[netip.Addr]opened{},
		dhcp: dhcpLeases{limit: rate.NewLimiter(dhcpAnswers, dhcpAnswers)},
	}
	if old != nil && old.IPv4 == s.IPv4 && old.IPv6 == s.IPv6 {
		x.gate, x.answers, x.pairs, x.dhcp = old.gate, old.answers, old.pairs, old.dhcp
		x.trim(m.opts.Now())
		return x, nil
	}
	var err error
	if x.gate, err = m.newGate(x); err != nil {
		return nil, err
	}
	now := m.opts.Now()
	for _, t := range s.Answers {
		if left := t.Until.Sub(now); left > 0 && left <= maxAnswerTTL && t.Addr.IsValid() && len(t.Name) <= 255 {
			x.addAnswer(t.Addr.Unmap(), t.Name, t.Until, now)
			x.gate.Remember(t.Name, t.Addr, left)
		}
	}
	x.Sandbox.Answers = nil
	x.trim(now)
	return x, nil
}

// maxAnswerTTL is longer than the time to live of any answer.
const maxAnswerTTL = 2 * time.Hour

func (m *Manager) sandboxes() []Sandbox {
	var out []Sandbox
	for _, x := range m.members {
		out = append(out, x.Sandbox)
	}
	return out
}

// Forget removes a sandbox from the bridge. It is idempotent.
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

// commit loads a change, or everything if the state of the kernel is not
// known.
func (m *Manager) commit(ctx context.Context, text string) error {
	if !m.broken {
		err := m.kernel.load(ctx, text)
		if err == nil {
			return nil
		}
		m.log.Warn("nft rejected a change of the rules; loading all rules again", "err", err)
	}
	return m.apply(ctx)
}

// sweep removes the chains of a policy that no sandbox uses anymore. A chain
// that cannot be removed does no harm.
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
		m.log.Warn("the rules of an unused policy were not removed", "policy", old.plan.describe(), "err", err)
	}
}

// planTable returns the chains and sets of one policy.
func (m *Manager) planTable(x *member) *table {
	b := newBuilder(State{Config: m.opts.Config, Sandboxes: []Sandbox{x.Sandbox}})
	b.policies()
	return b.inet
}

// writePresent writes the commands that add a sandbox.
func (x *member) writePresent(w *strings.Builder, m *Manager) {
	x.elems, x.opens = map[netip.Addr]opened{}, 0
	m.planTable(x).writeChains(w)
	for _, e := range bindings(x.Sandbox, x.plan, m.opts.Config.Gateway4) {
		e.write(w, "add")
	}
	now := m.opts.Now()
	for a := range x.answers {
		x.open(w, a, now)
	}
}

// writeAbsent writes the commands that remove the elements of a sandbox. Each
// element is added first, because those with a timeout may already be removed.
func (x *member) writeAbsent(w *strings.Builder, old *member) {
	list := bindings(old.Sandbox, old.plan, x.gateway4)
	for _, o := range old.elems {
		list = append(list, o.list...)
	}
	for _, e := range list {
		if e.set == "ports" {
			continue // it is on the bridge, regardless of its owner
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

// graceTTL is how much longer than the time to live an address is allowed, so
// that a client can use an answer that is about to expire.
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
				m.log.Warn("cannot open addresses", "vmid", vmid, "err", err) // they stay denied
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

// Close ends DNS and the proxy for all sandboxes. The rules stay loaded: flows
// that they allow continue, and flows that need a name are denied.
func (m *Manager) Close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, x := range m.members {
		x.gate.Close()
	}
}
