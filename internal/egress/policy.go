package egress

import (
	"fmt"
	"net/netip"
)

// Proto is the kind of a flow.
type Proto string

// The protocols that a policy knows. A flow of any other is denied.
const (
	TCP  Proto = "tcp"
	UDP  Proto = "udp"
	ICMP Proto = "icmp"
	DNS  Proto = "dns" // a question put to our own DNS server
)

// Flow is one thing that a guest wants to do.
type Flow struct {
	Proto Proto
	Dst   netip.AddrPort // for DNS and ICMP the port is not looked at
	// Names are those that this guest was told resolve to Dst, by us and not
	// longer ago than the answer's time to live allows; for DNS, the question
	// alone. Canonical: lower case, with a final dot.
	Names []string
	// Host says that Dst is the controller's address, and a port on it that
	// the controller does not serve: the host itself is meant.
	Host bool
}

// DNSPort is the port that only our own server answers, and DNS over TLS the
// one beside it that follows the policy as any other.
const DNSPort = 53

// Rules that are not about an address. Rule names are stable: they are
// written to audit records and may be filtered on.
const (
	RuleNAT       = "mode.nat"          // allowed because the mode is nat
	RuleOff       = "mode.off"          // denied because the mode is off
	RuleProtocol  = "always.protocol"   // denied because the protocol is not carried
	RuleRebinding = "always.rebinding"  // an address in a DNS answer was withheld
	RuleLimit     = "limit.flows"       // denied because the sandbox has too many flows
	RuleRate      = "limit.rate"        // denied because the sandbox asks too quickly
	RuleHostAddr  = "always.host"       // an address of the host itself
	RuleLAN       = "always.lan"        // an address on a network that the host is directly on
	RuleGateway   = "always.controller" // a port on the controller's address that is not served

	RuleForeignDNS   = "always.dns"        // DNS to another server than ours
	RuleAllowlist    = "mode.allowlist"    // denied because no allow rule matches
	RulePorts        = "ports"             // denied because the port is none of the policy's
	RuleNameMissing  = "name.missing"      // denied because the flow does not name a host
	RuleNameMismatch = "name.mismatch"     // denied because the host that the flow names is not allowed at this address
	RuleProxy        = "proxy.unsupported" // denied because it cannot go through the operator's upstream proxy
	RuleNameUnread   = "name.quic"         // denied because the names of denied hosts cannot be read from UDP; clients go on with TCP

	// Beginnings of rule names.
	RuleAllowPrefix = "allow:" // the text of an allow rule follows
	RuleDenyPrefix  = "deny:"  // the text of a deny rule follows
	RuleLayerPrefix = "layer." // denied by a further layer; its rule follows
)

// Verdict is the answer to a Flow.
type Verdict struct {
	Allow bool
	// NeedName says that Allow holds only if the flow itself names a host
	// that DecideName allows: the enforcer reads the TLS server name or the
	// HTTP Host of the guest's first bytes before it dials.
	NeedName bool
	Rule     string // stable name of the rule that decided
}

// DeniedError is what a dialer returns when it refuses an address by a rule.
type DeniedError struct {
	Addr netip.Addr
	Rule string
}

func (e *DeniedError) Error() string {
	return fmt.Sprintf("egress to %s is denied by rule %s", e.Addr, e.Rule)
}

// FilterAnswer splits the addresses of a DNS answer into those that a guest
// may see and those that no policy allows. A name that resolves to a private
// address is how DNS rebinding works, so such addresses are withheld. The
// order is kept; addrs is not changed.
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
