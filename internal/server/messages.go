package server

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// Messages is the message service; *message.Service implements it.
type Messages interface {
	Post(ctx context.Context, m agentlab.Message) (agentlab.Message, error)
	List(ctx context.Context, f agentlab.MessageFilter) ([]agentlab.Message, error)
	AwaitMessages(ctx context.Context, f agentlab.MessageFilter) ([]agentlab.Message, error) // at least one, or none when ctx ends
}

// messageRoutes returns the routes for messages.
func (s *Server) messageRoutes() []route {
	const feed = "/v1/messages"
	return []route{
		{post, feed, AccessWrite, "message.post", byScope, anyOrigin, 201, "post-message", "Post a message for a job, a workspace or a session", call(s.postMessage)},
		{get, feed, AccessRead, "message.read", byScope, anyOrigin, 200, "messages", "List or follow the messages of a job, a workspace or a session", messageFeed(s.messages)},
		{get, "/v1/jobs/{job}/messages", AccessRead, "message.read", onJob, anyOrigin, 200, "job-messages", "List or follow the messages of a job and its attempts", messageFeed(s.jobMessages)},
		{get, "/v1/workspaces/{workspace}/messages", AccessRead, "message.read", noTarget, anyOrigin, 200, "workspace-messages", "List or follow the messages of a workspace", messageFeed(s.workspaceMessages)},
		{get, "/v1/sessions/{session}/messages", AccessRead, "message.read", noTarget, anyOrigin, 200, "session-messages", "List or follow the messages of a session", messageFeed(s.sessionMessages)},
	}
}

// messageFeed binds a handler that answers with messages.
func messageFeed[I any](h func(context.Context, *I) (*huma.StreamResponse, error)) binder {
	return sseOr(h, api.List[api.Message]{}, sseType{"ready", struct{}{}}, sseType{"message", api.Message{}}, sseType{"error", api.Error{}})
}

// ScopeInput selects the scope of messages.
type ScopeInput struct {
	Job       string `query:"job" doc:"The messages of this job and its attempts (ID)"`
	Workspace string `query:"workspace" doc:"The messages of this workspace (ID or name)"`
	Session   string `query:"session" doc:"The messages of this session (ID or name)"`
}

// scope returns the scope that exactly one parameter names.
func (in ScopeInput) scope(ctx context.Context, s *Server) (agentlab.MessageScope, error) {
	named := 0
	for _, v := range []string{in.Job, in.Workspace, in.Session} {
		if v != "" {
			named++
		}
	}
	switch {
	case named != 1:
		return agentlab.MessageScope{}, agentlab.Errorf(agentlab.CodeInvalid, "the scope must be one job, one workspace or one session").WithField("scope").
			WithHint("set one of the parameters job, workspace and session")
	case in.Job != "":
		j, err := s.cfg.Services.Jobs.Get(ctx, in.Job)
		return j.MessageScope(), err
	case in.Session != "":
		v, err := s.cfg.Services.Sessions.Get(ctx, in.Session)
		return agentlab.MessageScope{Kind: agentlab.MessageScopeSession, ID: v.ID}, err
	}
	v, err := s.cfg.Services.Workspaces.Get(ctx, in.Workspace)
	return agentlab.MessageScope{Kind: agentlab.MessageScopeWorkspace, ID: v.ID}, err
}

type postMessageInput struct {
	ScopeInput
	Body api.MessagePost
}

func (s *Server) postMessage(ctx context.Context, in *postMessageInput) (api.Message, error) {
	scope, err := in.scope(ctx, s)
	if err != nil {
		return api.Message{}, err
	}
	m := agentlab.Message{Scope: scope, Author: authorOf(callerOf(ctx)), Kind: in.Body.Kind, Text: in.Body.Text}
	if in.Body.JSON != nil {
		data, err := json.Marshal(in.Body.JSON)
		if err != nil {
			return api.Message{}, agentlab.Errorf(agentlab.CodeInvalid, "malformed JSON: %w", err).WithField("json")
		}
		m.Data = string(data)
	}
	if m, err = s.cfg.Services.Messages.Post(ctx, m); err != nil {
		return api.Message{}, err
	}
	return toMessage(m), nil
}

// authorOf returns the author of the messages of a caller.
func authorOf(who caller) string {
	if who.token != nil {
		return "token:" + who.token.Name
	}
	return fmt.Sprintf("user:%d", who.peer.UID)
}

// MessageFeedInput has the parameters of a list or stream of messages.
type MessageFeedInput struct {
	After       int64  `query:"after" minimum:"0" doc:"Only messages with a larger ID. Without it, a list has the newest messages and a stream starts with the first"`
	LastEventID string `header:"Last-Event-ID" doc:"Same as after, sent by clients of event streams; takes precedence over after"`
	AfterID     int64  `query:"after_id" minimum:"0" doc:"Same as after"`
	Limit       int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Maximum length of a list"`
	Follow      bool   `query:"follow" doc:"Respond with an event stream: first ready, then one message per message. To resume, set after to the ID of the last message"`
	CursorInput
}

type messagesInput struct {
	ScopeInput
	ScopeType string `query:"scope_type" enum:"job,workspace,session" doc:"With scope_id, instead of one of the parameters job, workspace and session"`
	ScopeID   string `query:"scope_id" doc:"ID of the job, or ID or name of the workspace or session"`
	MessageFeedInput
}

func (s *Server) messages(ctx context.Context, in *messagesInput) (*huma.StreamResponse, error) {
	of := in.ScopeInput
	if in.ScopeType != "" || in.ScopeID != "" {
		named, ok := map[string]ScopeInput{
			string(agentlab.MessageScopeJob): {Job: in.ScopeID}, string(agentlab.MessageScopeWorkspace): {Workspace: in.ScopeID}, string(agentlab.MessageScopeSession): {Session: in.ScopeID},
		}[in.ScopeType]
		if of != (ScopeInput{}) || !ok || in.ScopeID == "" {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "scope_type and scope_id need each other, and no other scope").WithField("scope_type")
		}
		of = named
	}
	return s.messagesOf(ctx, of, in.MessageFeedInput)
}

type jobMessagesInput struct {
	JobInput
	MessageFeedInput
}

func (s *Server) jobMessages(ctx context.Context, in *jobMessagesInput) (*huma.StreamResponse, error) {
	return s.messagesOf(ctx, ScopeInput{Job: in.Job}, in.MessageFeedInput)
}

type workspaceMessagesInput struct {
	WorkspaceInput
	MessageFeedInput
}

func (s *Server) workspaceMessages(ctx context.Context, in *workspaceMessagesInput) (*huma.StreamResponse, error) {
	return s.messagesOf(ctx, ScopeInput{Workspace: in.Workspace}, in.MessageFeedInput)
}

type sessionMessagesInput struct {
	SessionInput
	MessageFeedInput
}

func (s *Server) sessionMessages(ctx context.Context, in *sessionMessagesInput) (*huma.StreamResponse, error) {
	return s.messagesOf(ctx, ScopeInput{Session: in.Session}, in.MessageFeedInput)
}

// messagesOf answers with the messages of a scope.
func (s *Server) messagesOf(ctx context.Context, of ScopeInput, in MessageFeedInput) (*huma.StreamResponse, error) {
	scope, err := of.scope(ctx, s)
	if err != nil {
		return nil, err
	}
	f := agentlab.MessageFilter{Scope: scope, AfterID: cmp.Or(in.After, in.AfterID), Limit: in.Limit}
	if in.Cursor != "" {
		if f.AfterID, err = in.afterID("messages"); err != nil {
			return nil, err
		}
	}
	if in.LastEventID != "" {
		if f.AfterID, err = strconv.ParseInt(in.LastEventID, 10, 64); err != nil || f.AfterID < 0 {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "it is not a message ID").WithField("Last-Event-ID")
		}
	}
	if in.Follow {
		return s.followMessages(f), nil
	}
	if f.Tail = f.AfterID == 0; !f.Tail {
		f.Limit++ // one more shows whether there is a next page
	}
	list, err := s.cfg.Services.Messages.List(ctx, f)
	if err != nil {
		return nil, err
	}
	return jsonBody(pageOf("messages", list, in.Limit, toMessage, func(m agentlab.Message) []string { return []string{strconv.FormatInt(m.ID, 10)} })), nil
}

// followMessages sends the stored messages after f.AfterID and then new ones,
// each exactly once.
func (s *Server) followMessages(f agentlab.MessageFilter) *huma.StreamResponse {
	f.Limit = eventPage
	return s.eventStream("message", func(ctx context.Context, hc huma.Context, out *sse) error {
		if out.send("ready", strconv.FormatInt(f.AfterID, 10), struct{}{}) != nil {
			return nil //nolint:nilerr // the client has left
		}
		req, _ := humago.Unwrap(hc)
		for ctx.Err() == nil {
			if err := s.sendMessages(ctx, out, &f, req); err != nil {
				return err
			}
		}
		return nil
	})
}

// sendMessages waits for messages and sends them. The sandboxes of a restricted token
// may have lost the workspace since it asked: then they are those of others.
func (s *Server) sendMessages(ctx context.Context, out *sse, f *agentlab.MessageFilter, req *http.Request) error {
	list, err := s.cfg.Services.Messages.AwaitMessages(ctx, *f)
	if token := callerOf(ctx).token; len(list) > 0 && token != nil && !token.AnySandbox {
		if err := s.stillInScope(ctx, req, token); err != nil {
			return err
		}
	}
	for _, m := range list {
		if err := out.send("message", strconv.FormatInt(m.ID, 10), toMessage(m)); err != nil {
			return err
		}
		f.AfterID = m.ID
	}
	return err
}

// stillInScope checks again that a restricted token covers what a stream is about.
func (s *Server) stillInScope(ctx context.Context, req *http.Request, token *agentlab.APIToken) error {
	if id := req.PathValue("job"); id != "" {
		_, err := s.checkJobScope(ctx, token, id)
		return err
	}
	return s.checkMessageScope(req, token)
}

func toMessage(m agentlab.Message) api.Message {
	out := api.Message{
		ID: m.ID, Time: m.Time.UTC(), ScopeKind: string(m.Scope.Kind), ScopeID: m.Scope.ID,
		Author: m.Author, Kind: m.Kind, Text: m.Text,
	}
	_ = json.Unmarshal([]byte(m.Data), &out.JSON) // an object, or empty
	return out
}
