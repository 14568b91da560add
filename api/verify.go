package api

// VerifyRequest asks for a sandbox's network to be tried.
type VerifyRequest struct {
	Site string `json:"site,omitempty" doc:"A public host name that the policy allows and that answers with TLS; chosen by the policy when empty"`
}

// VerifyReport tells what a sandbox's network let through.
type VerifyReport struct {
	VMID    int      `json:"vmid"`
	Name    string   `json:"name"`
	Profile string   `json:"profile"`
	Mode    string   `json:"mode" doc:"Of the network: nat, allowlist or off"`
	OK      bool     `json:"ok" doc:"No check failed"`
	Passed  int      `json:"passed"`
	Failed  int      `json:"failed"`
	Skipped int      `json:"skipped"`
	Records bool     `json:"records" doc:"The backend's egress records were looked at too; without them a refusal only shows that nothing came back"`
	Checks  []Verify `json:"checks"`
}

// Verify is one check of a VerifyReport.
type Verify struct {
	ID     string `json:"id" doc:"Stable"`
	Shows  string `json:"shows" doc:"What it shows when it passes"`
	Want   string `json:"want" doc:"reach, block or closed (not even a connection is accepted)"`
	Rule   string `json:"rule,omitempty" doc:"The rule that guards it"`
	Status string `json:"status" doc:"pass, fail or skip"`
	Detail string `json:"detail,omitempty" doc:"Why it failed or was skipped, or how it was seen to hold"`
}
