package agentlab

import "time"

// EgressEntry is an EgressRecord that the controller keeps.
type EgressEntry struct {
	ID    int64  // strictly increasing in commit order; 0 until it is stored
	UID   string // of the sandbox: numbers are given again when a row is gone, marks are not
	JobID string // the job that was at work; "" outside of one
	EgressRecord
}

// RuleAuditLimit is the Rule of the one entry of a sandbox that tells how many
// decisions are in none of its entries (Dropped), because there were too many
// or because the enforcer's own log had lost them. It is no decision: its
// Count is 0 and its Seq too.
const RuleAuditLimit = "audit.limit"

// EgressFilter selects entries.
type EgressFilter struct {
	AfterID int64     // only later entries
	VMID    int       // 0 means any
	JobID   string    // "" means any
	Denied  bool      // only what was refused, and the entries of RuleAuditLimit
	Since   time.Time // only what happened at or after this; zero means any
	Limit   int       // at most so many; 0 means no limit
	Tail    bool      // with Limit, the last ones instead of the first
}

// Match reports whether an entry is selected, but for Limit and Tail.
func (f EgressFilter) Match(e EgressEntry) bool {
	return e.ID > f.AfterID && (f.VMID == 0 || f.VMID == e.VMID) && (f.JobID == "" || f.JobID == e.JobID) &&
		(!f.Denied || !e.Allow) && (f.Since.IsZero() || !e.Last.Before(f.Since))
}

// EgressSummary is what a job or sandbox wanted from the network, in short.
type EgressSummary struct {
	Allowed int64 // decisions
	Denied  int64
	Dropped int64          // decisions of either kind that are in no entry
	Targets []EgressTarget // what was refused, the most frequent first
	More    int            // refused targets that are not in Targets
	Private []EgressTarget // private destinations, opened by the operator, that were used
}

// EgressTarget is one thing that was refused, or reached.
type EgressTarget struct {
	Proto string
	Name  string
	Addr  string
	Port  int
	Rule  string
	Count int64
	Last  time.Time
}
