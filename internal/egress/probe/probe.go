// Package probe has a table of what a sandbox may and may not reach, as data,
// and its runner. The same rows are tested from inside a real VM against the
// userspace network, from a namespace against nftables, and by 'agentlab
// verify' on a live backend.
//
// A row has the name of the policy rule without which its result would differ.
// The table does not use the code of package egress for this, so that it does
// not repeat that code's errors.
package probe

import (
	"context"
	"net/netip"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Want is the expected result of a row.
type Want string

// The results.
const (
	// Reach: the target answers.
	Reach Want = "reach"
	// Block: no answer of the target arrives and, if the outside is watched,
	// nothing arrives there. A connection may be accepted if the name in its
	// first bytes decides.
	Block Want = "block"
	// Closed is Block without an accepted connection.
	Closed Want = "closed"
)

// Protocols of a Trace. Other IP protocols are "ip-N".
const (
	TCP  = "tcp"
	UDP  = "udp"
	ICMP = "icmp"
	DNS  = "dns"
)

// Trace is what a probe looks like in an audit record and outside, where it
// would arrive.
type Trace struct {
	Proto string     // TCP, UDP, ICMP, DNS, "ip-N"
	Addr  netip.Addr // zero for a DNS question and if the guest finds it by Name
	Port  uint16
	Name  string // the question, or the name that resolves to Addr; without a final dot
}

// Check is one row of the table.
type Check struct {
	ID    string // stable
	Shows string // one sentence: what it proves if it passes
	Want  Want
	// Rule is the rule of the recorded denial; "" if nothing is recorded
	// (malformed packets) or the row is Reach.
	Rule string
	// Probes run in any order; the row passes only if each has the expected
	// result. Their IDs are ID, and ID/2, ID/3, … from the second on.
	Probes []guestapi.Probe
	Traces []Trace // one for each of Probes
	// Shared means that allowed rows dial the same address and port, so that
	// a connection there proves nothing.
	Shared bool
	// Said is a host name that must not appear outside (TLS server name,
	// HTTP Host, DNS question).
	Said string
	// IPv6 means that the guest needs IPv6 for a Reach row, and for the
	// record of a denial.
	IPv6 bool
	// Opened means that the operator allows the target, so that the guest
	// may get a private address.
	Opened bool
	// Names means that the enforcer must read names from flows.
	Names bool
}

// Env is the environment of a run of the table: the guest, its surroundings
// and the known targets outside.
type Env struct {
	Network agentlab.Network // the policy in force
	Targets Targets

	Guest4, Guest6       netip.Addr // the guest's own addresses; zero: none
	Gateway4, Gateway6   netip.Addr // the controller's address for guests
	Neighbour4           netip.Addr // another sandbox; zero: an address where one could be
	Neighbour6           netip.Addr
	Host                 []netip.Addr // further addresses of the host itself (LAN, tailnet, other bridges)
	ControllerPort       uint16       // answers HTTP in every mode; 0: not served, the row is omitted
	Frames               bool         // the prober is root in the guest and also sends whole Ethernet frames
	Cards                bool         // the enforcer knows the guest's MAC address and denies others; not needed if a guest is alone on its link
	MayBeOffline         bool         // the targets are on the real internet: a row about a host that does not answer is skipped if Records show that the policy allowed it
	NoNames              bool         // the enforcer cannot read names from flows: those rows are skipped
	Records              func(ctx context.Context) ([]agentlab.EgressRecord, error)
	Outside              func() Outside
	RecordsWithinSeconds int // how long to wait for the next record; 0 means 3
}

// Outside is what arrived outside since the start of the run.
type Outside struct {
	Flows []Trace  // Proto, Addr, Port
	Names []string // host names in connections and questions; without final dots
}

// Exec runs probes in the guest, through 'agent-runner probe' or in this
// process, and returns one result for each. Its results are not trusted.
type Exec func(ctx context.Context, probes []guestapi.Probe) ([]guestapi.ProbeResult, error)

// Targets are the hosts outside. A row without its target is omitted. Names
// have no final dot. Reference returns a full set with policies for it.
type Targets struct {
	Site     string     // answers on TCP 443, and on 80 unless NoHTTP; allowed in nat and allowlist
	NoHTTP   bool       // it is not known whether Site answers on port 80
	SiteAddr netip.Addr // address of Site, if known
	Site6    string     // the same with only an AAAA record
	Twin     string     // has Site's address; in no allow rule
	Second   string     // another allowed name, at another address
	Stranger string     // exists; in no allow rule
	Denied   string     // exists; denied in every mode
	// DeniedRule and DeniedAddrRule are the texts of the deny rules.
	DeniedRule     string
	DeniedAddr     netip.Addr // answers; denied in every mode
	DeniedAddrRule string
	Address        netip.AddrPort // answers on TCP; allowed by an address rule and in nat
	Datagram       netip.AddrPort // answers on UDP; allowed by a rule and in nat
	StrangerAddr   netip.Addr     // answers on every port; in no rule
	Stranger6      netip.Addr     // the same, IPv6
	Explicit       string         // "name:port": allowed exactly like this; answers on TCP without a name
	Wild           string         // a name that a wildcard rule allows
	Apex           string         // the name above the wildcard; exists, not allowed
	OtherPort      uint16         // Site answers there; no rule allows it in allowlist mode, nor Ports in nat
	PingAddr       netip.Addr     // answers to an echo request; allowed by an address rule and in nat
	Resolver       netip.Addr     // a DNS server on port 53, not AgentLab's
	Resolver6      netip.Addr
	DoT            netip.Addr // answers TLS on port 853; allowed in nat
	Question       string     // a name that Resolver resolves
	Private        []Rebound  // allowed names that resolve to forbidden addresses
	Flip           string     // allowed; its first answer is public, the later ones are private
	Opened         Opened     // private destinations that the policy allows
	Layered        string     // allowed by the profile, not by Network.Layers; "" when there are none
	LayeredAddr    netip.Addr // address of Layered
}

// Opened are private destinations that a policy allows, and targets next to
// them. The zero value means none.
type Opened struct {
	Address  netip.AddrPort // answers; allowed by its address
	Address6 netip.AddrPort // the same, IPv6
	Name     string         // allowed by name on port 443, and on Port
	Port     uint16
	HostPort uint16   // of the host itself, by the controller's address
	Rebound  []string // allowed by name, but resolve to addresses that the operator cannot allow
}

// Rebound is a name whose answer a guest must not get.
type Rebound struct {
	Name string
	Type string // "A" or "AAAA"
}
