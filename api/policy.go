package api

// Policy is the network policy of a profile or a sandbox, with presets and list
// files replaced by their rules.
type Policy struct {
	Profile string          `json:"profile"`
	VMID    int             `json:"vmid,omitempty" doc:"VMID of the sandbox; absent for the policy of a profile"`
	Name    string          `json:"name,omitempty" doc:"Name of the sandbox"`
	Mode    string          `json:"mode" doc:"nat, allowlist or off"`
	Allow   []PolicyRule    `json:"allow"`
	Deny    []PolicyRule    `json:"deny"`
	Ports   []string        `json:"ports" doc:"In mode nat the only allowed ports (empty: all); in mode allowlist the ports of rules without a port (empty: 80, 443, 22)"`
	Limits  PolicyLimits    `json:"limits"`
	Private []PolicyPrivate `json:"private,omitempty" doc:"Private targets that the operator opened; all others are denied"`
	Layers  []PolicyLayer   `json:"layers" doc:"Additional policies, each of which must also allow a flow"`
	Pending bool            `json:"pending,omitempty" doc:"The policy has changed and is not applied yet"`

	UpstreamProxy bool `json:"upstream_proxy,omitempty" doc:"The internet is reached through the operator's upstream proxy, which supports only TCP to IPv4 addresses; rule proxy.unsupported denies the rest"`
}

// PolicyRule is a rule of a Policy.
type PolicyRule struct {
	Rule   string `json:"rule"`
	Source string `json:"source,omitempty" doc:"preset:NAME or file:NAME; absent for a rule in the profile itself"`
}

// PolicyPrivate is a private target that the operator opened: TCP to one port of one
// host.
type PolicyPrivate struct {
	Host   string `json:"host" doc:"A name, a private address, or host.agentlab.internal for the host itself"`
	Port   int    `json:"port"`
	Reason string `json:"reason"`
	Source string `json:"source,omitempty" doc:"config.yaml; absent for an entry in the profile itself"`
}

// PolicyLimits limit a sandbox's use of the network; 0 means the backend's default.
type PolicyLimits struct {
	BandwidthMbps int `json:"bandwidth_mbps" doc:"In each direction, in 10^6 bits per second; 0 means unlimited"`
	Flows         int `json:"flows" doc:"Maximum number of open connections"`
	DNSPerSecond  int `json:"dns_per_second" doc:"Maximum number of DNS queries per second"`
}

// PolicyLayer restricts a Policy.
type PolicyLayer struct {
	Mode  string       `json:"mode"`
	Allow []PolicyRule `json:"allow"`
	Deny  []PolicyRule `json:"deny"`
	Ports []string     `json:"ports"`
}

// PolicyCheck is the decision of a policy on a target. Making it does not resolve
// names or open connections.
type PolicyCheck struct {
	Target string       `json:"target" doc:"Normalized target"`
	Allow  bool         `json:"allow"`
	Rule   string       `json:"rule" doc:"Stable name of the rule that decided"`
	Source string       `json:"source,omitempty" doc:"Source of that rule: preset:NAME or file:NAME"`
	Means  string       `json:"means" doc:"Meaning of the rule"`
	Steps  []PolicyStep `json:"steps"`
	Notes  []string     `json:"notes" doc:"Conditions that the check cannot evaluate"`
}

// PolicyStep is a step of a PolicyCheck.
type PolicyStep struct {
	What   string `json:"what" doc:"dns (resolve the name), connect, or name (name that the connection presents)"`
	Allow  bool   `json:"allow"`
	Rule   string `json:"rule"`
	Source string `json:"source,omitempty"`
	Means  string `json:"means"`
}

// PolicyPreset is a shipped list of rules, for preset:NAME in profiles.
type PolicyPreset struct {
	Name  string   `json:"name"`
	About string   `json:"about"`
	Rules []string `json:"rules"`
}

// PolicyReload is the result of reloading a sandbox's policy.
type PolicyReload struct {
	VMID    int    `json:"vmid"`
	Name    string `json:"name"`
	Profile string `json:"profile"`
	Changed bool   `json:"changed" doc:"The profile's policy differs from that of the sandbox"`
	Pending bool   `json:"pending,omitempty" doc:"The policy is applied when the sandbox runs"`
	Problem string `json:"problem,omitempty" doc:"Why the policy of the profile is not applied"`
}
