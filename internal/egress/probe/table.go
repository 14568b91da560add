package probe

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Table returns the rows for env: first those that apply under every policy,
// then those of its policy.
func Table(env Env) []Check {
	t := &table{env: env, tgt: env.Targets}
	t.controller()
	t.always()
	t.foreignDNS()
	t.neighbours()
	t.frames()
	t.rebinding()
	switch env.Network.Mode {
	case agentlab.NetworkNAT:
		t.nat()
	case agentlab.NetworkAllowlist:
		t.allowlist()
		t.opened()
	default:
		t.off()
	}
	return t.rows
}

type table struct {
	env  Env
	tgt  Targets
	rows []Check
}

// attempt is a probe with its trace.
type attempt struct {
	p guestapi.Probe
	t Trace
}

func (t *table) add(c Check, attempts ...attempt) {
	for _, a := range attempts {
		if c.Want != Reach && t.isOpened(a.t) {
			continue // a destination that the operator allows proves nothing
		}
		a.p.ID = c.ID
		if i := len(c.Probes); i > 0 {
			a.p.ID = fmt.Sprintf("%s/%d", c.ID, i+1)
		}
		c.Probes = append(c.Probes, a.p)
		c.Traces = append(c.Traces, a.t)
	}
	if len(c.Probes) > 0 {
		t.rows = append(t.rows, c)
	}
}

// isOpened reports whether a trace is of an address that the policy allows as
// private destination.
func (t *table) isOpened(tr Trace) bool {
	return tr.Proto == TCP && tr.Addr.IsValid() && slices.ContainsFunc(t.env.Network.Private, func(p agentlab.PrivateTarget) bool {
		a, err := netip.ParseAddr(p.Host)
		return err == nil && a.Unmap() == tr.Addr.Unmap() && p.Port == int(tr.Port)
	})
}

// to returns a probe of an address and port, or of a name and port.
func to(kind, proto, target string) attempt {
	a := attempt{p: guestapi.Probe{Kind: kind, Target: target}, t: Trace{Proto: proto}}
	host, port, err := net.SplitHostPort(target)
	if err != nil {
		panic(err) // a constant of the table
	}
	n, _ := strconv.ParseUint(port, 10, 16)
	a.t.Port = uint16(n)
	if addr, err := netip.ParseAddr(host); err == nil {
		a.t.Addr = addr
	} else {
		a.t.Name = host
	}
	return a
}

func tcpTo(target string) attempt { return to("tcp", TCP, target) }
func udpTo(target string) attempt { return to("udp", UDP, target) }

// named returns a tls or http probe with the name in the flow.
func named(kind, target, name string) attempt {
	a := to(kind, TCP, target)
	a.p.Name = name
	return a
}

func at(a netip.Addr, port uint16) string { return netip.AddrPortFrom(a, port).String() }

func tcps(targets ...string) []attempt {
	out := make([]attempt, len(targets))
	for i, s := range targets {
		out[i] = tcpTo(s)
	}
	return out
}

func udps(targets ...string) []attempt {
	out := make([]attempt, len(targets))
	for i, s := range targets {
		out[i] = udpTo(s)
	}
	return out
}

func ping(addr string) attempt {
	return attempt{guestapi.Probe{Kind: "ping", Target: addr}, Trace{Proto: ICMP, Addr: netip.MustParseAddr(addr)}}
}

// question returns a question to AgentLab's DNS server.
func question(name, typ string) attempt {
	return attempt{guestapi.Probe{Kind: "dns", Target: name, Type: typ}, Trace{Proto: DNS, Name: name}}
}

// asked returns a question to another DNS server.
func asked(kind, name string, server netip.Addr, port uint16) attempt {
	proto := UDP
	if kind == "dnstcp" {
		proto = TCP
	}
	return attempt{
		guestapi.Probe{Kind: kind, Target: name, Server: at(server, port)},
		Trace{Proto: proto, Addr: server, Port: port},
	}
}

func raw(what string, f []byte, tr Trace) attempt {
	return attempt{guestapi.Probe{Kind: "raw", Target: what, Frame: f}, tr}
}

func (t *table) controller() {
	if !t.env.Gateway4.IsValid() {
		return
	}
	gw := t.env.Gateway4
	if p := t.env.ControllerPort; p != 0 {
		t.add(Check{ID: "controller", Shows: "the controller's guest listener is reached in every mode", Want: Reach},
			named("http", at(gw, p), gw.String()))
	}
	t.add(Check{ID: "controller-ports", Shows: "no other port of the controller's address is open", Want: Closed, Rule: ruleController},
		tcps(at(gw, 22), at(gw, 80), at(gw, 443), at(gw, 2375), at(gw, 8006), at(gw, 8843), at(gw, 8845))...)
	if t.env.Gateway6.IsValid() {
		t.add(Check{ID: "controller-ports6", Shows: "no other port of the controller's IPv6 address is open", Want: Closed, Rule: ruleController, IPv6: true},
			tcps(at(t.env.Gateway6, 22), at(t.env.Gateway6, 80), at(t.env.Gateway6, 8006))...)
	}
}

// always adds the targets that no policy can allow.
func (t *table) always() {
	rows := []struct {
		id, shows, rule string
		tcp, udp        []string
		six             bool
	}{
		{"lan-10", "10.0.0.0/8 is not reached", rulePrivate, []string{"10.0.0.1:22", "10.1.2.3:80", "10.255.255.254:443"}, []string{"10.1.2.3:123"}, false},
		{"lan-172", "172.16.0.0/12 is not reached, from its first address to its last", rulePrivate, []string{"172.16.0.1:2375", "172.31.255.254:80"}, []string{"172.17.0.1:514"}, false},
		{"lan-192", "192.168.0.0/16 is not reached", rulePrivate, []string{"192.168.0.1:443", "192.168.1.1:80", "192.168.255.254:8006"}, []string{"192.168.1.1:161"}, false},
		{"tailnet", "a tailnet is not reached", ruleCGNAT, []string{"100.64.0.1:443", "100.101.102.103:22", "100.127.255.254:80"}, []string{"100.101.102.103:41641"}, false},
		{"metadata", "cloud metadata services are not reached", ruleMetadata, []string{"169.254.169.254:80", "169.254.170.2:80", "168.63.129.16:80", "100.100.100.200:80", "192.0.0.192:80"}, []string{"169.254.169.254:123"}, false},
		{"linklocal", "IPv4 link-local addresses are not reached", ruleLinkLocal, []string{"169.254.1.1:80"}, []string{"169.254.1.1:1900"}, false},
		{"reserved", "addresses that are set aside are not reached", ruleReserved, []string{"192.0.0.8:80"}, nil, false},
		{"documentation", "documentation addresses are not reached", ruleDocumentation, []string{"192.0.2.1:80", "198.51.100.7:80", "203.0.113.7:80"}, nil, false},
		{"benchmark", "benchmark networks are not reached", ruleBenchmark, []string{"198.18.0.1:80", "198.19.255.254:80"}, nil, false},
		{"transition4", "the relay address of 6to4 is not reached", ruleTransition, []string{"192.88.99.1:80"}, nil, false},
		{"multicast", "IPv4 multicast goes nowhere", ruleMulticast, nil, []string{"224.0.0.251:5353", "239.255.255.250:1900"}, false},
		{"broadcast", "IPv4 broadcast goes nowhere", ruleBroadcast, nil, []string{"255.255.255.255:67"}, false},

		{"ula", "IPv6 unique local addresses are not reached", ruleULA, []string{"[fd12:3456::1]:80", "[fc00::1]:443"}, []string{"[fd12:3456::1]:123"}, true},
		{"tailnet6", "a tailnet is not reached by IPv6", ruleTailnet, []string{"[fd7a:115c:a1e0::1]:22"}, []string{"[fd7a:115c:a1e0::1]:41641"}, true},
		{"metadata6", "cloud metadata services are not reached by IPv6", ruleMetadata, []string{"[fd00:ec2::254]:80", "[fd20:ce::254]:80"}, nil, true},
		{"sitelocal6", "IPv6 site-local addresses are not reached", ruleSiteLocal, []string{"[fec0::1]:80"}, nil, true},
		{"documentation6", "IPv6 documentation addresses are not reached", ruleDocumentation, []string{"[2001:db8::1]:80"}, nil, true},
		{"nat64", "a private address is not reached through NAT64", rulePrivate, []string{"[64:ff9b::10.1.2.3]:80", "[64:ff9b::192.168.1.1]:80"}, nil, true},
		{"nat64-local", "no address is reached through a local NAT64, whose translation is not known", ruleTransition, []string{"[64:ff9b:1:a01:2:300::]:80", "[64:ff9b:1::10.1.2.3]:80", "[64:ff9b:1::192.31.196.10]:80"}, nil, true},
		{"translated", "an IPv4-translated IPv6 address does not hide a private one", rulePrivate, []string{"[::ffff:0:10.1.2.3]:80"}, nil, true},
		{"sixtofour", "a private address is not reached through 6to4", rulePrivate, []string{"[2002:a01:203::1]:80"}, nil, true},
		{"teredo", "a private address is not reached through Teredo, as its server or its client", rulePrivate, []string{"[2001:0:a01:203::3fe0:3bf5]:80", "[2001:0:c01f:c40a::f5fe:fdfc]:80"}, nil, true},
		{"isatap", "a private address is not reached through ISATAP, under any prefix", rulePrivate, []string{"[2620:4f:8000::5efe:10.1.2.3]:80", "[2620:4f:8000::200:5efe:192.168.1.1]:80"}, nil, true},
		{"transition6", "tunnels from IPv6 to IPv4 are not used", ruleTransition, []string{"[2002:c01f:c40a::1]:80", "[2001:0:c01f:c40a::3fe0:3bf5]:80", "[::ffff:0:192.31.196.10]:80"}, nil, true},
		{"benchmark6", "the IPv6 benchmark network is not reached", ruleBenchmark, []string{"[2001:2::1]:80"}, nil, true},
		{"reserved6", "IPv6 addresses outside of global unicast are not reached", ruleReserved, []string{"[4000::1]:80", "[2001:20::1]:80"}, nil, true},
	}
	for _, r := range rows {
		t.add(Check{ID: r.id, Shows: r.shows, Want: Closed, Rule: r.rule, IPv6: r.six}, append(tcps(r.tcp...), udps(r.udp...)...)...)
	}
	t.add(Check{ID: "ping-lan", Shows: "no host of the LAN answers an echo", Want: Closed, Rule: rulePrivate}, ping("192.168.1.1"), ping("10.1.2.3"))
	t.add(Check{ID: "ping-tailnet", Shows: "no host of a tailnet answers an echo", Want: Closed, Rule: ruleCGNAT}, ping("100.101.102.103"))
	t.add(Check{ID: "ping-ula", Shows: "no unique local host answers an IPv6 echo", Want: Closed, Rule: ruleULA, IPv6: true}, ping("fd12:3456::1"))
	t.mapped()
	for _, a := range t.env.Host {
		t.add(Check{ID: "host-" + a.String(), Shows: "the host is not reached at its other addresses", Want: Closed},
			append(tcps(at(a, 22), at(a, 80), at(a, 8006), at(a, 8844)), udpTo(at(a, 161)))...)
		if a = a.Unmap(); a.Is4() {
			t.add(Check{ID: "host64-" + a.String(), Shows: "the host is not reached through a NAT64 either", Want: Closed, IPv6: true},
				append(tcps("[64:ff9b::"+a.String()+"]:22", "[64:ff9b::"+a.String()+"]:8844"), udpTo("[64:ff9b::"+a.String()+"]:161"))...)
		}
	}
}

// mapped adds IPv4-mapped IPv6 addresses for the socket layer: the guest's
// kernel sends IPv4, and the IPv4 address must decide.
func (t *table) mapped() {
	a := tcpTo("[::ffff:10.1.2.4]:80")
	b := tcpTo("[::ffff:169.254.169.254]:8080")
	t.add(Check{ID: "mapped-lan", Shows: "an IPv4-mapped IPv6 address does not hide a private one", Want: Closed, Rule: rulePrivate}, a)
	t.add(Check{ID: "mapped-metadata", Shows: "an IPv4-mapped IPv6 address does not hide a metadata service", Want: Closed, Rule: ruleMetadata}, b)
}

// foreignDNS adds questions to other DNS servers, the most common way to
// tunnel data out.
func (t *table) foreignDNS() {
	if r := t.tgt.Resolver; r.IsValid() {
		t.add(Check{ID: "dns-foreign", Shows: "no DNS server except AgentLab's answers", Want: Closed, Rule: ruleForeignDNS},
			asked("dns", t.tgt.Question, r, 53), asked("dnstcp", t.tgt.Question, r, 53))
	}
	if r := t.tgt.Resolver6; r.IsValid() {
		t.add(Check{ID: "dns-foreign6", Shows: "no DNS server except AgentLab's answers over IPv6", Want: Closed, Rule: ruleForeignDNS, IPv6: true},
			asked("dns", t.tgt.Question, r, 53), asked("dnstcp", t.tgt.Question, r, 53))
	}
	t.add(Check{ID: "dns-lan", Shows: "no DNS server of the LAN answers", Want: Closed, Rule: rulePrivate},
		asked("dns", "example.com", netip.MustParseAddr("192.168.1.53"), 53))
}

func (t *table) neighbours() {
	if a := t.env.Neighbour4; a.IsValid() {
		t.add(Check{ID: "neighbour", Shows: "another sandbox is not reached", Want: Closed},
			tcpTo(at(a, 22)), tcpTo(at(a, 8080)), udpTo(at(a, 4000)), ping(a.String()))
	}
	if a := t.env.Neighbour6; a.IsValid() {
		t.add(Check{ID: "neighbour6", Shows: "another sandbox is not reached by IPv6", Want: Closed, IPv6: true},
			tcpTo(at(a, 22)), tcpTo(at(a, 8080)), udpTo(at(a, 4000)), ping(a.String()))
	}
}

// rebinding adds allowed names whose answers must be withheld.
func (t *table) rebinding() {
	if t.env.Network.Mode != agentlab.NetworkNAT && t.env.Network.Mode != agentlab.NetworkAllowlist {
		return
	}
	for _, n := range t.tgt.Private {
		id, _, _ := strings.Cut(n.Name, ".")
		t.add(Check{
			ID: "rebind-" + id, Shows: "a name cannot lead to a forbidden address (" + id + ")", Want: Block, Rule: ruleRebinding,
			IPv6: n.Type == "AAAA",
		}, question(n.Name, n.Type))
	}
	if n := t.tgt.Flip; n != "" {
		a := question(n, "A")
		a.p.Repeat = 3
		t.add(Check{ID: "rebind-flip", Shows: "an allowed name that changes its answer gives out its public address only", Want: Reach}, a)
	}
}
