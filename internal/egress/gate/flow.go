package gate

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// epoch is the reference time of idle times; it has a monotonic clock reading.
var epoch = time.Now()

// Flow is one TCP connection, UDP address pair or echo request that the policy
// allows, from the decision to its end.
type Flow struct {
	g       *Gate
	flow    egress.Flow
	rule    string
	ctx     context.Context
	cut     context.CancelFunc
	ended   chan struct{}
	end     sync.Once
	last    atomic.Int64   // time of the last activity, in nanoseconds since epoch
	mu      sync.Mutex     // guards the following fields
	mayName bool           // it must have a name before it is dialled
	shown   *string        // its name in canonical form, "" if it has none; nil before it was read
	renew   []string       // the names in flow.Names that must be resolved again
	dst     netip.AddrPort // the address that is dialled
}

// Begin decides on a flow to dst and, if it is allowed, registers it. The
// caller ends it with End. A denial is recorded and returned as
// *egress.DeniedError. Begin does not wait.
func (g *Gate) Begin(proto egress.Proto, dst netip.AddrPort) (*Flow, error) {
	valid, _ := g.names.of(dst.Addr().Unmap())
	return g.begin(proto, dst, valid, nil)
}

// BeginTCP is Begin for TCP. It may take time, because expired names are
// resolved again if the flow depends on them.
func (g *Gate) BeginTCP(ctx context.Context, dst netip.AddrPort) (*Flow, error) {
	valid, stale := g.names.of(dst.Addr().Unmap())
	if len(stale) == 0 || g.Policy().Decide(egress.Flow{Proto: egress.TCP, Dst: dst, Names: valid}).Allow {
		return g.begin(egress.TCP, dst, valid, nil)
	}
	// With all names it might be allowed. Then expired names are resolved
	// again, either when the name of the flow is known or here.
	all := append(slices.Clone(valid), stale...)
	v := g.Policy().Decide(egress.Flow{Proto: egress.TCP, Dst: dst, Names: all})
	switch {
	case v.Allow && v.NeedName:
		return g.begin(egress.TCP, dst, all, stale)
	case v.Allow:
		for _, name := range stale[:min(len(stale), 3)] {
			g.resolveAgain(ctx, name, dst.Addr().Is4())
		}
		valid, _ = g.names.of(dst.Addr().Unmap())
	}
	return g.begin(egress.TCP, dst, valid, nil)
}

func (g *Gate) begin(proto egress.Proto, dst netip.AddrPort, names, renew []string) (*Flow, error) {
	host := g.isServer(dst.Addr())
	if host {
		names = []string{egress.HostName + "."}
	}
	f := &Flow{
		g: g, flow: egress.Flow{Proto: proto, Dst: dst, Names: names, Host: host},
		renew: renew, dst: dst, ended: make(chan struct{}),
	}
	f.Touch()
	rule, victim := f.register()
	if rule != "" {
		g.audit.record(f.record(false, rule, ""))
		return nil, &egress.DeniedError{Addr: dst.Addr(), Rule: rule}
	}
	if victim != nil {
		victim.cut()
		g.audit.record(victim.record(false, egress.RuleLimit, "evicted by a newer flow"))
	}
	return f, nil
}

// register decides on a flow and registers it in one step, so that no change of
// policy is possible in between. It returns the rule of a denial, or the flow
// that must be evicted.
func (f *Flow) register() (rule string, victim *Flow) {
	g := f.g
	g.mu.Lock()
	defer g.mu.Unlock()
	v := g.policy.Decide(f.flow)
	table := g.flows[f.flow.Proto]
	switch {
	case !v.Allow:
		return v.Rule, nil
	case f.unsupported() != "":
		return f.unsupported(), nil
	case table == nil || g.closed:
		return egress.RuleProtocol, nil
	case f.flow.Proto == egress.TCP && len(table) >= g.limits.TCPFlows:
		return egress.RuleLimit, nil
	case f.flow.Proto == egress.ICMP && len(table) >= g.limits.Pings:
		return egress.RuleLimit, nil
	case f.flow.Proto == egress.UDP && len(table) >= g.limits.UDPFlows:
		victim = longestIdle(table)
		if victim.idle() < evictIdle {
			return egress.RuleLimit, nil
		}
		delete(table, victim)
	}
	f.rule, f.mayName = v.Rule, v.NeedName
	f.ctx, f.cut = context.WithCancel(g.ctx)
	table[f] = struct{}{}
	return "", victim
}

// evictIdle is the minimum idle time before a UDP flow may be evicted, so that
// a flood cannot make the gate open and close sockets at its rate.
const evictIdle = time.Second

func longestIdle(table map[*Flow]struct{}) *Flow {
	var out *Flow
	for f := range table {
		if out == nil || f.last.Load() < out.last.Load() {
			out = f
		}
	}
	return out
}

// End removes a flow. It may be called more than once.
func (f *Flow) End() {
	f.end.Do(func() {
		f.cut()
		f.g.mu.Lock()
		delete(f.g.flows[f.flow.Proto], f)
		f.g.mu.Unlock()
		close(f.ended)
	})
}

// Context ends when the flow has ended or must be closed: because a new policy
// denies it, because it was evicted, or because the Gate was closed.
func (f *Flow) Context() context.Context { return f.ctx }

func (f *Flow) idle() time.Duration { return time.Since(epoch) - time.Duration(f.last.Load()) }

// Touch records activity, so that other flows are evicted before this one.
func (f *Flow) Touch() { f.last.Store(int64(time.Since(epoch))) }

// NeedsName reports whether the name of the flow must be known before it is
// dialled.
func (f *Flow) NeedsName() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mayName
}

// allowedBy reports whether a policy allows an open flow, with the data of its
// first decision.
func (f *Flow) allowedBy(p *egress.Policy) bool { return f.refusedBy(p) == "" }

// refusedBy returns the rule by which a policy denies an open flow, "" if it
// is allowed.
func (f *Flow) refusedBy(p *egress.Policy) (rule string) {
	f.mu.Lock()
	shown, flow, mayName := f.shown, f.flow, f.mayName
	flow.Dst = f.dst
	f.mu.Unlock()
	v := p.Decide(flow)
	if v.Allow && v.NeedName && shown != nil {
		v = p.DecideName(flow, *shown)
	}
	switch {
	case !v.Allow:
		return v.Rule
	case v.NeedName && shown == nil && !mayName:
		// A flow that is not dialled yet still gets its name. The name of an
		// open flow can no longer be read.
		return egress.RuleNameMissing
	}
	return ""
}

// setTarget sets the address that is dialled next, after a check by the current
// policy. A later change of policy checks it too.
func (f *Flow) setTarget(to netip.AddrPort) (rule string) {
	f.g.mu.Lock()
	defer f.g.mu.Unlock()
	f.mu.Lock()
	f.dst = to
	f.mu.Unlock()
	return f.refusedBy(f.g.policy)
}

// record returns the record of a decision about the flow.
func (f *Flow) record(allow bool, rule, failure string) agentlab.EgressRecord {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := agentlab.EgressRecord{
		Proto: string(f.flow.Proto), Addr: f.dst.Addr().Unmap().String(), Port: int(f.dst.Port()),
		Allow: allow, Rule: rule, Error: failure,
	}
	if !f.dst.Addr().IsValid() {
		r.Addr = ""
	}
	if f.shown != nil && *f.shown != "" {
		r.Name = *f.shown
	} else if len(f.flow.Names) > 0 {
		r.Name = f.flow.Names[0]
	}
	r.Name = strings.TrimSuffix(r.Name, ".")
	return r
}

// Dial opens the outside half of a flow that needs no name, and records the
// decision with its result. If the dialer refuses the address, the decision
// becomes a denial, which is returned as *egress.DeniedError.
func (f *Flow) Dial() (net.Conn, error) {
	if f.NeedsName() {
		return nil, f.deny(egress.RuleNameMissing)
	}
	return f.dial([]netip.AddrPort{f.dst})
}

func (f *Flow) dial(targets []netip.AddrPort) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(f.ctx, f.g.cfg.Limits.DialTimeout)
	defer cancel()
	var conn net.Conn
	err := errors.New("the name has no address")
	for _, to := range targets {
		if rule := f.setTarget(to); rule != "" {
			return nil, f.deny(rule)
		}
		conn, err = f.open(ctx, to)
		if err == nil || ctx.Err() != nil {
			break
		}
	}
	if err == nil && f.ctx.Err() != nil {
		_ = conn.Close()
		err = context.Cause(f.ctx)
	}
	if denied, ok := errors.AsType[*egress.DeniedError](err); ok {
		f.g.audit.record(f.record(false, denied.Rule, ""))
		return nil, err
	}
	if err != nil {
		f.g.audit.record(f.record(true, f.rule, err.Error()))
		return nil, err
	}
	f.g.audit.record(f.record(true, f.rule, ""))
	return conn, nil
}

// deny records a refusal and returns it as an error.
func (f *Flow) deny(rule string) error {
	f.g.audit.record(f.record(false, rule, ""))
	return &egress.DeniedError{Addr: f.flow.Dst.Addr(), Rule: rule}
}
