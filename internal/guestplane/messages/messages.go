// Package messages is the guest service for the messages of agents.
package messages

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// Messages is the message service; *message.Service implements it.
type Messages interface {
	// OfSandbox returns the scope of that kind that a sandbox belongs to now, and
	// the author of its messages.
	OfSandbox(ctx context.Context, vmid int, kind agentlab.MessageScopeKind) (scope agentlab.MessageScope, author string, err error)
	// Post checks and appends a message. Codes: invalid, limit.
	Post(ctx context.Context, m agentlab.Message) (agentlab.Message, error)
	// AwaitMessages returns at least one message, or none when ctx ends.
	AwaitMessages(ctx context.Context, f agentlab.MessageFilter) ([]agentlab.Message, error)
	List(ctx context.Context, f agentlab.MessageFilter) ([]agentlab.Message, error)
}

// maxBody bounds a MessagePost: a text in which each byte is an escape of
// six, and the JSON.
const maxBody = 6*agentlab.MaxMessageText + 2*agentlab.MaxMessageData + 4<<10

const maxWait = 55 // seconds

// Service returns the guest service. The number of calls that read is limited: their
// answers are in memory, and they must not keep the runner of the same sandbox from
// its calls.
func Service(messages Messages) guestplane.Service {
	s := service{messages}
	return guestplane.Service{Name: "messages", Routes: []guestplane.Route{
		{Method: "POST", Path: guestapi.PathMessages, Token: guestplane.Messenger, Body: maxBody, Limits: guestplane.Limits{Rate: 5, Burst: 50}, Serve: s.post},
		{Method: "GET", Path: guestapi.PathMessages, Token: guestplane.Messenger, Limits: guestplane.Limits{Parallel: 8}, Serve: s.read},
	}}
}

type service struct{ messages Messages }

func (s service) post(c *guestplane.Call) (any, error) {
	m, err := s.take(c)
	if err != nil {
		return nil, err
	}
	m, err = s.messages.Post(c.Context(), m)
	if agentlab.CodeOf(err) == agentlab.CodeLimit { // of the author, not of the body
		c.Log.Debug("a message of a guest was refused", "err", err)
		return nil, &guestplane.Refused{
			Status: http.StatusTooManyRequests, Code: agentlab.CodeLimit, RetryAfter: 60,
			Message: "too many messages in a minute: wait, and post fewer and longer messages",
		}
	}
	return toMessage(m), err
}

// take reads a message, sets its scope and author by the channel, and removes the
// secrets of the sandbox.
func (s service) take(c *guestplane.Call) (agentlab.Message, error) {
	var none agentlab.Message
	var post guestapi.MessagePost
	if err := c.Decode(&post); err != nil {
		return none, err
	}
	scope, author, err := s.messages.OfSandbox(c.Context(), c.VMID, agentlab.MessageScopeKind(post.Scope))
	if err != nil {
		return none, err
	}
	red, err := c.SandboxRedactor()
	if err != nil {
		return none, err
	}
	m := agentlab.Message{Scope: scope, Kind: post.Kind, Text: red.String(post.Text)}
	if red.String(m.Kind) != m.Kind {
		m.Kind = "redacted"
	}
	if len(post.JSON) > 0 && !bytes.Equal(post.JSON, []byte("null")) {
		if m.Data, err = redactJSON(red, post.JSON); err != nil {
			return none, err
		}
	}
	m.Author = author
	return m, nil
}

// redactJSON removes secrets from the keys, strings and numbers of a JSON object,
// however they are escaped in p.
func redactJSON(red *redact.Redactor, p []byte) (string, error) {
	d := json.NewDecoder(bytes.NewReader(p))
	d.UseNumber()
	var v map[string]any
	if err := d.Decode(&v); err != nil {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "it is not a JSON object").WithField("json")
	}
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	if err := e.Encode(redactValue(red, v)); err != nil {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "it is not a JSON object").WithField("json")
	}
	text := string(bytes.TrimSpace(out.Bytes()))
	if red.String(text) != text { // a secret of several values
		return `{"redacted":true}`, nil
	}
	return text, nil
}

// redactValue redacts a value of package json, which guestcheck.Decode has limited
// in depth.
func redactValue(red *redact.Redactor, v any) any {
	switch v := v.(type) {
	case string:
		return red.String(v)
	case json.Number:
		if s := red.String(v.String()); s != v.String() {
			return s
		}
		return v
	case []any:
		for i := range v {
			v[i] = redactValue(red, v[i])
		}
		return v
	case map[string]any:
		out := make(map[string]any, len(v))
		for k, e := range v {
			out[red.String(k)] = redactValue(red, e)
		}
		return out
	}
	return v
}

// read answers with messages after an ID. With wait it answers at the next message at
// the latest.
func (s service) read(c *guestplane.Call) (any, error) {
	list, err := s.list(c)
	out := guestapi.MessageList{Messages: []guestapi.Message{}}
	for _, m := range list {
		out.Messages = append(out.Messages, toMessage(m))
	}
	return out, err
}

func (s service) list(c *guestplane.Call) ([]agentlab.Message, error) {
	after, err := c.QueryInt("after", 1<<62)
	if err != nil {
		return nil, err
	}
	wait, err := c.QueryInt("wait", maxWait)
	if err != nil {
		return nil, err
	}
	kind := agentlab.MessageScopeKind(c.Request.URL.Query().Get("scope"))
	scope, _, err := s.messages.OfSandbox(c.Context(), c.VMID, kind)
	if err != nil {
		return nil, err
	}
	f := agentlab.MessageFilter{Scope: scope, AfterID: after, Limit: guestapi.MaxMessages, Tail: after == 0}
	if wait == 0 {
		list, err := s.messages.List(c.Context(), f)
		return shorten(list, f.Tail), err
	}
	ctx, cancel := context.WithTimeout(c.Context(), time.Duration(wait)*time.Second)
	defer cancel()
	list, err := s.messages.AwaitMessages(ctx, f)
	// The sandbox may have lost the workspace while it waited.
	now, _, nerr := s.messages.OfSandbox(c.Context(), c.VMID, kind)
	switch {
	case nerr != nil:
		return nil, nerr
	case now != scope:
		return nil, agentlab.Errorf(agentlab.CodeConflict, "the %s of the sandbox has changed", kind)
	}
	return shorten(list, f.Tail), err
}

// maxList bounds the texts in one answer, in bytes.
const maxList = 128 << 10

// shorten returns the first messages of a list, or the newest ones, that are not too
// long together, and at least one.
func shorten(list []agentlab.Message, newest bool) []agentlab.Message {
	size := func() (n int) {
		for _, m := range list {
			n += len(m.Text) + len(m.Data)
		}
		return n
	}
	for len(list) > 1 && size() > maxList {
		if newest {
			list = list[1:]
		} else {
			list = list[:len(list)-1]
		}
	}
	return list
}

func toMessage(m agentlab.Message) guestapi.Message {
	return guestapi.Message{ID: m.ID, Time: m.Time.UTC(), Author: m.Author, Kind: m.Kind, Text: m.Text, JSON: json.RawMessage(m.Data)}
}
