package api

// HostChecks is what the daemon and its backend find on the host.
type HostChecks struct {
	Backend string    `json:"backend"`
	Bridge  bool      `json:"bridge" doc:"Sandboxes are on a bridge of the host, whose firewall is this daemon's"`
	Checks  []Finding `json:"checks" doc:"Everything that was looked at, also what is right"`
}

// HostNetwork is the state of the rules for sandboxes on a bridge.
type HostNetwork struct {
	Applied   bool     `json:"applied" doc:"Whether all tables are in the kernel"`
	Tables    []string `json:"tables" doc:"Families of the tables that are loaded: inet, bridge, arp"`
	Drift     []string `json:"drift" doc:"What is missing, changed or strange there; empty when all is as it should be"`
	Bridge    string   `json:"bridge"`
	Subnet    string   `json:"subnet"`
	Subnet6   string   `json:"subnet6,omitempty"`
	Ports     []string `json:"ports" doc:"What is plugged into the bridge"`
	Sandboxes int      `json:"sandboxes" doc:"Sandboxes that are let in"`
	Serving   bool     `json:"serving" doc:"Whether this program answers DNS and checks names on the bridge; without it sandboxes resolve nothing"`
}
