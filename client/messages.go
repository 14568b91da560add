package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"

	"github.com/agentlab-vm/agentlab/api"
)

// MessageScope selects whose messages; exactly one field is set.
type MessageScope struct {
	Job       string // ID: the messages of a job and its attempts
	Workspace string // ID or name
	Session   string // ID or name
}

func (s MessageScope) values() url.Values {
	v := url.Values{}
	set(v, "job", s.Job)
	set(v, "workspace", s.Workspace)
	set(v, "session", s.Session)
	return v
}

// MessageQuery selects messages of one scope.
type MessageQuery struct {
	MessageScope
	// After is the ID of the last known message. 0 means the newest messages for
	// Messages, all messages for FollowMessages.
	After int64
	Limit int // maximum number of messages of Messages; 0 means 100
}

func (q MessageQuery) values() url.Values {
	v := q.MessageScope.values()
	set(v, "after", q.After)
	return v
}

// PostMessage posts a message for a job, a workspace or a session.
func (c *Client) PostMessage(ctx context.Context, to MessageScope, m api.MessagePost) (api.Message, error) {
	body, contentType, err := jsonBody(m)
	if err != nil {
		return api.Message{}, err
	}
	return send[api.Message](ctx, c, http.MethodPost, to.values(), body, contentType, "messages")
}

// Messages lists messages in chronological order.
func (c *Client) Messages(ctx context.Context, q MessageQuery) (api.List[api.Message], error) {
	v := q.values()
	set(v, "limit", q.Limit)
	return get[api.List[api.Message]](ctx, c, v, "messages")
}

// FollowMessages yields messages as they are posted, as FollowEvents does events.
func (c *Client) FollowMessages(ctx context.Context, q MessageQuery) iter.Seq2[api.Message, error] {
	return follow(ctx, func() int64 { return q.After }, func(ctx context.Context, connected *bool, yield func(api.Message, error) bool) (bool, error) {
		return followOnce(ctx, c, []string{"messages"}, q.values(), "message", &q.After, connected, yield)
	})
}
