// Package probetest is the reference world of the probe table: the names,
// addresses and policies of tests and, with the build tag "mutation", the list
// of the rules that each row tests. Only tests import it.
package probetest

import (
	"net/netip"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
)

// The reference world: names and addresses for a fake internet. The addresses
// are those of AS112, which are public and a sink on the real internet. In a
// test every address of it answers on every port (test/fakenet), and so does
// every forbidden address, so that a missing rule is detected.
var (
	World4 = netip.MustParsePrefix("192.31.196.0/24")
	World6 = netip.MustParsePrefix("2620:4f:8000::/64")
)

// privateAddr is an address of the reference world's private network that no
// other row uses.
var privateAddr = netip.MustParseAddr("10.9.8.7")

const zone = ".probe.example.com"

func world4(last byte) netip.Addr {
	b := World4.Addr().As4()
	b[3] = last
	return netip.AddrFrom4(b)
}

func world6(last byte) netip.Addr {
	b := World6.Addr().As16()
	b[15] = last
	return netip.AddrFrom16(b)
}

// Name is one name of the reference world. If Later is not empty, the first
// question for each record type is answered from Addrs, and all later ones
// from Later.
type Name struct {
	Name  string
	Addrs []netip.Addr
	Later []netip.Addr
}

func addrs(list ...string) []netip.Addr {
	out := make([]netip.Addr, len(list))
	for i, s := range list {
		out[i] = netip.MustParseAddr(s)
	}
	return out
}

// rebound lists the names that resolve to forbidden addresses.
var rebound = []Name{
	{Name: "lan.rebind" + zone, Addrs: addrs("10.1.2.3")},
	{Name: "lan16.rebind" + zone, Addrs: addrs("192.168.1.1")},
	{Name: "loop.rebind" + zone, Addrs: addrs("127.0.0.1")},
	{Name: "zero.rebind" + zone, Addrs: addrs("0.0.0.0")},
	{Name: "meta.rebind" + zone, Addrs: addrs("169.254.169.254")},
	{Name: "tailnet.rebind" + zone, Addrs: addrs("100.101.102.103")},
	{Name: "ula.rebind" + zone, Addrs: addrs("fd12:3456::1")},
	{Name: "tailnet6.rebind" + zone, Addrs: addrs("fd7a:115c:a1e0::1")},
	{Name: "link.rebind" + zone, Addrs: addrs("fe80::1")},
	{Name: "loop6.rebind" + zone, Addrs: addrs("::1")},
	{Name: "mapped.rebind" + zone, Addrs: addrs("::ffff:10.1.2.3")},
	{Name: "nat64.rebind" + zone, Addrs: addrs("64:ff9b::10.1.2.3")},
	{Name: "local64.rebind" + zone, Addrs: addrs("64:ff9b:1::10.1.2.3")},
	{Name: "sixtofour.rebind" + zone, Addrs: addrs("2002:a01:203::1")},
	{Name: "teredo.rebind" + zone, Addrs: addrs("2001:0:a01:203::3fe0:3bf5")},
	{Name: "isatap.rebind" + zone, Addrs: addrs("2620:4f:8000::5efe:10.1.2.3")},
	{Name: "translated.rebind" + zone, Addrs: addrs("::ffff:0:10.1.2.3")},
	{Name: "compatible.rebind" + zone, Addrs: addrs("::10.1.2.3")},
	{Name: "both.rebind" + zone, Addrs: []netip.Addr{world4(10), netip.MustParseAddr("10.1.2.3")}},
}

// ReferenceNames returns the zone of the reference world.
func ReferenceNames() []Name {
	return append([]Name{
		{Name: "gateway.corp", Addrs: []netip.Addr{privateAddr}},
		{Name: "metadata.gateway.corp", Addrs: addrs("169.254.169.254")},
		{Name: "loopback.gateway.corp", Addrs: addrs("127.0.0.1")},
		{Name: "site" + zone, Addrs: []netip.Addr{world4(10), world6(10)}},
		{Name: "site6" + zone, Addrs: []netip.Addr{world6(11)}},
		{Name: "twin" + zone, Addrs: []netip.Addr{world4(10), world6(10)}},
		{Name: "second" + zone, Addrs: []netip.Addr{world4(12)}},
		{Name: "stranger" + zone, Addrs: []netip.Addr{world4(13), world6(13)}},
		{Name: "denied" + zone, Addrs: []netip.Addr{world4(14)}},
		{Name: "port" + zone, Addrs: []netip.Addr{world4(15)}},
		{Name: "sub.wild" + zone, Addrs: []netip.Addr{world4(16)}},
		{Name: "wild" + zone, Addrs: []netip.Addr{world4(17)}},
		{Name: "flip.rebind" + zone, Addrs: []netip.Addr{world4(18)}, Later: addrs("10.1.2.3")},
	}, rebound...)
}

// ReferenceTargets returns the targets in the reference world, for the
// policies of Reference.
func ReferenceTargets() probe.Targets {
	t := probe.Targets{
		Site: "site" + zone, SiteAddr: world4(10), Site6: "site6" + zone, Twin: "twin" + zone, Second: "second" + zone,
		Stranger: "stranger" + zone, Denied: "denied" + zone, DeniedRule: "denied" + zone,
		DeniedAddr: world4(30), DeniedAddrRule: "192.31.196.30",
		Address: netip.AddrPortFrom(world4(20), 8080), Datagram: netip.AddrPortFrom(world4(20), 4000),
		StrangerAddr: world4(40), Stranger6: world6(40), Explicit: "port" + zone + ":2222",
		Wild: "sub.wild" + zone, Apex: "wild" + zone, OtherPort: 8443, PingAddr: world4(25),
		Resolver: world4(53), Resolver6: world6(53), DoT: world4(53), Question: "stranger" + zone, Flip: "flip.rebind" + zone,
	}
	for _, n := range rebound {
		typ := "A"
		if n.Addrs[0].Is6() {
			typ = "AAAA"
		}
		if len(n.Addrs) == 1 { // the others also have an allowed address
			t.Private = append(t.Private, probe.Rebound{Name: n.Name, Type: typ})
		}
	}
	return t
}

// Variant is one policy under which the table is run.
type Variant struct {
	Name    string
	Network agentlab.Network
	Targets probe.Targets
}

func rules(texts ...string) []agentlab.NetworkRule {
	out := make([]agentlab.NetworkRule, len(texts))
	for i, s := range texts {
		out[i].Rule = s
	}
	return out
}

// Reference returns the policies under which tests run the table: every mode,
// ports in mode nat, and a layer.
func Reference() []Variant {
	t := ReferenceTargets()
	deny := rules(t.DeniedRule, t.DeniedAddrRule)
	allow := rules(t.Site, t.Site6, t.Second, t.Explicit, "*."+t.Apex, "*.rebind"+zone,
		"192.31.196.20:8080", "192.31.196.20:4000/udp", "192.31.196.25/icmp", t.Denied, t.DeniedAddr.String())
	allowlist := agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: allow, Deny: deny}
	layered := allowlist
	layered.Layers = []agentlab.Network{{Mode: agentlab.NetworkAllowlist, Allow: rules(t.Site)}}
	ports := t
	ports.Address = netip.AddrPortFrom(world4(20), 80)
	ports.Datagram, ports.Explicit = netip.AddrPort{}, ""
	opened := probe.Targets{
		Site: t.Site, SiteAddr: t.SiteAddr, Resolver: t.Resolver, Resolver6: t.Resolver6, Question: t.Question,
		StrangerAddr: t.StrangerAddr, Stranger6: t.Stranger6,
		Opened: probe.Opened{
			Address: netip.MustParseAddrPort("10.9.8.9:4000"), Address6: netip.MustParseAddrPort("[fd12:9:8::9]:4000"), Name: "gateway.corp", Port: 4001, HostPort: 11434,
			Rebound: []string{"metadata.gateway.corp", "loopback.gateway.corp"},
		},
	}
	private := agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rules(t.Site)}
	for _, p := range []struct {
		host string
		port int
	}{{"10.9.8.9", 4000}, {"fd12:9:8::9", 4000}, {"gateway.corp", 443}, {"gateway.corp", 4001}, {"metadata.gateway.corp", 80}, {"loopback.gateway.corp", 80}, {probe.HostName, 11434}} {
		private.Private = append(private.Private, agentlab.PrivateTarget{Host: p.host, Port: p.port, Reason: "the probe table"})
	}
	layer := probe.Targets{
		Site: t.Site, SiteAddr: t.SiteAddr, Twin: t.Twin, Stranger: t.Stranger, Denied: t.Denied, DeniedRule: t.DeniedRule,
		DeniedAddr: t.DeniedAddr, DeniedAddrRule: t.DeniedAddrRule, StrangerAddr: t.StrangerAddr, Stranger6: t.Stranger6,
		OtherPort: t.OtherPort, Resolver: t.Resolver, Resolver6: t.Resolver6, Question: t.Question,
		Layered: t.Second, LayeredAddr: world4(20),
	}
	return []Variant{
		{"nat", agentlab.Network{Mode: agentlab.NetworkNAT, Deny: deny}, t},
		{"nat-ports", agentlab.Network{Mode: agentlab.NetworkNAT, Deny: deny, Ports: []string{"80", "443"}}, ports},
		{"allowlist", allowlist, t},
		{"layer", layered, layer},
		{"private", private, opened},
		{"off", agentlab.Network{Mode: agentlab.NetworkOff}, t},
	}
}

// Failures returns the rows of a report that failed.
func Failures(r probe.Report) []probe.Outcome {
	return slices.DeleteFunc(slices.Clone(r.Outcomes), func(o probe.Outcome) bool { return o.Status != probe.Fail })
}
