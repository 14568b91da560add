package egress

import (
	"fmt"
	"net/netip"
)

// Proto is the kind of a flow.
type Proto string

// The protocols of policies. A flow of any other protocol is denied.
const (
	TCP  Proto = "tcp"
	UDP  Proto = "udp"
	ICMP Proto = "icmp"
	DNS  Proto = "dns" // a question to AgentLab's DNS server
)

// Flow is one network access of a guest.
type Flow struct {
	Proto Proto
	Dst   netip.AddrPort // for DNS and ICMP the port is ignored
	// Names are the names that AgentLab's DNS server has resolved to Dst for
	// this guest, within the time to live of the answers; for DNS, only the
	// question. They are canonical: lower case, with a final dot.
	Names []string
	// Host means that Dst is the controller's address with a port that the
	// controller does not serve, which is a port of the host itself.
	Host bool
}

// DNSPort is the port that is only allowed to AgentLab's DNS server. The port
// of DNS over TLS is subject to the policy like any other.
const DNSPort = 53

// Rules without an address. Rule names are stable: they are written to audit
// records, and users filter by them.
const (
	RuleNAT       = "mode.nat"          // allowed because the mode is nat
	RuleOff       = "mode.off"          // denied because the mode is off
	RuleProtocol  = "always.protocol"   // denied because the protocol is not supported
	RuleRebinding = "always.rebinding"  // an address was removed from a DNS answer
	RuleLimit     = "limit.flows"       // denied because the sandbox has too many flows
	RuleRate      = "limit.rate"        // denied because the sandbox exceeds its rate
	RuleHostAddr  = "always.host"       // an address of the host itself
	RuleLAN       = "always.lan"        // an address on a network that the host is directly connected to
	RuleGateway   = "always.controller" // a port of the controller's address that is not served

	RuleForeignDNS   = "always.dns"        // DNS to a server other than AgentLab's
	RuleAllowlist    = "mode.allowlist"    // denied because no allow rule matches
	RulePorts        = "ports"             // denied because the port is not in the policy's ports
	RuleNameMissing  = "name.missing"      // denied because the flow has no host name
	RuleNameMismatch = "name.mismatch"     // denied because the host name of the flow is not allowed at this address
	RuleProxy        = "proxy.unsupported" // denied because the operator's upstream proxy does not support it
	RuleNameUnread   = "name.quic"         // denied because names of denied hosts cannot be read from UDP; clients fall back to TCP

	// Prefixes of rule names.
	RuleAllowPrefix = "allow:" // the text of an allow rule follows
	RuleDenyPrefix  = "deny:"  // the text of a deny rule follows
	RuleLayerPrefix = "layer." // denied by a further layer; its rule follows
)

// Verdict is the answer to a Flow.
type Verdict struct {
	Allow bool
	// NeedName means that Allow is valid only if the flow itself has a host
	// name that DecideName allows: the enforcer reads the TLS server name
	// or the HTTP Host from the guest's first bytes before it dials.
	NeedName bool
	Rule     string // stable name of the matching rule
}

// DeniedError is the error of a dialer that refuses an address by a rule.
type DeniedError struct {
	Addr netip.Addr
	Rule string
}

func (e *DeniedError) Error() string {
	return fmt.Sprintf("egress to %s is denied by rule %s", e.Addr, e.Rule)
}

// FilterAnswer splits the addresses of a DNS answer into those that a guest
// may see and those that no policy allows. DNS rebinding uses names that
// resolve to private addresses, so such addresses are withheld. The order is
// kept; addrs is not changed.
func FilterAnswer(addrs []netip.Addr) (keep, withheld []netip.Addr) {
	for _, a := range addrs {
		if _, denied := AlwaysDenied(a); denied && !Dropped(RuleRebinding) {
			withheld = append(withheld, a)
		} else {
			keep = append(keep, a)
		}
	}
	return keep, withheld
}
