package client

import (
	"context"
	"iter"
	"net/url"

	"github.com/agentlab-vm/agentlab/api"
)

// MessageQuery selects messages of a job.
type MessageQuery struct {
	JobID string
	// After is the ID of the last known message. 0 means the newest messages for
	// Messages, all messages for FollowMessages.
	After int64
	Limit int // maximum number of messages of Messages; 0 means 100
}

// PostMessage posts a message for a job and its attempts.
func (c *Client) PostMessage(ctx context.Context, job string, m api.MessagePost) (api.Message, error) {
	return post[api.Message](ctx, c, m, "jobs", job, "messages")
}

// Messages lists messages in chronological order.
func (c *Client) Messages(ctx context.Context, q MessageQuery) (api.List[api.Message], error) {
	v := url.Values{}
	set(v, "after", q.After)
	set(v, "limit", q.Limit)
	return get[api.List[api.Message]](ctx, c, v, "jobs", q.JobID, "messages")
}

// FollowMessages yields messages as they are posted, as FollowEvents does events.
func (c *Client) FollowMessages(ctx context.Context, q MessageQuery) iter.Seq2[api.Message, error] {
	return follow(ctx, func() int64 { return q.After }, func(ctx context.Context, connected *bool, yield func(api.Message, error) bool) (bool, error) {
		v := url.Values{}
		set(v, "after", q.After)
		return followOnce(ctx, c, []string{"jobs", q.JobID, "messages"}, v, "message", &q.After, connected, yield)
	})
}
