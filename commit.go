package agentlab

// Commit is what a committed transaction of the database changed. The subscribers of the
// store get it.
type Commit struct {
	Events    []Event     // written events, with their IDs
	Sandboxes []Sandbox   // new or changed rows
	Records   []string    // IDs of jobs with new egress entries
	Egress    EgressCount // decisions in new egress entries

	Messages []MessageScopeKind // of new messages
}

// Empty reports whether a transaction changed nothing that subscribers receive.
func (c Commit) Empty() bool {
	return len(c.Events)+len(c.Sandboxes)+len(c.Records)+len(c.Messages) == 0 && c.Egress == EgressCount{}
}

// EgressCount counts network decisions about guests.
type EgressCount struct {
	Allowed, Denied int
	Dropped         int // that their entries do not contain, because there were too many
}

// Add counts an entry.
func (n *EgressCount) Add(e EgressEntry) {
	if e.Allow {
		n.Allowed += e.Count
	} else {
		n.Denied += e.Count
	}
	n.Dropped += e.Dropped
}
