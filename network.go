package agentlab

import "time"

// Network is a sandbox's egress policy as configured by its profile, with
// presets and included files expanded. It does not list what is always denied:
// private, link-local, loopback, multicast and metadata addresses, and DNS to
// any server other than AgentLab's. Package internal/egress parses the rules
// and decides.
type Network struct {
	Mode  string        `json:"mode"`            // NetworkNAT, NetworkAllowlist or NetworkOff
	Allow []NetworkRule `json:"allow,omitempty"` // of mode allowlist
	Deny  []NetworkRule `json:"deny,omitempty"`  // wins over Allow and over the mode
	// Ports restrict flows: "443" is TCP, "443/udp", "8000-8010/tcp". In mode
	// nat, only these ports are allowed; empty means all. In mode allowlist,
	// they are the ports of Allow rules without a port; empty means 80, 443
	// and 22.
	Ports  []string      `json:"ports,omitempty"`
	Limits NetworkLimits `json:"limits,omitzero"`
	// Private lists private destinations that the operator allows; all
	// others are always denied. The layer of a repository cannot add one: in
	// a layer with mode allowlist, Private lists those that stay allowed.
	Private []PrivateTarget `json:"private,omitempty"`
	// Layers are further policies; a flow is allowed only if each of them
	// allows it too. The configuration of a repository becomes a layer, so
	// it can narrow a policy and never widen it.
	Layers []Network `json:"layers,omitempty"`
}

// PrivateTarget is one private destination that the operator allows: TCP to
// exactly one port of one host.
type PrivateTarget struct {
	Host   string `json:"host"`             // a full name, a private address, or host.agentlab.internal: the host itself
	Port   int    `json:"port"`             //
	Reason string `json:"reason"`           // why it is allowed; shown to users
	Source string `json:"source,omitempty"` // origin: "" for the profile itself, else "config.yaml"
}

// NetworkRule is one allow or deny rule.
type NetworkRule struct {
	Rule   string `json:"rule"`             // e.g. "github.com", "*.debian.org:80", "140.82.112.0/20:22/tcp"
	Source string `json:"source,omitempty"` // origin: "" for the profile itself, else "preset:NAME" or "file:NAME"
}

// NetworkLimits bound what one sandbox may use of the network; 0 means the
// enforcer's default.
type NetworkLimits struct {
	BandwidthMbps int `json:"bandwidth_mbps,omitempty"` // in each direction, in 10^6 bits per second; 0 means unlimited
	Flows         int `json:"flows,omitempty"`          // open TCP connections, and as many UDP flows
	DNSPerSecond  int `json:"dns_per_second,omitempty"` // questions
}

// Network modes.
const (
	NetworkNAT       = "nat"       // the public internet except Deny
	NetworkAllowlist = "allowlist" // only what Allow names
	NetworkOff       = "off"       // only the controller
)

// EgressRecord is the audit record of one egress decision, or of several equal
// decisions within a short time. As JSON it is one line of an exported log.
type EgressRecord struct {
	Seq   int64     `json:"seq"`   // increasing per sandbox, never reused
	Time  time.Time `json:"time"`  // UTC, of the first decision
	Last  time.Time `json:"last"`  // UTC, of the last decision; equal to Time when Count is 1
	VMID  int       `json:"vmid"`  //
	Proto string    `json:"proto"` // "tcp", "udp", "icmp", "dns", or "ip-N" for another IP protocol
	// Name is the name in the guest's request: the DNS question, the TLS or
	// HTTP name of a flow, or the name that its address was last resolved
	// from. It has no final dot; "" means not known.
	Name    string `json:"name,omitempty"`
	Addr    string `json:"addr,omitempty"` // IP address; "" for a DNS question without an address in its answer
	Port    int    `json:"port,omitempty"`
	Allow   bool   `json:"allow"`
	Rule    string `json:"rule"`              // stable name of the matching rule
	Error   string `json:"error,omitempty"`   // why an allowed flow could not be opened
	Count   int    `json:"count"`             // number of decisions in this record, at least 1
	Dropped int    `json:"dropped,omitempty"` // earlier decisions that were not recorded because there were too many
}
