package agentlab

import "time"

// EgressEntry is an EgressRecord that the controller has stored.
type EgressEntry struct {
	ID    int64  // strictly increasing in commit order; 0 until it is stored
	UID   string // of the sandbox: VMIDs are reused after a row is deleted, UIDs are not
	JobID string // the running job; "" if there was none
	EgressRecord
}

// RuleAuditLimit is the Rule of the one entry of a sandbox that counts the
// decisions that have no entry (Dropped), because there were too many or
// because the enforcer's log lost them. The entry is not a decision: its Count
// and its Seq are 0.
const RuleAuditLimit = "audit.limit"

// EgressFilter selects entries.
type EgressFilter struct {
	AfterID int64     // only later entries
	VMID    int       // 0 means any
	UID     string    // of the sandbox; "" means any
	JobID   string    // "" means any
	Denied  bool      // only refused decisions, and the entries of RuleAuditLimit
	Since   time.Time // only at or after this time; zero means any
	Limit   int       // maximum number; 0 means no limit
	Tail    bool      // with Limit, the last ones instead of the first
}

// Match reports whether the filter selects an entry, without regard to Limit
// and Tail.
func (f EgressFilter) Match(e EgressEntry) bool {
	return e.ID > f.AfterID && (f.VMID == 0 || f.VMID == e.VMID) && (f.UID == "" || f.UID == e.UID) && (f.JobID == "" || f.JobID == e.JobID) &&
		(!f.Denied || !e.Allow) && (f.Since.IsZero() || !e.Last.Before(f.Since))
}

// EgressSummary is a summary of the egress decisions of a job or sandbox.
type EgressSummary struct {
	Allowed int64 // decisions
	Denied  int64
	Dropped int64          // decisions of either kind that have no entry
	Targets []EgressTarget // refused targets, the most frequent first
	More    int            // refused targets that are not in Targets
	Private []EgressTarget // private destinations, opened by the operator, that were used
}

// EgressTarget is one target that was refused or reached.
type EgressTarget struct {
	Proto string
	Name  string
	Addr  string
	Port  int
	Rule  string
	Count int64
	Last  time.Time
}
