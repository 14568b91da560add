// Package probe is the table of what a sandbox may and may not reach, as
// data, and the one runner of it. The same rows are tried from inside a real
// VM against the userspace network, from a namespace against nftables, and by
// 'agentlab verify' on a live backend.
//
// A row says what guards it: the rule of the policy without which it would
// come out otherwise. The table states that by itself and asks no code of the
// policy, so that it does not follow that code's mistakes.
package probe

import (
	"context"
	"net/netip"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Want is how a row must come out.
type Want string

// The outcomes.
const (
	// Reach: the target answers.
	Reach Want = "reach"
	// Block: nothing of the target's comes back, and where the outside can be
	// watched nothing arrives there. A connection may be accepted, when the
	// name in its first bytes decides.
	Block Want = "block"
	// Closed is Block, and not even a connection is accepted.
	Closed Want = "closed"
)

// Protocols of a Trace. Other IP protocols are "ip-N".
const (
	TCP  = "tcp"
	UDP  = "udp"
	ICMP = "icmp"
	DNS  = "dns"
)

// Trace is how a probe shows up where it is decided (an audit record) and
// where it would arrive (outside).
type Trace struct {
	Proto string     // TCP, UDP, ICMP, DNS, "ip-N"
	Addr  netip.Addr // not valid for a DNS question and where the guest finds it by Name
	Port  uint16
	Name  string // the question, or the host that Addr is found by; without a final dot
}

// Check is one row of the table.
type Check struct {
	ID    string // stable
	Shows string // one sentence: what it proves when it passes
	Want  Want
	// Rule guards the row: the name that the denial is recorded under. ""
	// when nothing is recorded (malformed packets) or the row is Reach.
	Rule string
	// Probes are tried in any order; the row holds only if each comes out as
	// wanted. Their ids are ID, or ID/2, ID/3, … from the second on.
	Probes []guestapi.Probe
	Traces []Trace // one for each of Probes
	// Shared says that rows that are allowed dial the same address and port,
	// so that a connection seen there proves nothing.
	Shared bool
	// Said is a host name that no connection outside may have named (TLS
	// server name, HTTP Host, DNS question).
	Said string
	// IPv6 says that the guest needs IPv6 for a Reach row to mean something
	// and for a denial to be recorded.
	IPv6 bool
	// Opened says that the operator opened the target, so that the guest may
	// be told a private address.
	Opened bool
	// Names says that the enforcer must read names out of flows.
	Names bool
}

// Env is where the table is run: who the guest is, what surrounds it and what
// is known to be outside.
type Env struct {
	Network agentlab.Network // the policy in force
	Targets Targets

	Guest4, Guest6       netip.Addr // the guest's own addresses; not valid: none
	Gateway4, Gateway6   netip.Addr // the controller's address, as the guest knows it
	Neighbour4           netip.Addr // another sandbox; not valid: an address where one would be
	Neighbour6           netip.Addr
	Host                 []netip.Addr // further addresses of the host itself (LAN, tailnet, other bridges)
	ControllerPort       uint16       // that answers HTTP in every mode; 0: none is served, the row is left out
	Frames               bool         // the prober is root in the guest: whole Ethernet frames are sent too
	Cards                bool         // the enforcer knows the guest's card and refuses others; where a guest is alone on its link that protects nobody
	MayBeOffline         bool         // the targets are on the real internet: a row about a host that is not there is skipped, if Records show that the policy allowed it
	NoNames              bool         // the enforcer cannot read names out of flows: those rows are skipped
	Records              func(ctx context.Context) ([]agentlab.EgressRecord, error)
	Outside              func() Outside
	RecordsWithinSeconds int // how long to wait for a record when no other comes; 0 means 3
}

// Outside is what arrived beyond the enforcer since the table began.
type Outside struct {
	Flows []Trace  // Proto, Addr, Port
	Names []string // host names that connections named and questions that came; without final dots
}

// Exec runs probes in the guest, through 'agent-runner probe' or in this
// process, and returns one result for each. What it returns is not trusted.
type Exec func(ctx context.Context, probes []guestapi.Probe) ([]guestapi.ProbeResult, error)

// Targets are the hosts outside. A row whose target is not given is left out.
// Names have no final dot. Reference returns a full set with policies for it.
type Targets struct {
	Site     string     // answers on TCP 443, and on 80 but for NoHTTP; allowed in nat and allowlist
	NoHTTP   bool       // whether Site is reached on port 80 is not known
	SiteAddr netip.Addr // where Site is, if that is known
	Site6    string     // the same with an AAAA record only
	Twin     string     // has Site's address; no allow rule names it
	Second   string     // another allowed name, at another address
	Stranger string     // exists; no allow rule names it
	Denied   string     // exists; a deny rule names it, in every mode
	// DeniedRule and DeniedAddrRule are the texts of the deny rules.
	DeniedRule     string
	DeniedAddr     netip.Addr // answers; a deny rule holds it, in every mode
	DeniedAddrRule string
	Address        netip.AddrPort // answers on TCP; an address rule allows it, and nat
	Datagram       netip.AddrPort // answers on UDP; a rule allows it, and nat
	StrangerAddr   netip.Addr     // answers on every port; no rule names it
	Stranger6      netip.Addr     // the same, IPv6
	Explicit       string         // "name:port": a rule allows just that; answers on TCP without a name
	Wild           string         // a name that a wildcard rule allows
	Apex           string         // the name that the wildcard stands below; exists, not allowed
	OtherPort      uint16         // Site answers there; no rule allows it in allowlist mode, nor Ports in nat
	PingAddr       netip.Addr     // answers to an echo; allowed by an address rule, and nat
	Resolver       netip.Addr     // a DNS server on port 53, not ours
	Resolver6      netip.Addr
	DoT            netip.Addr // answers TLS on port 853; allowed in nat
	Question       string     // a name that Resolver knows
	Private        []Rebound  // names that are allowed and resolve to forbidden addresses
	Flip           string     // allowed; its first answer is public, the later ones are private
	Opened         Opened     // private destinations that the policy opens
	Layered        string     // allowed by the profile, not by Network.Layers; "" when there are none
	LayeredAddr    netip.Addr // where Layered is
}

// Opened are private destinations that a policy opens, and what lies beside
// them. The zero value stands for none.
type Opened struct {
	Address  netip.AddrPort // answers; opened by its address
	Address6 netip.AddrPort // the same, IPv6
	Name     string         // opened by name on port 443, and on Port
	Port     uint16
	HostPort uint16   // of the host itself, by the controller's address
	Rebound  []string // opened by name, and resolve to what the operator cannot open
}

// Rebound is a name whose answer no guest may see.
type Rebound struct {
	Name string
	Type string // "A" or "AAAA"
}
