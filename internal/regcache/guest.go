package regcache

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

// guest is the state of one sandbox that uses the cache.
type guest struct {
	s        *Service
	uid      string
	recorder *gate.Recorder
	wholes   chan struct{} // of answers in memory

	mu      sync.Mutex
	network agentlab.Network
	policy  *egress.Policy
	optOut  bool
	asked   time.Time // when the profile was last read
	changed context.Context
	change  context.CancelFunc // ends what the former policy allowed
}

func (g *guest) close() {
	g.mu.Lock()
	g.change()
	g.mu.Unlock()
	g.recorder.Close()
}

// profileAge is how long the opt-out of a profile is used.
const profileAge = 5 * time.Second

var errOptOut = agentlab.Errorf(agentlab.CodeDenied, "the profile of this sandbox does not use the registry cache")

// guestOf returns the guest with that VMID with the policy that it has now.
func (s *Service) guestOf(ctx context.Context, vmid int) (*guest, error) {
	for {
		changes := s.changes.Load()
		sb, err := s.cfg.Sandboxes.Sandbox(ctx, vmid)
		if err == nil && sb.State == agentlab.SandboxDestroyed {
			err = agentlab.Errorf(agentlab.CodeNotFound, "sandbox %d is destroyed", vmid)
		}
		if err != nil {
			return nil, err
		}
		g := s.guest(sb)
		if err := g.update(sb); err != nil {
			return nil, err
		}
		if s.changes.Load() == changes { // otherwise the policy that was read may be the former one
			return g, g.optedOut(sb.Profile)
		}
	}
}

// guest returns the state of a sandbox, which is new if there is none.
func (s *Service) guest(sb agentlab.Sandbox) *guest {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.guests[sb.VMID]
	if g == nil || g.uid != sb.UID {
		if g != nil {
			go g.close()
		}
		g = s.newGuest(sb)
		s.guests[sb.VMID] = g
	}
	return g
}

func (s *Service) newGuest(sb agentlab.Sandbox) *guest {
	g := &guest{s: s, uid: sb.UID, wholes: make(chan struct{}, maxWholes)}
	g.changed, g.change = context.WithCancel(context.Background())
	g.recorder = gate.NewRecorder(func(r agentlab.EgressRecord) {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := s.cfg.Audit.RecordEgress(ctx, sb, r); err != nil {
			s.log.Warn("a request to the registry cache is not in the egress log", "vmid", sb.VMID, "name", r.Name, "allow", r.Allow, "rule", r.Rule, "err", err)
		}
	})
	return g
}

// update compiles the policy of the sandbox if it has changed, and ends what runs
// under the former one.
func (g *guest) update(sb agentlab.Sandbox) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.policy != nil && reflect.DeepEqual(g.network, sb.Network) {
		return nil
	}
	p, err := egress.New(sb.Network)
	if err != nil {
		return err
	}
	if g.policy != nil {
		g.change()
		g.changed, g.change = context.WithCancel(context.Background())
	}
	g.network, g.policy = sb.Network, p
	return nil
}

// optedOut returns an error if the profile does not use the cache.
func (g *guest) optedOut(profile string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if now := time.Now(); now.Sub(g.asked) > profileAge {
		p, err := g.s.cfg.Profiles.Use(profile)
		if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound { // a profile may be removed while its sandboxes run
			return err
		}
		g.optOut, g.asked = p.NoCache, now
	}
	if g.optOut {
		return errOptOut
	}
	return nil
}

// SandboxChanged applies a changed policy to running requests, and forgets a
// sandbox that has been destroyed. It does not wait.
func (s *Service) SandboxChanged(sb agentlab.Sandbox) {
	if s == nil {
		return
	}
	s.changes.Add(1)
	s.mu.Lock()
	g := s.guests[sb.VMID]
	gone := g != nil && (g.uid != sb.UID || sb.State == agentlab.SandboxDestroyed)
	if gone {
		delete(s.guests, sb.VMID)
	}
	s.mu.Unlock()
	switch {
	case gone:
		go g.close()
	case g != nil:
		if err := g.update(sb); err != nil {
			go g.close()
		}
	}
}

// server is a server that a policy allows: a host name or address, and the
// addresses that may be dialled.
type server struct {
	addrs   []netip.AddrPort
	private bool // the policy opens a private destination
}

// scope is the scope of what comes from the server.
func (srv server) scope() string {
	if srv.private {
		return scopePrivate
	}
	return ""
}

// permit returns the server at HOST:PORT if the policy of the guest allows all of
// its addresses, and records the decision. The error is an *egress.DeniedError for
// a denial.
func (g *guest) permit(ctx context.Context, at string) (server, error) {
	g.mu.Lock()
	p := g.policy
	g.mu.Unlock()
	host, portText, err := net.SplitHostPort(at)
	if err != nil {
		return server{}, err
	}
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil {
		return server{}, err
	}
	srv, rule, err := g.decide(ctx, p, host, uint16(port))
	rec := agentlab.EgressRecord{Proto: string(egress.TCP), Name: host, Port: int(port), Rule: rule, Allow: err == nil}
	if len(srv.addrs) > 0 {
		rec.Addr = srv.addrs[0].Addr().String()
	}
	if err != nil && rule == "" { // the name could not be resolved
		rec.Allow, rec.Rule, rec.Error = true, "dns", err.Error()
	}
	g.recorder.Record(rec)
	return srv, err
}

// decide decides as for a guest that resolves the name, connects, and shows the
// name.
func (g *guest) decide(ctx context.Context, p *egress.Policy, host string, port uint16) (srv server, rule string, err error) {
	refuse := func(a netip.Addr, rule string) (server, string, error) {
		return server{}, rule, &egress.DeniedError{Addr: a, Rule: rule}
	}
	var names []string
	var addrs []netip.Addr
	if a, perr := netip.ParseAddr(host); perr == nil {
		addrs = []netip.Addr{a.Unmap()}
	} else {
		name := strings.ToLower(host) + "."
		names = []string{name}
		if v := p.Decide(egress.Flow{Proto: egress.DNS, Names: names}); !v.Allow {
			return refuse(netip.Addr{}, v.Rule)
		}
		if addrs, err = g.s.cfg.Outside.Lookup(ctx, name, p.OpensName(name)); err != nil {
			if denied, ok := asDenied(err); ok {
				rule = denied.Rule
			}
			return server{}, rule, err
		}
	}
	for _, a := range addrs {
		f := egress.Flow{Proto: egress.TCP, Dst: netip.AddrPortFrom(a, port), Names: names}
		v := p.Decide(f)
		if v.Allow && v.NeedName {
			v = p.DecideName(f, host)
		}
		if !v.Allow {
			return refuse(a, v.Rule)
		}
		rule = cmp.Or(rule, v.Rule)
		srv.addrs = append(srv.addrs, f.Dst)
		srv.private = srv.private || strings.HasPrefix(v.Rule, egress.RulePrivatePrefix)
	}
	return srv, rule, nil
}
