package hostnet

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/egress/nft"
	"github.com/agentlab-vm/agentlab/internal/egresslog"
)

// Config says what a Local works with. Network and Dir are required.
type Config struct {
	// Network tells the bridge and what is around it. It is asked at the first
	// use, so that a host without sandboxes on a bridge needs none.
	Network func() (nft.Config, error)
	// Dir is where the records of sandboxes are kept; made when missing.
	Dir      string
	Dialer   gate.Dialer   // nil means the host's own
	Resolver gate.Resolver // nil means the host's name servers
	Logger   *slog.Logger  // nil means none
}

// ID names a guest: by the number of its VM, which no other guest of the host
// has, and by the UID of its sandbox.
type ID struct {
	VMID int
	UID  string
}

// Guest is one sandbox on the bridge.
type Guest struct {
	ID         ID `json:"Ref"`
	MAC        net.HardwareAddr
	Port       string // the bridge port of its network device, e.g. "tap1001i0"
	IPv4, IPv6 netip.Addr
	DHCP       bool // the guest may ask the bridge's DHCP server, which answers IPv4
	Network    agentlab.Network
}

// Local is the network of this machine. Its methods may be called from any
// goroutine; rules that it made stay in force when the process ends.
type Local struct {
	cfg Config
	log *slog.Logger

	// change is held for reading by whoever changes one guest, and for writing
	// by Restore, Apply and Remove, which change all.
	change sync.RWMutex

	// mu guards what follows and is never held while the kernel is asked: the
	// rules' own lock is held by who tells of decisions.
	mu        sync.Mutex
	network   nft.Config
	manager   *nft.Manager
	claimed   bool // a driver tells who is on the bridge
	restored  bool // and has done so
	guests    map[int]*guest
	listeners map[ID]*listener
	service   service

	verifying verifying
}

// guest is a sandbox that was put on the bridge.
type guest struct {
	Guest
	log   *egresslog.Log
	names *bounded.Log
}

func (g *guest) close() { _ = errors.Join(g.log.Close(), g.names.Close()) }

// New returns the network of this machine and changes nothing.
func New(cfg Config) *Local {
	l := &Local{cfg: cfg, log: cfg.Logger, guests: map[int]*guest{}, listeners: map[ID]*listener{}}
	if l.log == nil {
		l.log = slog.New(slog.DiscardHandler)
	}
	return l
}

// Claim says that a driver will tell who is on the bridge, with Restore: until
// then the sandboxes that the kernel lets through are left as they are.
func (l *Local) Claim() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claimed = true
}

// open finds the tools and the settings, once.
func (l *Local) open(ctx context.Context) (*nft.Manager, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.manager != nil {
		return l.manager, nil
	}
	c, err := l.cfg.Network()
	if err != nil {
		return nil, err
	}
	m, err := nft.New(ctx, nft.Options{Config: c, Dialer: l.cfg.Dialer, Resolver: l.cfg.Resolver, Audit: l.record, Answered: l.answered, Logger: l.log})
	if err != nil {
		return nil, err
	}
	l.network, l.manager = c, m
	return m, nil
}

// Ready tells, with code unavailable and a remedy, why policies cannot be
// enforced now; nil means that they can, and that guests are served.
func (l *Local) Ready(ctx context.Context) error {
	m, err := l.open(ctx)
	if err != nil {
		return err
	}
	if err := m.BridgeUp(); err != nil {
		return err
	}
	l.mu.Lock()
	waits := l.claimed && !l.restored
	l.mu.Unlock()
	if waits {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the sandboxes on the bridge are not known yet").WithHint("try again in a moment")
	}
	if err := l.served(ctx); err != nil {
		return err
	}
	return l.verify(ctx, m)
}

// Put binds a guest to its address, MAC and bridge port, and to its policy, or
// changes them. When it returns nil all of that is in force and was read back
// from the kernel, and flows that the policy forbids are cut. After an error
// the guest has no network.
func (l *Local) Put(ctx context.Context, g Guest) error {
	l.change.RLock()
	defer l.change.RUnlock()
	m, err := l.open(ctx)
	if err != nil {
		return err
	}
	l.mu.Lock()
	restored := l.restored
	l.mu.Unlock()
	if !restored {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the sandboxes on the bridge are not known yet").WithHint("try again in a moment")
	}
	err = l.put(ctx, m, g)
	if err != nil {
		// Cleaning up does not hang on the request.
		err = errors.Join(err, l.takeOff(context.WithoutCancel(ctx), m, g.ID.VMID))
	}
	return err
}

func (l *Local) put(ctx context.Context, m *nft.Manager, g Guest) error {
	s, err := toSandbox(g)
	if err != nil {
		return err
	}
	l.mu.Lock()
	old := l.guests[g.ID.VMID]
	l.mu.Unlock()
	if old != nil && old.ID != g.ID { // it has gone without a word: its number is another's
		if err := l.takeOff(ctx, m, g.ID.VMID); err != nil {
			return err
		}
	}
	if err := l.admit(g); err != nil {
		return err
	}
	if err := m.Set(ctx, s); err != nil {
		return err
	}
	return l.ensure(ctx, m)
}

// ensure reads back what is in force; what another program changed is loaded
// again, once.
func (l *Local) ensure(ctx context.Context, m *nft.Manager) error {
	err := l.verify(ctx, m)
	if agentlab.CodeOf(err) != agentlab.CodeUnavailable || ctx.Err() != nil {
		return err
	}
	l.log.Warn("the rules are loaded again", "why", err)
	if err := m.Load(ctx); err != nil {
		return err
	}
	return l.verify(ctx, m)
}

func toSandbox(g Guest) (nft.Sandbox, error) {
	p, err := egress.New(g.Network)
	if err != nil {
		return nft.Sandbox{}, err
	}
	return nft.Sandbox{VMID: g.ID.VMID, MAC: g.MAC, Port: g.Port, IPv4: g.IPv4, IPv6: g.IPv6, DHCP: g.DHCP, Policy: p}, nil
}

// admit remembers a guest, with its record open.
func (l *Local) admit(g Guest) error {
	if err := validID(g.ID); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.guests[g.ID.VMID]
	if old != nil && old.ID == g.ID {
		old.Guest = g
		return nil
	}
	log, err := l.openLog(g.ID)
	if err != nil {
		return err
	}
	names, err := l.openNames(g.ID)
	if err != nil {
		return errors.Join(err, log.Close())
	}
	if old != nil { // it has gone without a word: its number is another's
		old.close()
	}
	l.guests[g.ID.VMID] = &guest{Guest: g, log: log, names: names}
	return nil
}

// takeOff takes a guest off the network. Its record stays.
func (l *Local) takeOff(ctx context.Context, m *nft.Manager, vmid int) error {
	err := m.Forget(ctx, vmid) // hands over what is left of the record
	l.mu.Lock()
	defer l.mu.Unlock()
	if g := l.guests[vmid]; g != nil {
		g.close()
		delete(l.guests, vmid)
	}
	return err
}

// Restore puts many on the bridge at once, in one transaction, and forgets
// every guest that is not among them: how a driver begins. Flows that the
// policies allow go on. A guest that cannot be let in, because its policy or
// its addresses do not fit the configuration any more, is left out without a
// network, and the log tells why; so does Put. From here on guests are served.
func (l *Local) Restore(ctx context.Context, guests []Guest) error {
	l.change.Lock()
	defer l.change.Unlock()
	m, err := l.open(ctx)
	if err != nil {
		return err
	}
	if err := m.BridgeUp(); err != nil {
		return err
	}
	list := l.admitAll(guests)
	if err := m.Restore(ctx, list); err != nil {
		return err
	}
	l.forgetAllBut(list)
	l.serve(m)
	l.sweep(guests)
	return l.ensure(ctx, m)
}

// admitAll makes the guests those of the list that can be let in.
func (l *Local) admitAll(guests []Guest) (list []nft.Sandbox) {
	for _, g := range guests {
		s, err := toSandbox(g)
		if err == nil {
			err = l.checkAmong(s, list)
		}
		if err == nil {
			err = l.admit(g)
			s.Answers = l.answersBefore(g.ID)
		}
		if err != nil {
			l.log.Error("a sandbox is left without a network", "vmid", g.ID.VMID, "err", err)
			continue
		}
		list = append(list, s)
	}
	return list
}

// forgetAllBut notes who is on the bridge now.
func (l *Local) forgetAllBut(list []nft.Sandbox) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.restored = true
	for vmid, g := range l.guests {
		if !slices.ContainsFunc(list, func(s nft.Sandbox) bool { return s.VMID == vmid }) {
			g.close()
			delete(l.guests, vmid)
		}
	}
}

func (l *Local) checkAmong(s nft.Sandbox, list []nft.Sandbox) error {
	for _, o := range list {
		if o.VMID == s.VMID {
			return agentlab.Errorf(agentlab.CodeInvalid, "its number is used twice")
		}
	}
	return s.Validate(l.network, list)
}

// Drop takes a guest off the network and forgets its records; its address may
// be given to another one afterwards.
func (l *Local) Drop(ctx context.Context, id ID) error {
	l.change.RLock()
	defer l.change.RUnlock()
	m, err := l.open(ctx)
	if err != nil {
		return err
	}
	l.mu.Lock()
	g := l.guests[id.VMID]
	ours := g != nil && g.ID == id
	ln := l.listeners[id]
	delete(l.listeners, id)
	l.mu.Unlock()
	if ln != nil {
		_ = ln.Close()
	}
	if ours {
		if err := l.takeOff(ctx, m, id.VMID); err != nil {
			return err
		}
	}
	return l.removeLog(id)
}

// Lease returns the address that the DHCP server of the bridge has
// acknowledged to a MAC; not valid when none.
func (l *Local) Lease(ctx context.Context, mac net.HardwareAddr) (netip.Addr, error) {
	m, err := l.open(ctx)
	if err != nil {
		return netip.Addr{}, err
	}
	return m.Lease(mac), nil
}

// verifying makes one reading of the kernel do for all who wait for one.
type verifying struct {
	mu            sync.Mutex
	current, next *reading
}

type reading struct {
	done chan struct{}
	err  error
}

// verifyTimeout bounds one reading.
const verifyTimeout = time.Minute

// verify reads the kernel back. The reading begins after the call did.
func (l *Local) verify(ctx context.Context, m *nft.Manager) error {
	v := &l.verifying
	v.mu.Lock()
	r := v.next
	if r == nil {
		r = &reading{done: make(chan struct{})}
		v.next = r
		before := v.current
		go func() {
			defer close(r.done)
			if before != nil {
				<-before.done
			}
			v.mu.Lock()
			v.current, v.next = r, nil
			v.mu.Unlock()
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), verifyTimeout)
			defer cancel()
			r.err = m.Verify(ctx)
		}()
	}
	v.mu.Unlock()
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
		return agentlab.Errorf(agentlab.CodeUnavailable, "the rules were not read back: %w", context.Cause(ctx))
	}
}
