package api

// HostChecks are the results of the checks of the host.
type HostChecks struct {
	Backend string    `json:"backend"`
	Bridge  bool      `json:"bridge" doc:"Sandboxes use a bridge of the host whose firewall the daemon manages"`
	Checks  []Finding `json:"checks" doc:"All checks, including those that passed"`
}

// HostNetwork is the state of the firewall of the bridge for sandboxes.
type HostNetwork struct {
	Applied   bool     `json:"applied" doc:"All tables are loaded"`
	Tables    []string `json:"tables" doc:"Families of the loaded tables: inet, bridge, arp"`
	Drift     []string `json:"drift" doc:"Missing, changed or unexpected rules; empty if there are none"`
	Bridge    string   `json:"bridge"`
	Subnet    string   `json:"subnet"`
	Subnet6   string   `json:"subnet6,omitempty"`
	Ports     []string `json:"ports" doc:"Ports of the bridge"`
	Sandboxes int      `json:"sandboxes" doc:"Number of sandboxes that may use the bridge"`
	Serving   bool     `json:"serving" doc:"The daemon serves DNS and checks names on the bridge; otherwise sandboxes cannot resolve names"`
}
