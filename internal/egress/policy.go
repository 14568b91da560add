package egress

import (
	"fmt"
	"net/netip"

	"github.com/agentlab-vm/agentlab"
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
	RuleGateway   = "always.controller" // a port on the controller's address that is not served
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

// Policy is the compiled network policy of one sandbox. It is immutable and
// safe for concurrent use.
type Policy struct {
	mode string
}

// New compiles the network section of a profile. The error is
// agentlab.CodeInvalid and names the field.
func New(n agentlab.Network) (*Policy, error) {
	switch n.Mode {
	case agentlab.NetworkNAT, agentlab.NetworkOff:
		return &Policy{mode: n.Mode}, nil
	default:
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "unknown network mode %q", n.Mode).
			WithField("network.mode").WithHint("use %q (the public internet) or %q (only the controller)", agentlab.NetworkNAT, agentlab.NetworkOff)
	}
}

// Mode returns the mode that the policy was made with.
func (p *Policy) Mode() string { return p.mode }

// DecideName tells whether a TCP flow that Decide allowed with NeedName may
// go on now that the guest has named a host in it. name is what a TLS server
// name or an HTTP Host said, without port, "" when the guest's first bytes
// hold neither. f is as it was given to Decide.
func (p *Policy) DecideName(f Flow, name string) Verdict {
	_ = name
	return p.Decide(f)
}

// Decide tells whether a flow may be opened. It does not know the
// controller's own services: an enforcer serves those itself, in every mode.
func (p *Policy) Decide(f Flow) Verdict {
	switch f.Proto {
	case TCP, UDP, ICMP:
		if rule, denied := AlwaysDenied(f.Dst.Addr()); denied {
			return Verdict{Rule: rule}
		}
	case DNS:
	default:
		return Verdict{Rule: RuleProtocol}
	}
	if p.mode != agentlab.NetworkNAT {
		return Verdict{Rule: RuleOff}
	}
	return Verdict{Allow: true, Rule: RuleNAT}
}

// FilterAnswer splits the addresses of a DNS answer into those that a guest
// may see and those that no policy allows. A name that resolves to a private
// address is how DNS rebinding works, so such addresses are withheld. The
// order is kept; addrs is not changed.
func FilterAnswer(addrs []netip.Addr) (keep, withheld []netip.Addr) {
	for _, a := range addrs {
		if _, denied := AlwaysDenied(a); denied {
			withheld = append(withheld, a)
		} else {
			keep = append(keep, a)
		}
	}
	return keep, withheld
}
