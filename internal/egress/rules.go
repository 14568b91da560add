package egress

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// PortRange is a range of ports that includes both ends.
type PortRange struct{ Lo, Hi uint16 }

// Contains reports whether port is in the range.
func (r PortRange) Contains(port uint16) bool { return r.Lo <= port && port <= r.Hi }

// String returns "443" or "8000-8010".
func (r PortRange) String() string {
	if r.Lo == r.Hi {
		return strconv.Itoa(int(r.Lo))
	}
	return fmt.Sprintf("%d-%d", r.Lo, r.Hi)
}

// PortSpec is one entry of a policy's ports: a protocol with a range of ports.
// The range is zero for ICMP.
type PortSpec struct {
	Proto Proto
	Range PortRange
}

// String returns the format of ParsePort: "443", "443/udp", "icmp".
func (s PortSpec) String() string {
	switch s.Proto {
	case ICMP:
		return string(ICMP)
	case UDP:
		return s.Range.String() + "/udp"
	}
	return s.Range.String()
}

// Rule is one allow or deny rule, parsed. It matches a name (Domain), the
// names below one (Domain and Wildcard), or addresses (Prefix).
type Rule struct {
	Name     string       // as in verdicts: "allow:github.com", "deny:1.2.3.0/24"; "" before it is part of a Policy
	Allow    bool         // otherwise it denies
	Domain   string       // lower case, without a final dot; "" in a rule about addresses
	Wildcard bool         // matches the names below Domain, but not Domain itself
	Prefix   netip.Prefix // masked; zero in a rule for names
	Proto    Proto        // TCP, UDP or ICMP; "" means all of them, in a deny rule without a port
	Ports    []PortRange  // of TCP and UDP; empty means all
	Explicit bool         // the rule itself has protocol and port, not only the policy
	Source   string       // "" for the profile itself, else "preset:NAME" or "file:NAME"
}

// The ports where a host name can be read from a flow's first bytes, and one
// where it never can.
const (
	portHTTP  = 80
	portHTTPS = 443
	portSSH   = 22
)

// NeedsName reports whether a TCP flow to that port that this rule allows must
// have a host name. That is the case for rules for names, on 80 and 443 and on
// every port that the rule itself does not have, but not on 22, where no name
// can be read.
func (r Rule) NeedsName(port uint16) bool {
	if r.Domain == "" || r.Proto != TCP || port == portSSH {
		return false
	}
	return !r.Explicit || port == portHTTP || port == portHTTPS
}

// covers reports whether the rule applies to a flow of that protocol and port.
func (r *Rule) covers(proto Proto, port uint16) bool {
	if r.Proto == "" {
		return true
	}
	if r.Proto != proto {
		return false
	}
	if len(r.Ports) == 0 || proto == ICMP {
		return true
	}
	for _, p := range r.Ports {
		if p.Contains(port) {
			return true
		}
	}
	return false
}

// String returns the rule's canonical text, which ParseRule parses to the same
// rule. It does not include ports of the policy.
func (r Rule) String() string {
	target := r.Domain
	if r.Wildcard {
		target = "*." + target
	}
	if target == "" {
		target = r.Prefix.String()
		if r.Prefix.IsSingleIP() {
			target = r.Prefix.Addr().String()
		}
	}
	if !r.Explicit {
		return target
	}
	if r.Proto == ICMP {
		return target + "/icmp"
	}
	if r.Domain == "" && r.Prefix.Addr().Is6() {
		target = "[" + target + "]"
	}
	target += ":" + r.Ports[0].String()
	if r.Proto == UDP {
		target += "/udp"
	}
	return target
}

// MaxRuleBytes is the maximum length of a rule's text.
const MaxRuleBytes = 300

const ruleHint = `write github.com, *.github.com, github.com:443, github.com:22/tcp, host:8000-8010, 140.82.112.0/20, 1.2.3.4:443, [2606:4700::/32]:443/udp or 1.2.3.4/icmp`

func badRule(text string, why error) error {
	return agentlab.Errorf(agentlab.CodeInvalid, "%s is not a network rule: %s", quote(text), why.Error()).WithHint("%s", ruleHint)
}

// quote returns untrusted text on one line with a limited length.
func quote(s string) string {
	const most = 80
	if len(s) > most {
		s = s[:most] + "…"
	}
	return strconv.QuoteToASCII(s)
}

// ParseRule parses one rule, an allow rule if allow is set. The error is
// agentlab.CodeInvalid.
func ParseRule(text string, allow bool) (Rule, error) {
	r, err := parseRule(text)
	if err != nil {
		return Rule{}, badRule(text, err)
	}
	r.Allow = allow
	return r, nil
}

// parseRule is ParseRule with errors that have only the cause.
func parseRule(text string) (Rule, error) {
	if text == "" || len(text) > MaxRuleBytes {
		return Rule{}, fmt.Errorf("it has %d bytes; 1 to %d are allowed", len(text), MaxRuleBytes)
	}
	if err := listEntry(text); err != nil {
		return Rule{}, err
	}
	if strings.Contains(text, "://") {
		return Rule{}, fmt.Errorf("it is a URL; use its host only")
	}
	var r Rule
	host, proto := cutProto(text)
	host, ports, err := cutPorts(host)
	if err != nil {
		return Rule{}, err
	}
	switch {
	case ports != "" && proto == ICMP:
		return Rule{}, fmt.Errorf("ICMP has no ports")
	case ports != "":
		rng, err := parseRange(ports)
		if err != nil {
			return Rule{}, err
		}
		r.Explicit, r.Ports, r.Proto = true, []PortRange{rng}, TCP
		if proto != "" {
			r.Proto = proto
		}
	case proto == ICMP:
		r.Explicit, r.Proto = true, ICMP
	case proto != "":
		return Rule{}, fmt.Errorf("a protocol needs a port, such as :443/%s", proto)
	}
	if err := r.setTarget(host); err != nil {
		return Rule{}, err
	}
	return r, nil
}

// listEntry rejects entries that are valid only in a profile.
func listEntry(text string) error {
	if !strings.HasPrefix(text, PresetPrefix) && !strings.HasPrefix(text, FilePrefix) {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeInvalid, "%s is not a network rule: only the lists of a profile may name presets and files, not a repository's .agentlab.yaml or a list file", quote(text)).
		WithHint("name the hosts themselves ('agentlab policy presets' shows the content of a preset), or put it into the profile")
}

// cutProto removes "/tcp", "/udp" or "/icmp" from the end.
func cutProto(s string) (rest string, p Proto) {
	for _, p := range []Proto{TCP, UDP, ICMP} {
		if rest, ok := strings.CutSuffix(s, "/"+string(p)); ok {
			return rest, p
		}
	}
	return s, ""
}

// cutPorts removes ":PORTS" from the end. An IPv6 address with ports must be
// in brackets.
func cutPorts(s string) (host, ports string, err error) {
	if inner, ok := strings.CutPrefix(s, "["); ok {
		v6, rest, closed := strings.Cut(inner, "]")
		port, colon := strings.CutPrefix(rest, ":")
		if !closed || rest != "" && !colon || colon && port == "" || !strings.Contains(v6, ":") {
			return "", "", fmt.Errorf("use brackets around an IPv6 address or range, followed by a port")
		}
		return v6, port, nil
	}
	if strings.Count(s, ":") > 1 {
		return s, "", nil // IPv6, or nothing
	}
	host, ports, ok := strings.Cut(s, ":")
	if ok && ports == "" {
		return "", "", fmt.Errorf("the port after the colon is missing")
	}
	return host, ports, nil
}

func parseRange(s string) (PortRange, error) {
	lo, hi, ranged := strings.Cut(s, "-")
	if !ranged {
		hi = lo
	}
	l, okl := parsePort(lo)
	h, okh := parsePort(hi)
	if !okl || !okh || l > h {
		return PortRange{}, fmt.Errorf("%s is not a port or range of ports between 1 and 65535", quote(s))
	}
	return PortRange{l, h}, nil
}

// parsePort reads decimal digits only; strconv alone would accept a sign.
func parsePort(s string) (uint16, bool) {
	if s == "" || len(s) > 5 || s[0] == '0' || strings.Trim(s, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err == nil
}

func (r *Rule) setTarget(host string) error {
	if strings.ContainsAny(host, "/:") || isIPv4Like(host) {
		return r.setPrefix(host)
	}
	if host == "*" {
		return fmt.Errorf("to allow everything, use mode nat")
	}
	rest, wildcard := strings.CutPrefix(host, "*.")
	name, err := domainName(rest)
	r.Domain, r.Wildcard = name, wildcard
	if err == nil && !wildcard && !strings.Contains(name, ".") {
		err = fmt.Errorf("%s is not a full host name, such as example.com", quote(host))
	}
	return err
}

// isIPv4Like reports whether a text is intended as an address: the last label
// of a name never begins with a digit.
func isIPv4Like(host string) bool {
	last := host[strings.LastIndexByte(host, '.')+1:]
	return last != "" && last[0] >= '0' && last[0] <= '9'
}

func (r *Rule) setPrefix(host string) error {
	p, err := netip.ParsePrefix(host)
	if !strings.Contains(host, "/") {
		var a netip.Addr
		a, err = netip.ParseAddr(host)
		if err == nil && a.Zone() != "" {
			return fmt.Errorf("an address with a zone is link-local, which is always denied")
		}
		if err == nil {
			a = a.Unmap()
			p = netip.PrefixFrom(a, a.BitLen())
		}
	}
	switch {
	case err != nil:
		return fmt.Errorf("%s is not an IP address, a range or a name", quote(host))
	case p.Addr().Is4In6():
		return fmt.Errorf("write a range of IPv4 as IPv4")
	case p != p.Masked():
		return fmt.Errorf("the range begins at %s", p.Masked())
	}
	r.Prefix = p
	return nil
}

// domainName checks a name and converts it to lower case without a final dot.
func domainName(s string) (string, error) {
	name := strings.ToLower(strings.TrimSuffix(s, "."))
	if name == "" || len(name) > 253 {
		return "", fmt.Errorf("%s is not a host name", quote(s))
	}
	labels := strings.Split(name, ".")
	for _, l := range labels {
		if l == "" || len(l) > 63 || l[0] == '-' || l[len(l)-1] == '-' || strings.Trim(l, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return "", fmt.Errorf("%s is not a host name (labels of a-z, 0-9, - and _ with dots between; other letters as xn--…; * only as *. at the start)", quote(s))
		}
	}
	if last := labels[len(labels)-1]; last[0] < 'a' {
		return "", fmt.Errorf("%s is not a host name: its last label does not start with a letter", quote(s))
	}
	return name, nil
}

// ParsePort reads one entry of a policy's ports: "443" (TCP), "443/udp",
// "8000-8010/tcp" or "icmp". The error is agentlab.CodeInvalid.
func ParsePort(text string) (PortSpec, error) {
	if text == string(ICMP) {
		return PortSpec{Proto: ICMP}, nil
	}
	s, proto := cutProto(text)
	rng, err := parseRange(s)
	if err != nil || proto == ICMP {
		return PortSpec{}, agentlab.Errorf(agentlab.CodeInvalid, "%s is not a port", quote(text)).
			WithField("network.ports").WithHint("write 443, 443/udp, 8000-8010/tcp or icmp")
	}
	if proto == "" {
		proto = TCP
	}
	return PortSpec{proto, rng}, nil
}

// canonical converts a name from a guest to the form of Flow.Names. It returns
// "" if no rule can have the name.
func canonical(name string) string {
	n, err := domainName(strings.TrimRight(name, "."))
	if err != nil {
		return ""
	}
	return n + "."
}
