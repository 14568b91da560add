package api

// Policy is the network policy of a profile or a sandbox, with presets and
// list files put in the place of their names.
type Policy struct {
	Profile string          `json:"profile"`
	VMID    int             `json:"vmid,omitempty" doc:"Of the sandbox; absent when it is a profile's policy"`
	Name    string          `json:"name,omitempty" doc:"Of the sandbox"`
	Mode    string          `json:"mode" doc:"nat, allowlist or off"`
	Allow   []PolicyRule    `json:"allow"`
	Deny    []PolicyRule    `json:"deny"`
	Ports   []string        `json:"ports" doc:"In mode nat the only ones that may be reached (none: all); in mode allowlist those of rules that name none (none: 80, 443, 22)"`
	Limits  PolicyLimits    `json:"limits"`
	Private []PolicyPrivate `json:"private,omitempty" doc:"Private destinations that the operator opened, although all others are denied"`
	Layers  []PolicyLayer   `json:"layers" doc:"Further policies, each of which must allow a flow too"`
	Pending bool            `json:"pending,omitempty" doc:"It was changed and is not in force yet"`

	UpstreamProxy bool `json:"upstream_proxy,omitempty" doc:"The internet is reached through the operator's upstream proxy, which carries only TCP to IPv4 addresses; the rest is denied by rule proxy.unsupported"`
}

// PolicyRule is one rule of a Policy.
type PolicyRule struct {
	Rule   string `json:"rule"`
	Source string `json:"source,omitempty" doc:"preset:NAME or file:NAME; absent when it stands in the profile itself"`
}

// PolicyPrivate is one private destination that the operator opened: TCP to
// exactly one port of one host.
type PolicyPrivate struct {
	Host   string `json:"host" doc:"A name, a private address, or host.agentlab.internal: the host itself"`
	Port   int    `json:"port"`
	Reason string `json:"reason"`
	Source string `json:"source,omitempty" doc:"config.yaml; absent when it stands in the profile itself"`
}

// PolicyLimits bound what a sandbox may use of the network; 0 is the backend's
// default.
type PolicyLimits struct {
	BandwidthMbps int `json:"bandwidth_mbps" doc:"Each way, in 10^6 bits per second; 0 is unlimited"`
	Flows         int `json:"flows" doc:"Open connections"`
	DNSPerSecond  int `json:"dns_per_second" doc:"DNS questions"`
}

// PolicyLayer narrows a Policy.
type PolicyLayer struct {
	Mode  string       `json:"mode"`
	Allow []PolicyRule `json:"allow"`
	Deny  []PolicyRule `json:"deny"`
	Ports []string     `json:"ports"`
}

// PolicyCheck tells what a policy would do with a target. Nothing is resolved
// or dialled for it.
type PolicyCheck struct {
	Target string       `json:"target" doc:"As it was understood"`
	Allow  bool         `json:"allow"`
	Rule   string       `json:"rule" doc:"Stable name of the rule that decided"`
	Source string       `json:"source,omitempty" doc:"Where that rule came from: preset:NAME or file:NAME"`
	Means  string       `json:"means" doc:"What the rule says"`
	Steps  []PolicyStep `json:"steps"`
	Notes  []string     `json:"notes" doc:"What it depends on that cannot be known now"`
}

// PolicyStep is one decision of a PolicyCheck.
type PolicyStep struct {
	What   string `json:"what" doc:"dns (its name is resolved), connect, or name (what the connection itself names)"`
	Allow  bool   `json:"allow"`
	Rule   string `json:"rule"`
	Source string `json:"source,omitempty"`
	Means  string `json:"means"`
}

// PolicyPreset is a shipped list of rules, which profiles name as
// preset:NAME.
type PolicyPreset struct {
	Name  string   `json:"name"`
	About string   `json:"about"`
	Rules []string `json:"rules"`
}

// PolicyReload tells what became of one sandbox's policy.
type PolicyReload struct {
	VMID    int    `json:"vmid"`
	Name    string `json:"name"`
	Profile string `json:"profile"`
	Changed bool   `json:"changed" doc:"The profile's policy is another than the sandbox had"`
	Pending bool   `json:"pending,omitempty" doc:"It is not in force yet, as the sandbox does not run"`
	Problem string `json:"problem,omitempty" doc:"Why the sandbox has not, or not yet, the policy of its profile"`
}
