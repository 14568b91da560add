package egress

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// HostName is the name by which a guest reaches a port of the host itself that
// the operator allows. It resolves to the controller's address.
const HostName = "host.agentlab.internal"

const hostZone = ".agentlab.internal"

// RulePrivatePrefix is the prefix of the names of rules that allow a private
// destination of the operator; its host and port follow.
const RulePrivatePrefix = "private:"

// Limits on the private destinations of one policy.
const (
	MaxPrivate     = 64
	MaxReasonBytes = 200
)

const privateHint = "write {host: gateway.corp, port: 443, reason: our model gateway}; host is a full name, a private address, or " + HostName + " for the host itself"

// Private is one private destination that a policy allows: TCP to exactly one
// port of a name, of an address, or of the host itself.
type Private struct {
	Rule   string // as in verdicts: "private:gateway.corp:443"
	Name   string // canonical, with a final dot; "" for an address
	Addr   netip.Addr
	Host   bool // the host itself; then Name is HostName
	Port   uint16
	Reason string
	Source string // "" for the profile itself, else "config.yaml"
}

// Openable reports whether the operator may allow an address: RFC 1918,
// 100.64.0.0/10 and IPv6 unique local addresses, except those of metadata
// services and those that contain another address.
func Openable(a netip.Addr) bool {
	rule, denied := alwaysDenied(a)
	switch rule {
	case RulePrivate, RuleCGNAT, RuleULA, RuleTailnet:
		return denied && len(Embedded(a)) == 0
	}
	return false
}

// ParsePrivates checks a list of private destinations. The error is
// agentlab.CodeInvalid; its field names the entry, as network.private[2].port.
func ParsePrivates(list []agentlab.PrivateTarget) ([]Private, error) {
	const key = "network.private"
	if len(list) > MaxPrivate {
		return nil, invalid(key, "%d private destinations exceed the limit of %d", len(list), MaxPrivate)
	}
	var out []Private
	for i, t := range list {
		entry := fmt.Sprintf("%s[%d]", key, i)
		one, err := ParsePrivate(t)
		if e, ok := errors.AsType[*agentlab.Error](err); ok {
			return nil, e.WithField(entry + "." + e.Field)
		}
		if slices.ContainsFunc(out, func(o Private) bool { return o.Rule == one.Rule }) {
			return nil, invalid(entry, "%s is listed twice", strings.TrimPrefix(one.Rule, RulePrivatePrefix)).WithHint("remove one")
		}
		out = append(out, one)
	}
	return out, nil
}

// ParsePrivate checks one private destination. The error is
// agentlab.CodeInvalid with the field host, port or reason.
func ParsePrivate(t agentlab.PrivateTarget) (Private, error) {
	bad := func(key, format string, args ...any) (Private, error) {
		what := t.Host
		if t.Port != 0 {
			what += ":" + strconv.Itoa(t.Port)
		}
		return Private{}, invalid(key, "%s is not a private destination: %s", quote(what), fmt.Sprintf(format, args...)).WithHint("%s", privateHint)
	}
	switch {
	case t.Host == "":
		return bad("host", "host is missing")
	case t.Port == 0:
		return bad("port", "port is missing")
	case t.Port < 1 || t.Port > 65535:
		return bad("port", "the port is not between 1 and 65535")
	case t.Port == DNSPort:
		return bad("port", "port 53 is reserved for AgentLab's DNS server")
	case strings.TrimSpace(t.Reason) == "":
		return bad("reason", "reason is missing")
	case len(t.Reason) > MaxReasonBytes || strings.ContainsFunc(t.Reason, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return bad("reason", "the reason is not one line of at most %d bytes", MaxReasonBytes)
	case strings.ContainsAny(t.Host, "*"):
		return bad("host", "wildcards are not supported; name one host")
	case strings.Contains(t.Host, "/"):
		return bad("host", "ranges and URLs are not supported; name one host")
	}
	p := Private{Port: uint16(t.Port), Reason: strings.TrimSpace(t.Reason), Source: t.Source}
	if strings.Contains(t.Host, ":") || isIPv4Like(t.Host) {
		a, err := netip.ParseAddr(t.Host)
		if err != nil || a.Zone() != "" {
			return bad("host", "%s is not an IP address", quote(t.Host))
		}
		if why := notOpenable(a.Unmap()); why != "" {
			return bad("host", "%s", why)
		}
		p.Addr = a.Unmap()
		p.Rule = RulePrivatePrefix + netip.AddrPortFrom(p.Addr, p.Port).String()
		return p, nil
	}
	name, err := domainName(t.Host)
	switch {
	case err != nil:
		return bad("host", "%s", err)
	case name == "localhost" || strings.HasSuffix(name, ".localhost"):
		return bad("host", "the host itself is named %s", HostName)
	case !strings.Contains(name, "."):
		return bad("host", "%s is not a full host name, such as gateway.corp", quote(t.Host))
	case name != HostName && strings.HasSuffix("."+name, hostZone):
		return bad("host", "names under agentlab.internal are AgentLab's own; the host itself is %s", HostName)
	}
	p.Name, p.Host = name+".", name == HostName
	p.Rule = RulePrivatePrefix + name + ":" + strconv.Itoa(t.Port)
	return p, nil
}

// notOpenable returns why the operator may not allow an address, "" if it may
// be allowed.
func notOpenable(a netip.Addr) string {
	if Openable(a) {
		return ""
	}
	rule, denied := alwaysDenied(a)
	switch {
	case !denied:
		return "the address is public: use allow"
	case rule == RuleLoopback || rule == RuleUnspecified:
		return "a port of the host itself is opened by the name " + HostName
	case rule == RuleMetadata:
		return "metadata services are never opened"
	}
	return "such addresses are never opened (" + rule + ")"
}

// compilePrivate adds a policy's private destinations.
func (p *Policy) compilePrivate(list []agentlab.PrivateTarget) error {
	if len(list) > 0 && p.network.Mode == agentlab.NetworkOff {
		return invalid("network.private", "private destinations have no effect in mode off").WithHint("use mode: allowlist without an allow list")
	}
	all, err := ParsePrivates(list)
	for _, one := range all {
		if !Dropped(one.Rule) {
			p.private = append(p.private, one)
		}
	}
	return err
}

// Private returns the private destinations that the policy allows, including
// those that a layer denies.
func (p *Policy) Private() []Private { return slices.Clone(p.private) }

// OpensName reports whether a canonical name is that of a private destination,
// so that DNS answers may have its private addresses.
func (p *Policy) OpensName(name string) bool {
	return slices.ContainsFunc(p.private, func(t Private) bool { return t.Name == name })
}

// opens returns the private destination of a flow, or nil. An address that a
// name resolves to counts only if it may be allowed.
func (p *Policy) opens(f Flow) *Private {
	for i := range p.private {
		t := &p.private[i]
		if f.Proto == DNS {
			if t.Name != "" && slices.Equal(f.Names, []string{t.Name}) {
				return t
			}
			continue
		}
		a := f.Dst.Addr()
		switch {
		case f.Proto != TCP || f.Dst.Port() != t.Port || f.Host != t.Host:
		case f.Host, t.Addr.IsValid() && a.Unmap() == t.Addr:
			return t
		case t.Name != "" && slices.Contains(f.Names, t.Name) && (!a.IsValid() || Openable(a)):
			return t
		}
	}
	return nil
}

// decidePrivate decides on a flow to a private destination: deny rules win, and
// each layer must allow it too.
func (p *Policy) decidePrivate(t *Private, f Flow) Verdict {
	if r := p.denies(f); r != nil {
		return Verdict{Rule: r.Name}
	}
	for _, l := range p.layers {
		if rule := RuleLayerPrefix + l.narrows(t, f); rule != RuleLayerPrefix && !Dropped(rule) {
			return Verdict{Rule: rule}
		}
	}
	web := t.Port == portHTTP || t.Port == portHTTPS
	return Verdict{Allow: true, NeedName: f.Proto == TCP && web && t.Name != "" && !t.Host, Rule: t.Rule}
}

// narrows returns the rule by which a layer denies a private destination, "" if
// it does not. An allow list permits it by a rule for it, or by its own list of
// private destinations.
func (p *Policy) narrows(t *Private, f Flow) (rule string) {
	if r := p.denies(f); r != nil {
		return r.Name
	}
	tcp := Flow{Proto: TCP, Dst: netip.AddrPortFrom(f.Dst.Addr(), t.Port)}
	same := func(o Private) bool { return o.Rule == t.Rule || f.Proto == DNS && o.Name == t.Name }
	switch p.network.Mode {
	case agentlab.NetworkNAT:
		if len(p.ports) > 0 && f.Proto != DNS && !slices.ContainsFunc(p.ports, func(s PortSpec) bool { return s.covers(tcp) }) {
			return RulePorts
		}
		return ""
	case agentlab.NetworkAllowlist:
		named := func(r *Rule) bool { return f.Proto == DNS || r.covers(TCP, t.Port) }
		if slices.ContainsFunc(p.private, same) || t.Name != "" && p.first(&p.allow, []string{t.Name}, named) != nil {
			return ""
		}
		return RuleAllowlist
	}
	return RuleOff
}

// namePrivate decides a flow to a private destination by the name that the
// flow shows, "" if it shows none. Other names at the same address are denied.
func (p *Policy) namePrivate(t *Private, f Flow, shown string) Verdict {
	v := p.decidePrivate(t, f)
	switch {
	case !v.Allow || !v.NeedName:
		return v
	case shown == "":
		return deny(RuleNameMissing)
	case canonical(shown) != t.Name:
		return deny(RuleNameMismatch)
	}
	v.NeedName = false
	return v
}

// means returns the meaning of a private destination's rule.
func (t *Private) means() string {
	what := "private destination"
	if t.Host {
		what = "port of the host"
	}
	return fmt.Sprintf("the operator opened this %s in %s: %s", what, cmp.Or(t.Source, "the profile"), t.Reason)
}

// byRule returns the private destination with that rule, or nil.
func (p *Policy) byRule(rule string) *Private {
	i := slices.IndexFunc(p.private, func(t Private) bool { return t.Rule == rule })
	if i < 0 {
		return nil
	}
	return &p.private[i]
}
