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

// epoch is what idle clocks count from: a time that never jumps.
var epoch = time.Now()

// Flow is one TCP connection, UDP pair of addresses or echo request that the
// policy allows, from the decision to its end.
type Flow struct {
	g       *Gate
	flow    egress.Flow
	rule    string
	ctx     context.Context
	cut     context.CancelFunc
	ended   chan struct{}
	end     sync.Once
	last    atomic.Int64   // of the last sign of life, in nanoseconds since epoch
	mu      sync.Mutex     // guards what follows
	mayName bool           // it must show a name before it is dialled
	shown   *string        // what it showed, nil before; in canonical form, "" when there was none
	renew   []string       // of flow.Names: those that must be resolved again
	dst     netip.AddrPort // what is dialled
}

// Begin decides on a flow to dst and, when it is allowed, enters it. The
// caller ends it with End. A refusal is recorded and returned as
// *egress.DeniedError. Begin does not wait for anything.
func (g *Gate) Begin(proto egress.Proto, dst netip.AddrPort) (*Flow, error) {
	valid, _ := g.names.of(dst.Addr().Unmap())
	return g.begin(proto, dst, valid, nil)
}

// BeginTCP is Begin for TCP. It may take a while, because names whose time is
// over are resolved again where the flow depends on them.
func (g *Gate) BeginTCP(ctx context.Context, dst netip.AddrPort) (*Flow, error) {
	valid, stale := g.names.of(dst.Addr().Unmap())
	if len(stale) == 0 || g.Policy().Decide(egress.Flow{Proto: egress.TCP, Dst: dst, Names: valid}).Allow {
		return g.begin(egress.TCP, dst, valid, nil)
	}
	// Judged with all names it might be allowed: then those that are over are
	// looked at again, either when the flow shows one or here.
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
	rule, victim := f.enter()
	if rule != "" {
		g.audit.record(f.record(false, rule, ""))
		return nil, &egress.DeniedError{Addr: dst.Addr(), Rule: rule}
	}
	if victim != nil {
		victim.cut()
		g.audit.record(victim.record(false, egress.RuleLimit, "it gave way to a newer flow"))
	}
	return f, nil
}

// enter decides and enters in one step, so that no change of policy comes in
// between. It returns the rule of a refusal, or the flow that must give way.
func (f *Flow) enter() (rule string, victim *Flow) {
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

// evictIdle is how long a UDP flow is left alone at least, so that a flood
// cannot make us open and close sockets as fast as it comes.
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

// End takes a flow out. It may be called again.
func (f *Flow) End() {
	f.end.Do(func() {
		f.cut()
		f.g.mu.Lock()
		delete(f.g.flows[f.flow.Proto], f)
		f.g.mu.Unlock()
		close(f.ended)
	})
}

// Context ends when the flow has ended or is to be cut: because another
// policy forbids it, it had to give way, or the Gate was closed.
func (f *Flow) Context() context.Context { return f.ctx }

func (f *Flow) idle() time.Duration { return time.Since(epoch) - time.Duration(f.last.Load()) }

// Touch notes a sign of life, so that others give way before this one.
func (f *Flow) Touch() { f.last.Store(int64(time.Since(epoch))) }

// NeedsName tells whether the flow must show a name before it is dialled.
func (f *Flow) NeedsName() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mayName
}

// allowedBy judges an open flow by a policy, with what it was decided on.
func (f *Flow) allowedBy(p *egress.Policy) bool { return f.refusedBy(p) == "" }

// refusedBy is the rule by which a policy refuses an open flow; "" when it is
// allowed.
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
		// One that is not dialled yet shows its name first. An open flow that
		// never showed one cannot do so any more.
		return egress.RuleNameMissing
	}
	return ""
}

// aim notes what is dialled next, and judges that by the policy in force. A
// change of policy that comes later judges it too.
func (f *Flow) aim(to netip.AddrPort) (rule string) {
	f.g.mu.Lock()
	defer f.g.mu.Unlock()
	f.mu.Lock()
	f.dst = to
	f.mu.Unlock()
	return f.refusedBy(f.g.policy)
}

// record makes the record of a decision about the flow.
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

// Dial opens the outside half of a flow that needs to show no name, and
// records the decision with its outcome. The dialer has the last word: an
// address that only it knows to be forbidden turns the decision into a
// denial, returned as *egress.DeniedError.
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
	err := errors.New("the name has no address now")
	for _, to := range targets {
		if rule := f.aim(to); rule != "" {
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
