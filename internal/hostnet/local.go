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

// Config is the configuration of a Local. Network and Dir are required.
type Config struct {
	// Network returns the configuration of the bridge. It is called at the
	// first use, so that a host without sandboxes on a bridge needs none.
	Network func() (nft.Config, error)
	// Dir is the directory of the records of sandboxes; it is created if
	// missing.
	Dir      string
	Dialer   gate.Dialer   // nil means the host's own
	Resolver gate.Resolver // nil means the host's name servers
	Logger   *slog.Logger  // nil means none
}

// ID identifies a guest by the number of its VM, which is unique on the host,
// and the UID of its sandbox.
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
	DHCP       bool // the guest may use the bridge's DHCP server, which returns IPv4
	Network    agentlab.Network
}

// Local manages the network of this machine. Its methods may be called from
// any goroutine. Its rules stay in force when the process ends.
type Local struct {
	cfg Config
	log *slog.Logger

	// change is held for reading during a change of one guest, and for writing
	// by Restore, Apply and Remove, which change all guests.
	change sync.RWMutex

	// mu guards the following fields. It is never held during a call to the
	// kernel, because callbacks with decisions hold the lock of the rules.
	mu        sync.Mutex
	network   nft.Config
	manager   *nft.Manager
	claimed   bool // a driver manages the guests on the bridge
	restored  bool // and has called Restore
	guests    map[int]*guest
	listeners map[ID]*listener
	service   service

	verifying verification
}

// guest is a sandbox on the bridge.
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

// Claim declares that a driver will set the guests on the bridge by Restore.
// Until then the sandboxes in the kernel's rules are not changed.
func (l *Local) Claim() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claimed = true
}

// open finds the tools and reads the settings, once.
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
	m, err := nft.New(ctx, nft.Options{Config: c, Dialer: l.cfg.Dialer, Resolver: l.cfg.Resolver, Audit: l.record, Answered: l.recordAnswer, Logger: l.log})
	if err != nil {
		return nil, err
	}
	l.network, l.manager = c, m
	return m, nil
}

// Ready returns an error with code unavailable and a remedy if policies cannot
// be enforced now. nil means that they can, and that guests are served.
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
		return agentlab.Errorf(agentlab.CodeUnavailable, "the sandboxes on the bridge are not loaded yet").WithHint("try again in a moment")
	}
	if err := l.served(ctx); err != nil {
		return err
	}
	return l.verify(ctx, m)
}

// Put binds a guest to its address, MAC and bridge port, and to its policy, or
// changes them. When it returns nil, all of that is in force and was read back
// from the kernel, and flows that the policy denies are closed. After an error
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
		return agentlab.Errorf(agentlab.CodeUnavailable, "the sandboxes on the bridge are not loaded yet").WithHint("try again in a moment")
	}
	err = l.put(ctx, m, g)
	if err != nil {
		// The cleanup does not depend on the request.
		err = errors.Join(err, l.remove(context.WithoutCancel(ctx), m, g.ID.VMID))
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
	if old != nil && old.ID != g.ID { // it is gone without a Drop, and another sandbox has its number
		if err := l.remove(ctx, m, g.ID.VMID); err != nil {
			return err
		}
	}
	if err := l.add(g); err != nil {
		return err
	}
	if err := m.Set(ctx, s); err != nil {
		return err
	}
	return l.ensure(ctx, m)
}

// ensure reads back the rules in force. If another program changed them, it
// loads them again, once.
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

// add stores a guest and opens its log.
func (l *Local) add(g Guest) error {
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
	if old != nil { // it is gone without a Drop, and another sandbox has its number
		old.close()
	}
	l.guests[g.ID.VMID] = &guest{Guest: g, log: log, names: names}
	return nil
}

// remove removes a guest from the network. Its log is kept.
func (l *Local) remove(ctx context.Context, m *nft.Manager, vmid int) error {
	err := m.Forget(ctx, vmid) // also flushes the rest of the log
	l.mu.Lock()
	defer l.mu.Unlock()
	if g := l.guests[vmid]; g != nil {
		g.close()
		delete(l.guests, vmid)
	}
	return err
}

// Restore sets the guests on the bridge in one transaction and removes all
// others. A driver calls it at its start. Flows that the policies allow
// continue. A guest whose policy or addresses no longer fit the configuration
// gets no network; the log has the reason, and Put returns it. After Restore
// guests are served.
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
	list := l.replaceGuests(guests)
	if err := m.Restore(ctx, list); err != nil {
		return err
	}
	l.removeOthers(list)
	l.serve(m)
	l.sweep(guests)
	return l.ensure(ctx, m)
}

// replaceGuests replaces the guests by those of the list that can be added.
func (l *Local) replaceGuests(guests []Guest) (list []nft.Sandbox) {
	for _, g := range guests {
		s, err := toSandbox(g)
		if err == nil {
			err = l.checkWith(s, list)
		}
		if err == nil {
			err = l.add(g)
			s.Answers = l.readAnswers(g.ID)
		}
		if err != nil {
			l.log.Error("a sandbox has no network", "vmid", g.ID.VMID, "err", err)
			continue
		}
		list = append(list, s)
	}
	return list
}

// removeOthers removes all guests that are not in the list.
func (l *Local) removeOthers(list []nft.Sandbox) {
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

func (l *Local) checkWith(s nft.Sandbox, list []nft.Sandbox) error {
	for _, o := range list {
		if o.VMID == s.VMID {
			return agentlab.Errorf(agentlab.CodeInvalid, "another sandbox has its VMID")
		}
	}
	return s.Validate(l.network, list)
}

// Drop removes a guest from the network and deletes its records. Afterwards
// another guest may get its address.
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
		if err := l.remove(ctx, m, id.VMID); err != nil {
			return err
		}
	}
	return l.removeLog(id)
}

// Lease returns the address that the DHCP server of the bridge has
// acknowledged to a MAC, zero if none.
func (l *Local) Lease(ctx context.Context, mac net.HardwareAddr) (netip.Addr, error) {
	m, err := l.open(ctx)
	if err != nil {
		return netip.Addr{}, err
	}
	return m.Lease(mac), nil
}

// verification shares one read of the kernel's rules between all waiting callers.
type verification struct {
	mu            sync.Mutex
	current, next *verificationRun
}

type verificationRun struct {
	done chan struct{}
	err  error
}

// verifyTimeout limits one read.
const verifyTimeout = time.Minute

// verify reads the kernel's rules. The read begins after the call.
func (l *Local) verify(ctx context.Context, m *nft.Manager) error {
	v := &l.verifying
	v.mu.Lock()
	r := v.next
	if r == nil {
		r = &verificationRun{done: make(chan struct{})}
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
		return agentlab.Errorf(agentlab.CodeUnavailable, "cannot verify the loaded rules: %w", context.Cause(ctx))
	}
}
