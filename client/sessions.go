package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/agentlab-vm/agentlab/api"
)

// CreateSession creates a session, and its workspace unless that exists.
func (c *Client) CreateSession(ctx context.Context, r api.SessionCreate) (api.Session, error) {
	return post[api.Session](ctx, c, r, "sessions")
}

// Sessions lists sessions.
func (c *Client) Sessions(ctx context.Context) (api.List[api.Session], error) {
	return list[api.Session](ctx, c, url.Values{}, 0, "", "sessions")
}

// Session returns the session with that ID or name, with its history.
func (c *Client) Session(ctx context.Context, session string) (api.Session, error) {
	return get[api.Session](ctx, c, nil, "sessions", session)
}

// ResumeSession continues a session, and returns its sandbox.
func (c *Client) ResumeSession(ctx context.Context, session string, r api.SessionResume) (api.Sandbox, error) {
	return post[api.Sandbox](ctx, c, r, "sessions", session, "resume")
}

// StopSession destroys the sandbox of a session, or suspends it to disk.
func (c *Client) StopSession(ctx context.Context, session string, suspend bool) (api.Sandbox, error) {
	return post[api.Sandbox](ctx, c, api.SessionStop{Suspend: suspend}, "sessions", session, "stop")
}

// ForkSession creates a session with a copy of the workspace of another one.
func (c *Client) ForkSession(ctx context.Context, session string, r api.SessionFork) (api.Session, error) {
	return post[api.Session](ctx, c, r, "sessions", session, "fork")
}

// RenameSession changes the name of a session.
func (c *Client) RenameSession(ctx context.Context, session, name string) (api.Session, error) {
	return post[api.Session](ctx, c, api.SessionRename{Name: name}, "sessions", session, "rename")
}

// DeleteSession deletes a session, and moves its workspace to the trash unless
// keepWorkspace is set.
func (c *Client) DeleteSession(ctx context.Context, session string, keepWorkspace bool) error {
	q := url.Values{}
	set(q, "keep_workspace", keepWorkspace)
	_, err := send[none](ctx, c, http.MethodDelete, q, nil, "", "sessions", session)
	return err
}
