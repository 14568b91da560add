package agentlab

import "time"

// Network is a sandbox's egress policy as its profile chooses it, with
// presets and included files already put in the place of their names. What is
// always denied (private, link-local, loopback, multicast, metadata addresses
// and DNS to any server but ours) is not here because it is no choice.
// Package internal/egress holds the language of the rules and decides.
type Network struct {
	Mode  string        `json:"mode"`            // NetworkNAT, NetworkAllowlist or NetworkOff
	Allow []NetworkRule `json:"allow,omitempty"` // of mode allowlist
	Deny  []NetworkRule `json:"deny,omitempty"`  // wins over Allow and over the mode
	// Ports restrict flows: "443" is TCP, "443/udp", "8000-8010/tcp". In mode
	// nat only these may be reached (none given: all); in mode allowlist they
	// are the ports of Allow rules that name none (none given: 80, 443, 22).
	Ports  []string      `json:"ports,omitempty"`
	Limits NetworkLimits `json:"limits,omitzero"`
	// Private are private destinations that the operator opens, although all
	// others are always denied. No repository's layer adds one; in a layer,
	// mode allowlist, they are those that the layer keeps open.
	Private []PrivateTarget `json:"private,omitempty"`
	// Layers are further policies, each of which must allow a flow too. A
	// repository's own configuration comes in here, so that it can narrow a
	// policy and never widen it.
	Layers []Network `json:"layers,omitempty"`
}

// PrivateTarget is one private destination that the operator opens: TCP to
// exactly one port of one host.
type PrivateTarget struct {
	Host   string `json:"host"`             // a full name, a private address, or host.agentlab.internal: the host itself
	Port   int    `json:"port"`             //
	Reason string `json:"reason"`           // why it is open; for people
	Source string `json:"source,omitempty"` // where it came from: "" the profile itself, else "config.yaml"
}

// NetworkRule is one allow or deny rule.
type NetworkRule struct {
	Rule   string `json:"rule"`             // e.g. "github.com", "*.debian.org:80", "140.82.112.0/20:22/tcp"
	Source string `json:"source,omitempty"` // where it came from: "" the profile itself, else "preset:NAME" or "file:NAME"
}

// NetworkLimits bound what one sandbox may use of the network; 0 means the
// enforcer's default.
type NetworkLimits struct {
	BandwidthMbps int `json:"bandwidth_mbps,omitempty"` // each way, in 10^6 bits per second; 0: unlimited
	Flows         int `json:"flows,omitempty"`          // open TCP connections, and as many UDP flows
	DNSPerSecond  int `json:"dns_per_second,omitempty"` // questions
}

// Network modes.
const (
	NetworkNAT       = "nat"       // the public internet but for Deny
	NetworkAllowlist = "allowlist" // only what Allow names
	NetworkOff       = "off"       // only the controller
)

// EgressRecord is the audit record of one decision, or of several equal ones
// that came close together, on what a guest wanted from the network. As JSON
// it is one line of an exported log.
type EgressRecord struct {
	Seq   int64     `json:"seq"`   // rising per sandbox, never given twice
	Time  time.Time `json:"time"`  // UTC, of the first decision
	Last  time.Time `json:"last"`  // UTC, of the last decision; equal to Time when Count is 1
	VMID  int       `json:"vmid"`  //
	Proto string    `json:"proto"` // "tcp", "udp", "icmp", "dns", or "ip-N" for another IP protocol
	// Name is what the guest named: the question put to DNS, the TLS or HTTP
	// name of a flow, or what its address was last resolved from; without a
	// final dot, "" when not known.
	Name    string `json:"name,omitempty"`
	Addr    string `json:"addr,omitempty"` // IP address; "" for a question that was not answered with one
	Port    int    `json:"port,omitempty"`
	Allow   bool   `json:"allow"`
	Rule    string `json:"rule"`              // stable name of the rule that decided
	Error   string `json:"error,omitempty"`   // why an allowed flow could not be opened
	Count   int    `json:"count"`             // decisions that this record stands for, at least 1
	Dropped int    `json:"dropped,omitempty"` // decisions before this one that were too many to be recorded
}
