package client

import (
	"context"
	"iter"
	"net/url"
	"time"

	"github.com/agentlab-vm/agentlab/api"
)

// EgressQuery chooses records of what sandboxes wanted from the network.
type EgressQuery struct {
	Sandbox string    // only of this sandbox (VMID or name)
	JobID   string    // only of this job
	Denied  bool      // only what was refused
	Since   time.Time // only what happened at or after this; zero means any
	// After is the id of the last record that is already known, as in
	// EventQuery.
	After int64
	// Oldest makes Egress begin with the oldest records when After is 0.
	Oldest bool
	Limit  int // for Egress: at most this many; 0 means 100
}

func (q EgressQuery) values() url.Values {
	v := url.Values{}
	set(v, "sandbox", q.Sandbox)
	set(v, "job", q.JobID)
	set(v, "denied", q.Denied)
	set(v, "after", q.After)
	if !q.Since.IsZero() {
		v.Set("since", q.Since.UTC().Format(time.RFC3339Nano))
	}
	return v
}

// Egress lists records in the order in which they came: the newest Limit ones,
// or with After the first ones after it.
func (c *Client) Egress(ctx context.Context, q EgressQuery) (api.List[api.EgressRecord], error) {
	v := q.values()
	set(v, "oldest", q.Oldest)
	set(v, "limit", q.Limit)
	return get[api.List[api.EgressRecord]](ctx, c, "/v1/egress", v)
}

// FollowEgress gives records as they come, each once and in order, as
// FollowEvents does.
func (c *Client) FollowEgress(ctx context.Context, q EgressQuery) iter.Seq2[api.EgressRecord, error] {
	return follow(ctx, func() int64 { return q.After }, func(ctx context.Context, connected *bool, yield func(api.EgressRecord, error) bool) (bool, error) {
		return followOnce(ctx, c, "/v1/egress", q.values(), "record", &q.After, connected, yield)
	})
}
