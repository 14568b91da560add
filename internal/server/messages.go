package server

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// Messages are the stored messages.
type Messages interface {
	AddMessage(ctx context.Context, m agentlab.Message, most agentlab.MessageRate) (agentlab.Message, error)
	Messages(ctx context.Context, f agentlab.MessageFilter) ([]agentlab.Message, error)
}

// messageRate limits the messages of one scope.
var messageRate = agentlab.MessageRate{Count: 120, Per: time.Minute}

// messageRoutes returns the routes for messages.
func (s *Server) messageRoutes() []route {
	const feed = "/v1/jobs/{job}/messages"
	return []route{
		{post, feed, AccessWrite, "message.post", onJob, anyOrigin, 201, "post-message", "Post a message for a job and its attempts", call(s.postMessage)},
		{get, feed, AccessRead, "message.read", onJob, anyOrigin, 200, "messages", "List or follow the messages of a job and its attempts", sseOr(s.messages, api.List[api.Message]{}, sseType{"ready", struct{}{}}, sseType{"message", api.Message{}}, sseType{"error", api.Error{}})},
	}
}

type postMessageInput struct {
	Job  string `path:"job" doc:"Job ID"`
	Body api.MessagePost
}

func (s *Server) postMessage(ctx context.Context, in *postMessageInput) (api.Message, error) {
	j, err := s.cfg.Services.Jobs.Get(ctx, in.Job)
	if err != nil {
		return api.Message{}, err
	}
	m := agentlab.Message{Scope: j.MessageScope(), Author: authorOf(callerOf(ctx)), Kind: in.Body.Kind, Text: in.Body.Text}
	if m.Kind == "" {
		m.Kind = "note"
	}
	if in.Body.JSON != nil {
		data, err := json.Marshal(in.Body.JSON)
		if err != nil {
			return api.Message{}, agentlab.Errorf(agentlab.CodeInvalid, "malformed JSON: %w", err).WithField("json")
		}
		m.Data = string(data)
	}
	if err := m.Validate(); err != nil {
		return api.Message{}, err
	}
	m, err = s.cfg.Services.Messages.AddMessage(ctx, m, messageRate)
	if err != nil {
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

type messagesInput struct {
	Job         string `path:"job" doc:"Job ID"`
	After       int64  `query:"after" minimum:"0" doc:"Only messages with a larger ID. Without it, a list has the newest messages and a stream starts with the first"`
	LastEventID string `header:"Last-Event-ID" doc:"Same as after, sent by clients of event streams; takes precedence over after"`
	Limit       int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Maximum length of a list"`
	Follow      bool   `query:"follow" doc:"Respond with an event stream: first ready, then one message per message. To resume, set after to the ID of the last message"`
	CursorInput
}

func (s *Server) messages(ctx context.Context, in *messagesInput) (*huma.StreamResponse, error) {
	j, err := s.cfg.Services.Jobs.Get(ctx, in.Job)
	if err != nil {
		return nil, err
	}
	f := agentlab.MessageFilter{Scope: j.MessageScope(), AfterID: in.After, Limit: in.Limit}
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
	list, err := s.cfg.Services.Messages.Messages(ctx, f)
	if err != nil {
		return nil, err
	}
	return jsonBody(pageOf("messages", list, in.Limit, toMessage, func(m agentlab.Message) []string { return []string{strconv.FormatInt(m.ID, 10)} })), nil
}

// followMessages sends the stored messages after f.AfterID and then new ones,
// each exactly once.
func (s *Server) followMessages(f agentlab.MessageFilter) *huma.StreamResponse {
	f.Limit = eventPage
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		ctx, cancel := s.streamContext(hc.Context())
		defer cancel()
		out, err := newSSE(hc)
		if err != nil {
			return
		}
		if err := out.send("ready", strconv.FormatInt(f.AfterID, 10), struct{}{}); err != nil {
			return
		}
		for err == nil && ctx.Err() == nil {
			err = s.sendMessages(ctx, out, &f)
		}
		if err != nil && ctx.Err() == nil {
			s.log.Debug("message stream ended", "err", err)
			_ = out.send("error", "", problemOf(err))
		}
	}}
}

// sendMessages sends messages until the subscription to events was too slow (nil)
// or the stream ends. The event of a message says that there are new rows.
func (s *Server) sendMessages(ctx context.Context, out *sse, f *agentlab.MessageFilter) error {
	live, cancel := s.cfg.Services.Events.Subscribe()
	defer cancel()
	for {
		list, err := s.cfg.Services.Messages.Messages(ctx, *f)
		if err != nil {
			return err
		}
		for _, m := range list {
			if err := out.send("message", strconv.FormatInt(m.ID, 10), toMessage(m)); err != nil {
				return err
			}
			f.AfterID = m.ID
		}
		if len(list) == f.Limit {
			continue
		}
		for posted := false; !posted; {
			select {
			case <-ctx.Done():
				return nil
			case e, ok := <-live:
				if !ok {
					return nil
				}
				posted = e.Kind == agentlab.EventMessage && e.JobID == f.Scope.ID
			}
		}
	}
}

func toMessage(m agentlab.Message) api.Message {
	out := api.Message{
		ID: m.ID, Time: m.Time.UTC(), ScopeKind: string(m.Scope.Kind), ScopeID: m.Scope.ID,
		Author: m.Author, Kind: m.Kind, Text: m.Text,
	}
	_ = json.Unmarshal([]byte(m.Data), &out.JSON) // an object, or empty
	return out
}
