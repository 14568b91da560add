package nft

import (
	"slices"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

// bridge returns the table that isolates sandboxes on the bridge itself and
// binds each to its port.
func (b *builder) bridge() *table {
	t := &table{family: "bridge", name: tableName}
	ports := t.set(set{name: "ports", key: "ifname", note: "of the bridge"})
	t.set(set{name: "senders", key: "ifname", verdicts: true, note: "ports whose sandbox is known"})
	t.set(set{name: "macs", key: "ifname . ether_addr"})
	t.set(set{name: "arps", key: "ifname . ether_addr . ipv4_addr"})
	known := slices.Clone(b.Ports)
	for _, s := range b.Sandboxes {
		for _, e := range bindings(s, b.planOf(s), b.Config.Gateway4) {
			if e.family != "bridge" {
				continue
			}
			if e.set == "ports" {
				known = append(known, s.Port)
				continue
			}
			i := slices.IndexFunc(t.sets, func(x *set) bool { return x.name == e.set })
			t.sets[i].add("", e.key, e.verdict, e.options)
		}
	}
	slices.Sort(known)
	for _, p := range slices.Compact(known) {
		if ifName.MatchString(p) {
			ports.add("", quoted(p), "", "")
		}
	}
	s := t.chain("sender", "")
	s.add(ruleMAC, "iifname . ether saddr != @macs drop")
	s.add(ruleARP, "ether type arp iifname . arp saddr ether . arp saddr ip != @arps drop")
	s.add(ruleEtherType, "ether type != { ip, ip6, arp } drop")
	// The kernel drops these before the other table can log them.
	if b.Config.LogGroup != 0 {
		s.add("", "ip6 daddr ::1 limit rate 50/second log prefix %s group %d", quote("deny "+egress.RuleLoopback), b.Config.LogGroup)
	}
	s.add(egress.RuleLoopback, "ip6 daddr ::1 drop")
	in := t.chain("ingress", "type filter hook prerouting priority -300")
	in.add("", "iifname vmap @senders")
	out := t.chain("egress", "type filter hook output priority -300")
	const unicast = "ether daddr & 01:00:00:00:00:00 == 00:00:00:00:00:00 oifname . ether daddr != @macs drop"
	if b.Config.BridgeMeta {
		in.add(rulePort, "meta ibrname %s drop", quoted(b.Config.Bridge))
		out.add(ruleFlood, "meta obrname %s %s", quoted(b.Config.Bridge), unicast)
	} else {
		in.add(rulePort, "iifname @ports drop")
		out.add(ruleFlood, "oifname @ports %s", unicast)
	}
	f := t.chain("forward", "type filter hook forward priority -300")
	if b.Config.BridgeMeta {
		f.add(ruleNeighbour, "meta ibrname %s drop", quoted(b.Config.Bridge))
	} else {
		f.add(ruleNeighbour, "iifname @ports drop")
		f.add(ruleNeighbour, "oifname @ports drop")
	}
	for _, fam := range families {
		if n := b.subnet(fam); n.IsValid() {
			f.add(ruleNeighbour, "%s saddr %s drop", fam.ip, n)
			f.add(ruleNeighbour, "%s daddr %s drop", fam.ip, n)
		}
	}
	return t
}

// arp returns the table that prevents a sandbox from sending ARP for the
// addresses of others to the host.
func (b *builder) arp() *table {
	t := &table{family: "arp", name: tableName}
	bound := t.set(set{name: "bound", key: "ether_addr . ipv4_addr"})
	for _, s := range b.Sandboxes {
		for _, e := range bindings(s, b.planOf(s), b.Config.Gateway4) {
			if e.family == "arp" {
				bound.add("", e.key, e.verdict, e.options)
			}
		}
	}
	c := t.chain("input", "type filter hook input priority filter")
	c.add(ruleARP, "iifname %s arp saddr ether . arp saddr ip != @bound drop", quoted(b.Config.Bridge))
	return t
}
