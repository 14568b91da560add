package api

// VerifyRequest is the request to check the network of a sandbox.
type VerifyRequest struct {
	Site string `json:"site,omitempty" doc:"Public host name that the policy allows and that serves TLS; default: from the policy"`
}

// VerifyReport is the result of checking the network of a sandbox.
type VerifyReport struct {
	VMID    int    `json:"vmid"`
	Name    string `json:"name"`
	Profile string `json:"profile"`
	Mode    string `json:"mode" doc:"Network mode: nat, allowlist or off"`
	OK      bool   `json:"ok" doc:"No check failed"`
	Passed  int    `json:"passed"`
	Failed  int    `json:"failed"`
	Skipped int    `json:"skipped"`
	// Complete and SkipReasons qualify OK.
	Complete    bool         `json:"complete" doc:"No check was skipped; otherwise the network is not fully checked"`
	SkipReasons []VerifySkip `json:"skip_reasons,omitempty" doc:"Why checks were skipped, each reason once"`
	Records     bool         `json:"records" doc:"The backend's egress records were checked, too; without them a denied request is recognized only by the missing response"`
	Checks      []Verify     `json:"checks"`
}

// VerifySkip is a reason for which checks of a VerifyReport were skipped.
type VerifySkip struct {
	Reason string `json:"reason"`
	Count  int    `json:"count" doc:"Number of checks that were skipped for this reason"`
}

// Verify is a check in a VerifyReport.
type Verify struct {
	ID     string `json:"id" doc:"Stable ID"`
	Shows  string `json:"shows" doc:"What the check proves if it passes"`
	Want   string `json:"want" doc:"reach, block or closed (not even a connection is accepted)"`
	Rule   string `json:"rule,omitempty" doc:"Rule that is tested"`
	Status string `json:"status" doc:"pass, fail or skip"`
	Detail string `json:"detail,omitempty" doc:"Why the check failed or was skipped, or evidence that it passed"`
}
