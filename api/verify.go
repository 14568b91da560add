package api

// VerifyRequest asks for a sandbox's network to be tried.
type VerifyRequest struct {
	Site string `json:"site,omitempty" doc:"A public host name that the policy allows and that answers with TLS; chosen by the policy when empty"`
}

// VerifyReport tells what a sandbox's network let through.
type VerifyReport struct {
	VMID    int    `json:"vmid"`
	Name    string `json:"name"`
	Profile string `json:"profile"`
	Mode    string `json:"mode" doc:"Of the network: nat, allowlist or off"`
	OK      bool   `json:"ok" doc:"No check failed"`
	Passed  int    `json:"passed"`
	Failed  int    `json:"failed"`
	Skipped int    `json:"skipped"`
	// Complete and SkipReasons tell what OK leaves open.
	Complete    bool         `json:"complete" doc:"No check was skipped; else the network is not fully checked"`
	SkipReasons []VerifySkip `json:"skip_reasons,omitempty" doc:"Why checks were skipped, each reason once"`
	Records     bool         `json:"records" doc:"The backend's egress records were looked at too; without them a refusal only shows that nothing came back"`
	Checks      []Verify     `json:"checks"`
}

// VerifySkip is why checks of a VerifyReport were skipped.
type VerifySkip struct {
	Reason string `json:"reason"`
	Count  int    `json:"count" doc:"Checks that were skipped for it"`
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
