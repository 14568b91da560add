package probe

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// reach adds a row for allowed targets.
func (t *table) reach(id, shows string, attempts ...attempt) {
	t.add(Check{ID: id, Shows: shows, Want: Reach}, attempts...)
}

// site adds the rows of a name that is allowed in nat and in allowlist.
func (t *table) site() {
	s := t.tgt.Site
	if s == "" {
		return
	}
	t.reach("site-tls", "an allowed name is reached with TLS", named("tls", s+":443", s))
	if !t.tgt.NoHTTP {
		t.reach("site-http", "an allowed name is reached with HTTP", named("http", s+":80", s))
	}
	if s6 := t.tgt.Site6; s6 != "" {
		a := named("tls", s6+":443", s6)
		a.p.Type = "AAAA"
		t.add(Check{ID: "site-tls6", Shows: "an allowed name is reached with TLS by IPv6", Want: Reach, IPv6: true}, a)
	}
}

// denied adds the rows of deny rules, which take precedence in every mode.
func (t *table) denied() {
	if n := t.tgt.Denied; n != "" {
		t.add(Check{ID: "deny-name", Shows: "a denied name is not resolved", Want: Block, Rule: denyPrefix + t.tgt.DeniedRule, Said: n},
			question(n, "A"), question(n, "AAAA"))
	}
	if a := t.tgt.DeniedAddr; a.IsValid() {
		t.add(Check{ID: "deny-address", Shows: "a denied address is not reached", Want: Closed, Rule: denyPrefix + t.tgt.DeniedAddrRule},
			tcpTo(at(a, 443)), tcpTo(at(a, 8080)), udpTo(at(a, 4000)))
	}
}

func (t *table) nat() {
	ports := len(t.env.Network.Ports) > 0
	t.site()
	t.denied()
	if a := t.tgt.Address; a.IsValid() {
		t.reach("address", "a public address is reached without a name", tcpTo(a.String()))
	}
	if a := t.tgt.Datagram; a.IsValid() && !ports {
		t.reach("datagram", "a public UDP service is reached", udpTo(a.String()))
	}
	if a := t.tgt.PingAddr; a.IsValid() && !ports {
		t.reach("ping", "a public host answers an echo", ping(a.String()))
	}
	if n, a := t.tgt.Denied, t.tgt.StrangerAddr; n != "" && a.IsValid() {
		t.add(Check{ID: "deny-sni", Shows: "a denied name is not reached at another's address either", Want: Block, Rule: denyPrefix + t.tgt.DeniedRule, Said: n, Names: true},
			named("tls", at(a, 443), n), named("http", at(a, 80), n))
		if !ports {
			t.add(Check{ID: "deny-quic", Shows: "QUIC is refused where a denied name could hide in it", Want: Block, Rule: ruleNameUnread, Names: true},
				to("quic", UDP, at(a, 443)))
		}
	}
	if a := t.tgt.StrangerAddr; a.IsValid() && ports {
		t.add(Check{ID: "ports", Shows: "no port but those of the policy is reached", Want: Closed, Rule: rulePorts},
			tcpTo(at(a, 22)), tcpTo(at(a, t.tgt.OtherPort)), tcpTo(at(a, 25)), udpTo(at(a, 4000)))
	}
	if a := t.tgt.DoT; a.IsValid() && !ports {
		t.reach("dot", "DNS over TLS is a host as any other", named("tls", at(a, 853), ""))
	}
}

func (t *table) allowlist() {
	t.site()
	t.denied()
	t.strangers("")
	if a := t.tgt.Address; a.IsValid() {
		t.reach("address", "an address that a rule names is reached", tcpTo(a.String()))
	}
	if a := t.tgt.Datagram; a.IsValid() {
		t.reach("datagram", "a UDP service that a rule names is reached", udpTo(a.String()))
	}
	if a := t.tgt.PingAddr; a.IsValid() {
		t.reach("ping", "a host that an address rule names answers an echo", ping(a.String()))
	}
	if s := t.tgt.Second; s != "" {
		t.reach("second", "a second allowed name is reached", named("tls", s+":443", s))
	}
	if s := t.tgt.Explicit; s != "" {
		t.reach("explicit", "a port that a rule names is reached without a name in the flow", tcpTo(s))
		host, _, _ := strings.Cut(s, ":")
		t.add(Check{ID: "explicit-other", Shows: "a rule with a port opens that port only", Want: Block, Rule: ruleAllowlist, Names: true},
			named("tls", host+":443", host))
	}
	if s := t.tgt.Wild; s != "" {
		t.reach("wildcard", "a name below a wildcard is reached", named("tls", s+":443", s))
	}
	if s := t.tgt.Apex; s != "" {
		t.add(Check{ID: "wildcard-apex", Shows: "a wildcard does not allow the name itself, without a label before it", Want: Block, Rule: ruleAllowlist, Said: s},
			question(s, "A"))
		lookalike := "not" + s
		t.add(Check{ID: "wildcard-lookalike", Shows: "a wildcard does not allow names that end alike", Want: Block, Rule: ruleAllowlist, Said: lookalike},
			question(lookalike, "A"))
	}
	t.lies()
	t.layer()
}

// strangers adds the rows of targets that no rule allows.
func (t *table) strangers(rule string) {
	rule = first(rule, ruleAllowlist)
	if n := t.tgt.Stranger; n != "" {
		t.add(Check{ID: "stranger-name", Shows: "a name that no rule allows is not resolved", Want: Block, Rule: rule, Said: n}, question(n, "A"))
		tunnel := "c2VjcmV0.0123456789abcdef.tunnel." + n
		t.add(Check{ID: "dns-tunnel", Shows: "a question does not leave the machine as a message to its domain", Want: Block, Rule: rule, Said: tunnel},
			question(tunnel, "A"), question(tunnel, "TXT"))
	}
	if a := t.tgt.StrangerAddr; a.IsValid() {
		t.add(Check{ID: "stranger-address", Shows: "an address that no rule allows is not reached", Want: Block, Rule: rule},
			tcpTo(at(a, 5432)), tcpTo(at(a, 22)), tcpTo(at(a, 4444)), udpTo(at(a, 4000)), ping(a.String()))
		t.add(Check{ID: "dot", Shows: "DNS over TLS follows the policy as any host", Want: Block, Rule: rule}, tcpTo(at(a, 853)))
	}
	if a := t.tgt.Stranger6; a.IsValid() {
		t.add(Check{ID: "stranger-address6", Shows: "an IPv6 address that no rule allows is not reached", Want: Block, Rule: rule, IPv6: true},
			tcpTo(at(a, 443)), udpTo(at(a, 4000)))
	}
}

// lies adds flows to allowed names with another name in the flow, or none.
func (t *table) lies() {
	site, port := t.tgt.Site, t.tgt.OtherPort
	if site == "" {
		return
	}
	lie := func(id, shows, rule, said string, attempts ...attempt) {
		t.add(Check{ID: id, Shows: shows, Want: Block, Rule: rule, Said: said, Shared: true, Names: true}, attempts...)
	}
	web := func(id, shows, rule, said string, attempts ...attempt) {
		if !t.tgt.NoHTTP {
			lie(id, shows, rule, said, attempts...)
		}
	}
	if n := t.tgt.Twin; n != "" {
		lie("sni-twin", "a TLS name that is not allowed is refused at an allowed host's address", ruleNameMismatch, n, named("tls", site+":443", n))
		web("host-twin", "an HTTP Host that is not allowed is refused at an allowed host's address", ruleNameMismatch, n, named("http", site+":80", n))
	}
	lie("sni-missing", "TLS without a name is refused where a name is what allows it", ruleNameMissing, "", named("tls", site+":443", ""))
	web("host-missing", "HTTP without a Host is refused where a name is what allows it", ruleNameMissing, "", named("http", site+":80", ""))
	lie("no-protocol", "a flow that shows no name is refused", ruleNameMissing, "", tcpTo(site+":443"))
	if s := t.tgt.Second; s != "" {
		// Both names are allowed, so the name outside proves nothing; it is
		// denied only because of the address.
		lie("sni-second", "an allowed name is refused at the address of another allowed name", ruleNameMismatch, "", named("tls", s+":443", site))
		web("host-second", "an allowed HTTP Host is refused at the address of another allowed name", ruleNameMismatch, "", named("http", s+":80", site))
	}
	if a := t.tgt.StrangerAddr; a.IsValid() {
		t.add(Check{ID: "sni-lie", Shows: "saying an allowed name does not open an address that is not its", Want: Block, Rule: ruleAllowlist, Names: true},
			named("tls", at(a, 443), site), named("http", at(a, 80), site))
	}
	if port != 0 {
		t.add(Check{ID: "other-port", Shows: "an allowed name is not reached on a port that no rule allows", Want: Block, Rule: ruleAllowlist},
			named("tls", site+":"+itoa(port), site))
	}
	if slices.ContainsFunc(t.env.Network.Ports, isUDP) || slices.ContainsFunc(t.env.Network.Allow, func(r agentlab.NetworkRule) bool { return isUDP(r.Rule) && strings.HasPrefix(r.Rule, site) }) {
		return
	}
	t.add(Check{ID: "quic", Shows: "QUIC to an allowed name is refused, so that clients fall back to TCP", Want: Block, Rule: ruleAllowlist},
		to("quic", UDP, site+":443"))
}

func isUDP(text string) bool { return strings.HasSuffix(text, "/udp") }

// layer adds the rows of targets that the profile allows and a layer does not.
func (t *table) layer() {
	if n := t.tgt.Layered; n != "" {
		t.add(Check{ID: "layer-name", Shows: "a repository's layer narrows the names", Want: Block, Rule: layerPrefix + ruleAllowlist, Said: n}, question(n, "A"))
	}
	if a := t.tgt.LayeredAddr; a.IsValid() {
		t.add(Check{ID: "layer-address", Shows: "a repository's layer narrows the addresses", Want: Closed, Rule: layerPrefix + ruleAllowlist},
			tcpTo(at(a, 8080)), udpTo(at(a, 4000)))
	}
}

// off adds the rows of a sandbox that may only connect to its controller.
func (t *table) off() {
	var names, flows []attempt
	for _, n := range []string{t.tgt.Site, t.tgt.Stranger, t.tgt.Wild} {
		if n != "" {
			names = append(names, question(n, "A"))
		}
	}
	t.add(Check{ID: "off-names", Shows: "nothing is resolved in mode off", Want: Block, Rule: ruleOff}, names...)
	for _, a := range []netip.Addr{t.tgt.SiteAddr, t.tgt.StrangerAddr} {
		if a.IsValid() {
			flows = append(flows, tcpTo(at(a, 80)), tcpTo(at(a, 443)), tcpTo(at(a, 22)), udpTo(at(a, 443)), ping(a.String()))
		}
	}
	t.add(Check{ID: "off-flows", Shows: "nothing is reached in mode off", Want: Closed, Rule: ruleOff}, flows...)
	if a := t.tgt.Stranger6; a.IsValid() {
		t.add(Check{ID: "off-flows6", Shows: "nothing is reached by IPv6 in mode off", Want: Closed, Rule: ruleOff, IPv6: true},
			tcpTo(at(a, 443)), udpTo(at(a, 443)))
	}
}
