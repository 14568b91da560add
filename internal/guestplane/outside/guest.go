package outside

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/netip"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

// Guest is a sandbox with the policy that it has. If the policy changes or the sandbox
// is destroyed, the guest has ended, and another one takes its place.
type Guest struct {
	agentlab.Sandbox
	o        *Outside
	policy   *egress.Policy
	recorder *gate.Recorder
	ended    context.Context
	end      context.CancelCauseFunc
}

var errEnded = agentlab.Errorf(agentlab.CodeConflict, "the network policy has changed")

// is reports whether a row has the sandbox, the profile and the policy of the guest.
func (g *Guest) is(sb agentlab.Sandbox) bool {
	return g.UID == sb.UID && g.Profile == sb.Profile && sb.State != agentlab.SandboxDestroyed && reflect.DeepEqual(g.Network, sb.Network)
}

func (g *Guest) close() {
	g.end(errEnded)
	g.recorder.Close()
}

// Guest returns the guest with a VMID.
func (o *Outside) Guest(ctx context.Context, vmid int) (*Guest, error) {
	for {
		changes := o.changes.Load()
		sb, err := o.cfg.Sandboxes.Sandbox(ctx, vmid)
		if err == nil && sb.State == agentlab.SandboxDestroyed {
			err = agentlab.Errorf(agentlab.CodeNotFound, "sandbox %d is destroyed", vmid)
		}
		if err != nil {
			return nil, err
		}
		if g, err := o.guest(sb, changes); g != nil || err != nil {
			return g, err
		}
	}
}

// guest returns the guest of a row, nil if the row may be an old one: there were changes
// since it was read.
func (o *Outside) guest(sb agentlab.Sandbox, changes int64) (*Guest, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	g := o.guests[sb.VMID]
	switch {
	case o.changes.Load() != changes:
		return nil, nil
	case g != nil && g.is(sb):
		return g, nil
	case g != nil:
		go g.close()
	}
	p, err := egress.New(sb.Network)
	if err != nil {
		return nil, err
	}
	g = &Guest{Sandbox: sb, o: o, policy: p}
	g.ended, g.end = context.WithCancelCause(context.Background())
	g.recorder = gate.NewRecorder(func(r agentlab.EgressRecord) {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := o.cfg.Audit.RecordEgress(ctx, sb, r); err != nil {
			o.cfg.Logger.Warn("a decision is not in the egress log", "vmid", sb.VMID, "name", r.Name, "allow", r.Allow, "rule", r.Rule, "err", err)
		}
	})
	o.guests[sb.VMID] = g
	return g, nil
}

// SandboxChanged ends the guest whose policy has changed or whose sandbox has been
// destroyed. It does not wait.
func (o *Outside) SandboxChanged(sb agentlab.Sandbox) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.changes.Add(1)
	if g := o.guests[sb.VMID]; g != nil && !g.is(sb) {
		delete(o.guests, sb.VMID)
		go g.close()
	}
}

// Context returns a context that ends with the guest, too.
func (g *Guest) Context(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(g.ended, func() { cancel(errEnded) })
	return ctx, func() { stop(); cancel(nil) }
}

// Permit returns the server at HOST:PORT if the policy of the guest allows all of
// its addresses, and records the decision. The error is an *egress.DeniedError for
// a denial.
func (g *Guest) Permit(ctx context.Context, at string) (Server, error) {
	if g.ended.Err() != nil {
		return Server{}, errEnded
	}
	host, portText, err := net.SplitHostPort(at)
	if err != nil {
		return Server{}, err
	}
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil {
		return Server{}, err
	}
	srv, rule, err := g.decide(ctx, host, uint16(port))
	rec := agentlab.EgressRecord{Proto: string(egress.TCP), Name: host, Port: int(port), Rule: rule, Allow: err == nil}
	if len(srv.addrs) > 0 {
		rec.Addr = srv.addrs[0].Addr().String()
	}
	if err != nil && rule == "" { // the name could not be resolved
		rec.Allow, rec.Rule, rec.Error = true, "dns", err.Error()
	}
	g.recorder.Record(rec)
	if err != nil {
		return Server{}, err
	}
	srv.at, srv.o = at, g.o
	return srv, nil
}

// decide decides as for a guest that resolves the name, connects, and shows the
// name.
func (g *Guest) decide(ctx context.Context, host string, port uint16) (srv Server, rule string, err error) {
	refuse := func(a netip.Addr, rule string) (Server, string, error) {
		return Server{}, rule, &egress.DeniedError{Addr: a, Rule: rule}
	}
	var names []string
	var addrs []netip.Addr
	if a, perr := netip.ParseAddr(host); perr == nil {
		addrs = []netip.Addr{a.Unmap()}
	} else {
		name := strings.ToLower(host) + "."
		names = []string{name}
		if v := g.policy.Decide(egress.Flow{Proto: egress.DNS, Names: names}); !v.Allow {
			return refuse(netip.Addr{}, v.Rule)
		}
		if addrs, err = g.o.cfg.Network.Lookup(ctx, name, g.policy.OpensName(name)); err != nil {
			if denied, ok := errors.AsType[*egress.DeniedError](err); ok {
				rule = denied.Rule
			}
			return Server{}, rule, err
		}
	}
	for _, a := range addrs {
		f := egress.Flow{Proto: egress.TCP, Dst: netip.AddrPortFrom(a, port), Names: names}
		v := g.policy.Decide(f)
		if v.Allow && v.NeedName {
			v = g.policy.DecideName(f, host)
		}
		if !v.Allow {
			return refuse(a, v.Rule)
		}
		rule = cmp.Or(rule, v.Rule)
		srv.addrs = append(srv.addrs, f.Dst)
		srv.Private = srv.Private || strings.HasPrefix(v.Rule, egress.RulePrivatePrefix)
	}
	return srv, rule, nil
}
