package egress

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/agentlab-vm/agentlab"
)

// Limits on the size of one policy, including its layers.
const (
	MaxRules  = 100_000
	MaxPorts  = 256
	MaxLayers = 8
)

// Policy is the compiled network policy of one sandbox. It is immutable and
// safe for concurrent use.
type Policy struct {
	network agentlab.Network // its source
	ports   []PortSpec
	rules   []Rule // deny rules, then allow rules, each as in Rules

	deny, allow ruleTable
	// The ports on which a deny rule for a name checks the names of TCP flows.
	denyHTTP, denyHTTPS bool
	layers              []*Policy
	private             []Private // of the operator
}

// defaultPorts are the ports of allow rules without a port, in a policy
// without ports.
var defaultPorts = []PortSpec{{TCP, PortRange{portHTTP, portHTTP}}, {TCP, PortRange{portHTTPS, portHTTPS}}, {TCP, PortRange{portSSH, portSSH}}}

// New compiles a network policy. The error is agentlab.CodeInvalid and names
// the field.
func New(n agentlab.Network) (*Policy, error) {
	readDropped()
	p, err := compilePolicy(n)
	if err != nil {
		return nil, err
	}
	layers, err := compileLayers(n.Layers)
	if err != nil {
		return nil, err
	}
	p.layers = layers
	count := len(n.Allow) + len(n.Deny)
	for _, l := range layers {
		count += len(l.network.Allow) + len(l.network.Deny)
	}
	switch {
	case len(layers) > MaxLayers:
		return nil, invalid("network", "%d layers exceed the limit of %d", len(layers), MaxLayers)
	case count > MaxRules:
		return nil, invalid("network.allow", "%d rules exceed the limit of %d", count, MaxRules).WithHint("use ranges and wildcards")
	}
	return p, nil
}

// compileLayers returns a flat list of layers and their own layers.
func compileLayers(list []agentlab.Network) ([]*Policy, error) {
	var out []*Policy
	for _, n := range list {
		l, err := compilePolicy(n)
		if err != nil {
			return nil, err
		}
		inner, err := compileLayers(n.Layers)
		if err != nil {
			return nil, err
		}
		out = append(append(out, l), inner...)
		if len(out) > MaxLayers {
			return out, nil
		}
	}
	return out, nil
}

func invalid(field, format string, args ...any) *agentlab.Error {
	return agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField(field)
}

func compilePolicy(n agentlab.Network) (*Policy, error) {
	p := &Policy{network: n, deny: newRuleTable(), allow: newRuleTable()}
	if err := checkShape(n); err != nil {
		return nil, err
	}
	for _, text := range n.Ports {
		spec, err := ParsePort(text)
		if err != nil {
			return nil, err
		}
		p.ports = append(p.ports, spec)
	}
	always := Denials()
	for _, nr := range n.Deny {
		r, err := compileRule(nr, false, always)
		if err != nil {
			return nil, err
		}
		if r.Domain != "" && !Dropped(r.Name) {
			p.denyHTTP = p.denyHTTP || r.covers(TCP, portHTTP)
			p.denyHTTPS = p.denyHTTPS || r.covers(TCP, portHTTPS)
		}
		p.addRule(r)
	}
	if err := p.compilePrivate(n.Private); err != nil {
		return nil, err
	}
	for _, nr := range n.Allow {
		r, err := compileRule(nr, true, always)
		if err != nil {
			return nil, err
		}
		p.addAllow(r)
	}
	return p, nil
}

// checkShape rejects settings that the mode would ignore.
func checkShape(n agentlab.Network) error {
	modes := []string{agentlab.NetworkNAT, agentlab.NetworkAllowlist, agentlab.NetworkOff}
	switch {
	case !slices.Contains(modes, n.Mode):
		return invalid("network.mode", "unknown network mode %s", quote(n.Mode)).
			WithHint("use %q (the public internet), %q (only targets in the allow list) or %q (only the controller)", modes[0], modes[1], modes[2])
	case n.Mode != agentlab.NetworkAllowlist && len(n.Allow) > 0:
		return invalid("network.allow", "an allow list has no effect in mode %s", n.Mode).WithHint("use mode: allowlist, or remove the list")
	case n.Mode == agentlab.NetworkOff && (len(n.Deny) > 0 || len(n.Ports) > 0):
		return invalid("network.mode", "deny lists and ports have no effect in mode off").WithHint("remove them")
	case len(n.Ports) > MaxPorts:
		return invalid("network.ports", "%d ports exceed the limit of %d", len(n.Ports), MaxPorts).WithHint("use ranges")
	case len(n.Allow)+len(n.Deny) > MaxRules:
		return invalid("network.allow", "%d rules exceed the limit of %d", len(n.Allow)+len(n.Deny), MaxRules).WithHint("use ranges and wildcards")
	case len(n.Layers) > MaxLayers:
		return invalid("network", "%d layers exceed the limit of %d", len(n.Layers), MaxLayers)
	}
	return CheckLimits(n.Limits)
}

// The maximum limits that a policy may set.
const (
	MaxBandwidthMbps = 100_000
	MaxFlows         = 65_536
	MaxDNSPerSecond  = 10_000
)

// CheckLimits checks the ranges of a policy's limits.
func CheckLimits(l agentlab.NetworkLimits) error {
	for _, v := range []struct {
		key      string
		val, top int
	}{{"bandwidth_mbps", l.BandwidthMbps, MaxBandwidthMbps}, {"flows", l.Flows, MaxFlows}, {"dns_per_second", l.DNSPerSecond, MaxDNSPerSecond}} {
		if v.val < 0 || v.val > v.top {
			return invalid("network.limits."+v.key, "%d is not between 0 and %d", v.val, v.top)
		}
	}
	return nil
}

func compileRule(nr agentlab.NetworkRule, allow bool, always []Denial) (Rule, error) {
	field, prefix := "network.deny", RuleDenyPrefix
	if allow {
		field, prefix = "network.allow", RuleAllowPrefix
	}
	r, err := ParseRule(nr.Rule, allow)
	if err != nil {
		if nr.Source != "" {
			return Rule{}, invalid(field, "%s: %w", nr.Source, err).WithHint("%s", ruleHint)
		}
		return Rule{}, invalid(field, "%w", err).WithHint("%s", ruleHint)
	}
	r.Source, r.Name = nr.Source, prefix+r.String()
	if rule, inside := whollyDenied(r.Prefix, always); allow && inside {
		return Rule{}, invalid(field, "%s can never be allowed (%s)", r, rule).
			WithHint("sandboxes reach public addresses only; to open one port of a private address, use network.private in the profile")
	}
	return r, nil
}

// whollyDenied reports whether every address of a range is always denied.
func whollyDenied(p netip.Prefix, always []Denial) (rule string, yes bool) {
	if !p.IsValid() {
		return "", false
	}
	for _, d := range always {
		if d.Prefix.Bits() <= p.Bits() && d.Prefix.Contains(p.Addr()) {
			return d.Rule, true
		}
	}
	return "", false
}

func (p *Policy) addRule(r Rule) {
	if Dropped(r.Name) {
		return
	}
	t := &p.deny
	if r.Allow {
		t = &p.allow
	}
	p.rules = append(p.rules, r)
	t.add(&r, len(p.rules)-1)
}

// addAllow adds an allow rule. A rule without a port gets the ports of the
// policy, as one rule per protocol.
func (p *Policy) addAllow(r Rule) {
	if r.Explicit {
		p.addRule(r)
		return
	}
	specs := p.ports
	if len(specs) == 0 {
		specs = defaultPorts
	}
	for _, proto := range []Proto{TCP, UDP, ICMP} {
		one := r
		one.Proto, one.Ports = proto, nil
		found := false
		for _, s := range specs {
			if s.Proto != proto {
				continue
			}
			found = true
			if proto != ICMP {
				one.Ports = append(one.Ports, s.Range)
			}
		}
		if found {
			p.addRule(one)
		}
	}
}

// Mode returns the mode of the policy.
func (p *Policy) Mode() string { return p.network.Mode }

// Network returns the source of the policy, with its layers.
func (p *Policy) Network() agentlab.Network { return p.network }

// Limits returns the strictest limits of the policy and its layers; 0 means
// the enforcer's default.
func (p *Policy) Limits() agentlab.NetworkLimits {
	out := p.network.Limits
	least := func(a *int, b int) {
		if b > 0 && (*a == 0 || b < *a) {
			*a = b
		}
	}
	for _, l := range p.layers {
		least(&out.BandwidthMbps, l.network.Limits.BandwidthMbps)
		least(&out.Flows, l.network.Limits.Flows)
		least(&out.DNSPerSecond, l.network.Limits.DNSPerSecond)
	}
	return out
}

// Rules returns the policy's own rules, without those of its layers: deny
// rules first, in the order of the source, with the effective protocol and
// ports. A source rule without a port becomes one Rule for each protocol of
// the policy's ports.
func (p *Policy) Rules() []Rule { return slices.Clone(p.rules) }

// Ports returns the policy's own ports: in mode nat the only allowed ones
// (empty means all).
func (p *Policy) Ports() []PortSpec { return slices.Clone(p.ports) }

// Layers returns the further policies, each of which must allow a flow too.
func (p *Policy) Layers() []*Policy { return slices.Clone(p.layers) }

// all returns the policy and its layers.
func (p *Policy) all() []*Policy { return append([]*Policy{p}, p.layers...) }

// String returns the policy's mode and size.
func (p *Policy) String() string {
	return fmt.Sprintf("%s, %d rules, %d layers", p.network.Mode, len(p.rules), len(p.layers))
}
