package nft

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

// Names of rules that exist only on a bridge. Like all rule names they are
// stable.
const (
	ruleSpoof4    = "guard.source4"   // an IPv4 source that is not bound to the MAC
	ruleSpoof6    = "guard.source6"   // the same, IPv6
	ruleARP       = "guard.arp"       // ARP with the address of another sandbox
	ruleMAC       = "guard.mac"       // a MAC that is not bound to the port
	ruleEtherType = "guard.ethertype" // neither IP nor ARP
	ruleNeighbour = "always.sandbox"  // another sandbox
	ruleLAN       = egress.RuleLAN
	ruleTailnetIf = "always.tailscale"
	ruleUplink    = "always.uplink"    // not routed to the internet
	ruleInbound   = "guard.inbound"    // an unsolicited incoming connection
	ruleInvalid   = "guard.invalid"    // belongs to no connection
	ruleUnknown   = "guard.unknown"    // a source without a policy
	rulePolicy    = "policy"           // the sandbox's own policy decides; the reader of the log evaluates it
	ruleNAT       = "nat"              // sandboxes use the host's address
	ruleTailIn    = "tailnet.inbound"  // users of the tailnet connect to sandboxes
	ruleRedirect  = "name.redirect"    // a flow that needs a host name is redirected to the proxy
	ruleServices  = "host.services"    // DNS and guest plane
	ruleReplies   = "flow.established" // packets of flows that were allowed
	ruleHostFlows = "limit.host"       // too many connections to the host
	ruleOptions   = "guard.options"    // IP options and extension headers, which change the route or hide the transport header
	rulePort      = "guard.port"       // a port of the bridge that no sandbox is bound to
	ruleFlood     = "guard.flood"      // a frame that the bridge would send to every port
	ruleDHCP      = "host.dhcp"        // the request of a sandbox that has no address yet
	rulePrivate   = "private.redirect" // a private destination that the operator allows, through the proxy
	ruleDNAT      = "guard.dnat"       // a rule of another program changes its destination
)

// markInbound is the connection mark of flows that came from the tailnet.
// Marks of policies have another highest bit.
const markInbound = 0x80000001

// State is the input of Render: the host's network, and the sandboxes on it
// with the current addresses of their names.
type State struct {
	Config    Config
	Sandboxes []Sandbox
	Learned   []Learned
	Ports     []string // all ports of the bridge
	Serving   bool     // the DNS server answers on the bridge
}

// Render returns the text for 'nft -f' that replaces the loaded rules by the
// state, in one transaction.
func Render(s State) (string, error) {
	r, err := build(s)
	if err != nil {
		return "", err
	}
	return header + r.text(), nil
}

const header = `#!/usr/sbin/nft -f
# Written by AgentLab ("agentlab host network render"). Changes made here are
# lost when it is rewritten; config.yaml, host_network, is the place.

`

func build(s State) (*ruleset, error) {
	if err := s.Config.Validate(); err != nil {
		return nil, err
	}
	for i, x := range s.Sandboxes {
		if err := x.Validate(s.Config, s.Sandboxes[:i]); err != nil {
			return nil, err
		}
	}
	b := newBuilder(s)
	b.sets()
	b.policies()
	b.ingress()
	b.targets()
	b.forward()
	b.input()
	b.nat()
	b.refusals()
	return &ruleset{tables: []*table{b.inet, b.bridge(), b.arp()}}, nil
}

type builder struct {
	State
	inet    *table
	denials map[string]bool // rules that need a deny chain
	plans   map[*egress.Policy]*plan
}

func newBuilder(s State) *builder {
	return &builder{
		State: s, inet: &table{family: "inet", name: tableName},
		// Chains of policies are added and removed; the chains that all of
		// them jump to are always there.
		denials: map[string]bool{rulePolicy: true, egress.RuleLimit: true},
		plans:   map[*egress.Policy]*plan{},
	}
}

// planOf caches the result of the function planOf for each policy.
func (b *builder) planOf(s Sandbox) *plan {
	p := b.plans[s.Policy]
	if p == nil {
		p = planOf(s)
		b.plans[s.Policy] = p
	}
	return p
}

// deny returns the statement that denies by a rule.
func (b *builder) deny(rule string) string {
	b.denials[rule] = true
	return "goto " + denyChain(rule)
}

func denyChain(rule string) string {
	return "no_" + strings.NewReplacer(".", "_", ":", "_", "-", "_").Replace(rule)
}

// family has the differences between IPv4 and IPv6.
type family struct {
	v    string // "4"
	ip   string // "ip"
	addr string // type of an address
	only string // matches its packets
}

var (
	v4       = family{"4", "ip", "ipv4_addr", "meta nfproto ipv4"}
	v6       = family{"6", "ip6", "ipv6_addr", "meta nfproto ipv6"}
	families = []family{v4, v6}
)

func (f family) has(a netip.Addr) bool { return a.IsValid() && a.Unmap().Is4() == (f.v == "4") }

// quoted returns an interface name as a string constant.
func quoted(ifname string) string { return `"` + ifname + `"` }

// sets declares the sets that all chains use, with their current elements.
func (b *builder) sets() {
	for _, f := range families {
		always := b.inet.set(set{name: "always" + f.v, key: f.addr, verdicts: true, flags: "interval", note: "what no policy can allow"})
		for _, d := range b.alwaysDenied(f) {
			always.add(d.rule, d.key, b.deny(d.rule), "")
		}
		b.inet.set(set{name: "bound" + f.v, key: "ether_addr . " + f.addr, note: "source addresses that a sandbox may use"})
		b.inet.set(set{name: "policy" + f.v, key: f.addr, verdicts: true, note: "the policy of each sandbox"})
		b.inet.set(set{name: "redirect" + f.v, key: f.addr, verdicts: true, note: "which of its flows must name their host"})
		b.inet.set(set{name: "shape" + f.v, key: f.addr, verdicts: true, note: "sandboxes with a bandwidth limit"})
		b.inet.set(set{name: "live" + f.v, key: f.addr + " . mark", note: "flows opened under the current policy have its mark"})
		pair := f.addr + " . " + f.addr
		b.inet.set(set{name: "named" + f.v, key: pair + " . inet_service", flags: "timeout", size: maxLearned, note: "answers of our DNS; TCP to them must name its host"})
		b.inet.set(set{name: "namedranges" + f.v, key: pair + " . inet_service", flags: "interval,timeout", size: maxLearned, note: "the same, over ranges of ports"})
		b.inet.set(set{name: "learned" + f.v, key: pair + " . inet_proto . inet_service", verdicts: true, flags: "timeout", size: maxLearned, note: "answers of our DNS; the names of an address decide"})
		b.inet.set(set{name: "ranges" + f.v, key: pair + " . inet_proto . inet_service", verdicts: true, flags: "interval,timeout", size: maxLearned, note: "the same, over ranges of ports"})
		b.inet.set(set{name: "private" + f.v, key: pair + " . inet_service", flags: "timeout", size: maxLearned, note: "private destinations that the operator opened; TCP to them goes through the proxy"})
		b.inet.set(set{name: "hostflows" + f.v, key: f.addr, flags: "dynamic", size: maxSandboxes})
	}
	b.inet.set(set{name: "ndprate", key: "ether_addr", flags: "dynamic,timeout", timeout: "1m", size: maxSandboxes})
	if b.Config.DHCP {
		b.inet.set(set{name: "dhcprate", key: "ether_addr", flags: "dynamic,timeout", timeout: "1m", size: maxSandboxes})
		b.inet.set(set{name: "dhcp", key: "ether_addr", note: "sandboxes that ask for their address"})
	}
	served := b.inet.set(set{name: "served", key: "inet_service", flags: "timeout", note: "DNS, while our server says that it answers: no other server may"})
	if b.Serving {
		for _, key := range b.Config.servedKeys() {
			served.add("", key, "", servedFor)
		}
	}
	for _, s := range b.Sandboxes {
		for _, c := range bindings(s, b.planOf(s), b.Config.Gateway4) {
			if c.family == "inet" {
				b.find(c.set).add("", c.key, c.verdict, c.options)
			}
		}
	}
	for _, l := range b.Learned {
		list, _ := l.elements(b.planOf(l.Sandbox))
		for _, e := range list {
			b.find(e.set).add("", e.key, e.verdict, e.options)
		}
	}
}

// perSender returns the statement that drops packets above a rate per second
// and MAC, which the bridge table binds to a port.
func perSender(set string, rate, burst int) string {
	return fmt.Sprintf("update @%s { ether saddr limit rate over %d/second burst %d packets } drop", set, rate, burst)
}

// ndpRate limits a sandbox's neighbour discovery packets with link-local
// addresses per second, because it may use any number of such addresses. The
// kernel keeps an entry for at least five seconds, and up to 512 entries of
// all interfaces without garbage collection.
const ndpRate, ndpBurst = 10, 30

// Sizes of sets. maxLearned is large because the kernel does not add elements
// to a full set, and a guest must not be able to fill it for others: the DNS
// server has a separate limit for each sandbox.
const (
	maxLearned   = 1 << 20
	maxSandboxes = 1 << 16
)

func (b *builder) find(name string) *set {
	i := slices.IndexFunc(b.inet.sets, func(s *set) bool { return s.name == name })
	return b.inet.sets[i]
}

// ingress drops packets with a spoofed source, before the kernel stores any
// state for them.
func (b *builder) ingress() {
	// Before defragmentation (-400), so that fragments are visible.
	c := b.inet.chain("ingress", "type filter hook prerouting priority -450")
	c.add("", "iifname != %s accept", quoted(b.Config.Bridge))
	c.add(ruleOptions, "ip hdrlength != 5 drop")
	for _, h := range []string{"hbh", "rt", "frag", "dst"} {
		c.add(ruleOptions, "meta nfproto ipv6 exthdr %s exists drop", h)
	}
	// Each sandbox has its own rate limits for packets that cost the host work
	// or memory: DHCP requests, which may contain the MAC of another sandbox,
	// and neighbour discovery, which may have any source.
	if b.Config.DHCP {
		c.add(ruleDHCP, "udp dport 67 %s", perSender("dhcprate", dhcpRate, dhcpBurst))
		c.add(ruleDHCP, askDHCP+" accept")
	}
	c.add("", "ether saddr . ip saddr @bound4 accept")
	c.add("", "ether saddr . ip6 saddr @bound6 accept")
	c.add("", "ip6 saddr fe80::/10 %s", perSender("ndprate", ndpRate, ndpBurst))
	c.add("", "ip6 saddr { ::, fe80::/10 } icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept")
	c.add(ruleSpoof4, "meta nfproto ipv4 drop")
	c.add(ruleSpoof6, "meta nfproto ipv6 drop")
}

// targets denies addresses that no policy can allow, before the routing
// decision of the kernel, so that the denial is logged in every case.
func (b *builder) targets() {
	c := b.inet.chain("targets", "type filter hook prerouting priority mangle")
	c.add("", "iifname != %s accept", quoted(b.Config.Bridge))
	c.add(egress.RuleProtocol, "meta l4proto != { tcp, udp, icmp, ipv6-icmp } %s", b.deny(egress.RuleProtocol))
	c.add(ruleInvalid, "ct state invalid drop")
	// A flow that no policy has allowed is handled like a new one. It can
	// be opened while another program has flushed the rules.
	for _, f := range families {
		c.add("", "ct state established %s saddr . ct mark @live%s accept", f.ip, f.v)
	}
	c.add("", "ct state established ct direction reply ct mark 0x%08x accept", uint32(markInbound))
	c.add("", "ct state established ct direction reply fib daddr type local accept")
	c.add("", ctErrors+" accept")
	c.add("", "ip6 daddr { fe80::/10, ff02::/16 } icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept")
	for _, f := range families {
		if gw := b.gateway(f); gw.IsValid() {
			c.add("", "%s daddr %s accept", f.ip, gw)
		}
	}
	if b.Config.DHCP {
		c.add(ruleDHCP, askDHCP+" accept")
	}
	// The proxy itself closes the flows that it carries.
	c.add("", "ct state established ct status dnat accept")
	for _, f := range families {
		c.add(rulePrivate, "%s saddr . %s daddr . tcp dport @private%s accept", f.ip, f.ip, f.v)
	}
	b.alwaysRules(c)
	c.add(egress.RuleForeignDNS, "meta l4proto { tcp, udp } th dport 53 %s", b.deny(egress.RuleForeignDNS))
	c.add(egress.RuleProtocol, "icmp type != echo-request %s", b.deny(egress.RuleProtocol))
	c.add(egress.RuleProtocol, "icmpv6 type != echo-request %s", b.deny(egress.RuleProtocol))
}

// forward decides what enters and leaves the bridge. It has a verdict for
// every packet of the bridge and does not affect others.
func (b *builder) forward() {
	bridge := quoted(b.Config.Bridge)
	c := b.inet.chain("forward", "type filter hook forward priority filter")
	c.add(ruleNeighbour, "iifname %s oifname %s drop", bridge, bridge)
	c.add("", "iifname %s goto outbound", bridge)
	c.add("", "oifname %s goto inbound", bridge)

	out := b.inet.chain("outbound", "")
	for _, f := range families {
		out.add("", "%s saddr vmap @shape%s", f.ip, f.v)
	}
	for _, f := range families {
		out.add(ruleReplies, "ct state established %s saddr . ct mark @live%s accept", f.ip, f.v)
		out.add(ruleReplies, ctErrors+" %s saddr . ct mark @live%s accept", f.ip, f.v)
	}
	out.add(ruleTailIn, "ct state established,related ct direction reply ct mark 0x%08x accept", uint32(markInbound))
	// The decision was for the address that the sandbox dialled.
	out.add(ruleDNAT, "ct status dnat %s", b.deny(ruleDNAT))
	// The tailnet does not count as uplink.
	if b.Config.Uplink != "" {
		out.add(ruleUplink, "oifname != %s %s", quoted(b.Config.Uplink), b.deny(ruleUplink))
	} else if b.Config.Tailscale != "" {
		out.add(ruleTailnetIf, "oifname %s %s", quoted(b.Config.Tailscale), b.deny(ruleTailnetIf))
	}
	for _, f := range families {
		out.add("", "%s saddr vmap @policy%s", f.ip, f.v)
	}
	out.add(ruleUnknown, "drop")

	in := b.inet.chain("inbound", "")
	for _, f := range families {
		in.add("", "%s daddr vmap @shape%s", f.ip, f.v)
	}
	for _, f := range families {
		in.add(ruleReplies, "ct state established %s daddr . ct mark @live%s accept", f.ip, f.v)
		in.add(ruleReplies, ctErrors+" %s daddr . ct mark @live%s accept", f.ip, f.v)
	}
	if b.Config.Tailscale != "" {
		t := quoted(b.Config.Tailscale)
		in.add(ruleTailIn, "iifname %s ct state new ct mark set 0x%08x accept", t, uint32(markInbound))
		in.add(ruleTailIn, "iifname %s ct state established,related ct mark 0x%08x accept", t, uint32(markInbound))
	}
	in.add(ruleInbound, "drop")
}

// input decides which packets reach the host itself.
func (b *builder) input() {
	c := b.inet.chain("input", "type filter hook input priority filter")
	c.add("", "iifname %s goto host", quoted(b.Config.Bridge))
	h := b.inet.chain("host", "")
	// Every packet of a connection that a sandbox opened is checked, because
	// it may have been allowed only for a limited time.
	h.add("", "ct state established ct direction reply accept")
	h.add("", ctErrors+" accept")
	h.add("", "ip6 hoplimit 255 icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept")
	for _, f := range families {
		h.add(ruleHostFlows, "ct state new meta nfproto ipv%s add @hostflows%s { %s saddr ct count over %d } drop", f.v, f.v, f.ip, maxHostFlows)
	}
	h.add(ruleRedirect, "ct status dnat tcp dport %d accept", b.Config.ProxyPort)
	if b.Config.DHCP {
		h.add(ruleDHCP, askDHCP+" th dport @served accept")
		h.add(ruleDHCP, "ether saddr @dhcp ip daddr %s udp sport 68 udp dport 67 th dport @served accept", b.Config.Gateway4)
	}
	for _, f := range families {
		gw := b.gateway(f)
		if !gw.IsValid() {
			continue
		}
		h.add(ruleServices, "%s daddr %s meta l4proto { tcp, udp } th dport 53 th dport @served accept", f.ip, gw)
		if len(b.Config.GuestPorts) > 0 {
			h.add(ruleServices, "%s daddr %s tcp dport { %s } accept", f.ip, gw, portList(b.Config.GuestPorts))
		}
	}
	for _, f := range families {
		if gw := b.gateway(f); gw.IsValid() {
			h.add(egress.RuleGateway, "%s daddr %s %s", f.ip, gw, b.deny(egress.RuleGateway))
		}
	}
	h.add(egress.RuleHostAddr, "%s", b.deny(egress.RuleHostAddr))
}

// ctErrors matches ICMP errors about known flows. Other "related" flows were
// announced inside of a flow to a connection tracking helper of the host, and
// are checked like any new flow.
const ctErrors = "ct state related meta l4proto { icmp, ipv6-icmp }"

// maxHostFlows limits the connections of one sandbox to the host, including
// the redirected ones.
const maxHostFlows = 1024

func (b *builder) gateway(f family) netip.Addr {
	if f.v == "4" {
		return b.Config.Gateway4
	}
	return b.Config.Gateway6
}

func (b *builder) subnet(f family) netip.Prefix {
	if f.v == "4" {
		return b.Config.Subnet4
	}
	return b.Config.Subnet6
}

func portList(ports []uint16) string {
	var out []string
	for _, p := range slices.Sorted(slices.Values(ports)) {
		out = append(out, fmt.Sprint(p))
	}
	return strings.Join(slices.Compact(out), ", ")
}

// nat redirects flows that need a host name to the proxy, and masquerades
// sandboxes with the host's addresses.
func (b *builder) nat() {
	bridge := quoted(b.Config.Bridge)
	c := b.inet.chain("redirects", "type nat hook prerouting priority dstnat")
	c.add("", "iifname != %s accept", bridge)
	c.add("", "meta l4proto != tcp accept")
	for _, f := range families {
		c.add(rulePrivate, "%s saddr . %s daddr . tcp dport @private%s redirect to :%d", f.ip, f.ip, f.v, b.Config.ProxyPort)
	}
	c.add("", "fib daddr type local accept")
	for _, f := range families {
		for _, set := range []string{"named", "namedranges"} {
			c.add(ruleRedirect, "%s saddr . %s daddr . tcp dport @%s%s redirect to :%d", f.ip, f.ip, set, f.v, b.Config.ProxyPort)
		}
		c.add("", "%s saddr vmap @redirect%s", f.ip, f.v)
	}
	out := b.inet.chain("hide", "type nat hook postrouting priority srcnat")
	for _, f := range families {
		if !b.subnet(f).IsValid() {
			continue
		}
		where := fmt.Sprintf("oifname %s", quoted(b.Config.Uplink))
		if b.Config.Uplink == "" {
			where = fmt.Sprintf("oifname != { %s }", b.inside())
		}
		out.add(ruleNAT, "%s saddr %s %s masquerade", f.ip, b.subnet(f), where)
	}
}

// inside returns the interfaces that do not lead to the internet.
func (b *builder) inside() string {
	out := `"lo", ` + quoted(b.Config.Bridge)
	if b.Config.Tailscale != "" {
		out += ", " + quoted(b.Config.Tailscale)
	}
	return out
}

// refusals renders the deny chains, one for each deny rule, so that the log
// shows the rule.
func (b *builder) refusals() {
	for _, rule := range slices.Sorted(maps.Keys(b.denials)) {
		c := b.inet.chain(denyChain(rule), "")
		if b.Config.LogGroup != 0 {
			c.add("", "limit rate 200/second burst 1000 packets log prefix %s group %d", quote("deny "+rule), b.Config.LogGroup)
		}
		c.add("", "goto refuse")
	}
	c := b.inet.chain("refuse", "")
	c.add("", "fib daddr type { broadcast, multicast, anycast } drop")
	c.add("", "limit rate over 1000/second burst 2000 packets drop")
	c.add("", "meta l4proto tcp reject with tcp reset")
	c.add("", "reject with icmpx admin-prohibited")
}
