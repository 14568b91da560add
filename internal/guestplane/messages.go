package guestplane

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
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

// maxMessageBody bounds a MessagePost: a text in which each byte is an escape of
// six, and the JSON.
const maxMessageBody = 6*agentlab.MaxMessageText + 2*agentlab.MaxMessageData + 4<<10

func (g *guest) postMessage(w http.ResponseWriter, r *http.Request, _ string) {
	m, err := g.takeMessage(r)
	if err == nil {
		m, err = g.s.cfg.Messages.Post(r.Context(), m)
	}
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeLimit && m.Author != "": // of the author, not of the body
		g.log.Debug("a message of a guest was refused", "err", err)
		w.Header().Set("Retry-After", "60")
		writeError(w, http.StatusTooManyRequests, string(agentlab.CodeLimit), "too many messages in a minute: wait, and post fewer and longer messages")
	case err != nil:
		g.fail(w, r, err)
	default:
		writeJSON(w, http.StatusOK, toMessage(m))
	}
}

// takeMessage reads a message, sets its scope and author by the channel, and
// removes the secrets of the sandbox.
func (g *guest) takeMessage(r *http.Request) (agentlab.Message, error) {
	var none agentlab.Message
	if !g.posts.AllowN(g.s.cfg.Clock(), 1) {
		return none, agentlab.Errorf(agentlab.CodeBusy, "too many messages in a second")
	}
	p, err := readAll(r.Body, maxMessageBody)
	var post guestapi.MessagePost
	if err == nil {
		err = guestcheck.Decode(p, &post)
	}
	if err != nil {
		return none, err
	}
	scope, author, err := g.s.cfg.Messages.OfSandbox(r.Context(), g.vmid, agentlab.MessageScopeKind(post.Scope))
	if err != nil {
		return none, err
	}
	red, err := g.s.cfg.Bootstrap.SandboxRedactor(r.Context(), g.vmid)
	if err != nil {
		g.log.Error("cannot redact a message of a guest", "err", err)
		return none, agentlab.Errorf(agentlab.CodeUnavailable, "the controller cannot do this now")
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

// readMessages answers with messages after an ID. With wait it answers at the next
// message at the latest; the number of such calls is limited, so that they do not
// keep the runner of the same sandbox from its calls.
func (g *guest) readMessages(w http.ResponseWriter, r *http.Request, _ string) {
	list, err := g.messages(r)
	if err != nil {
		g.fail(w, r, err)
		return
	}
	out := guestapi.MessageList{Messages: []guestapi.Message{}}
	for _, m := range list {
		out.Messages = append(out.Messages, toMessage(m))
	}
	writeJSON(w, http.StatusOK, out)
}

func (g *guest) messages(r *http.Request) ([]agentlab.Message, error) {
	after, err := queryInt(r, "after", 1<<62)
	if err != nil {
		return nil, err
	}
	wait, err := queryInt(r, "wait", maxWait)
	if err != nil {
		return nil, err
	}
	kind := agentlab.MessageScopeKind(r.URL.Query().Get("scope"))
	scope, _, err := g.s.cfg.Messages.OfSandbox(r.Context(), g.vmid, kind)
	if err != nil {
		return nil, err
	}
	select { // before anything is read: the answers are in memory
	case g.tails <- struct{}{}:
		defer func() { <-g.tails }()
	default:
		return nil, agentlab.Errorf(agentlab.CodeBusy, "too many calls of this sandbox read messages")
	}
	f := agentlab.MessageFilter{Scope: scope, AfterID: after, Limit: guestapi.MaxMessages, Tail: after == 0}
	var list []agentlab.Message
	if wait == 0 {
		list, err = g.s.cfg.Messages.List(r.Context(), f)
	} else {
		ctx, cancel := context.WithTimeout(r.Context(), time.Duration(wait)*time.Second)
		defer cancel()
		list, err = g.s.cfg.Messages.AwaitMessages(ctx, f)
		// The sandbox may have lost the workspace while it waited.
		now, _, nerr := g.s.cfg.Messages.OfSandbox(r.Context(), g.vmid, kind)
		switch {
		case nerr != nil:
			return nil, nerr
		case now != scope:
			return nil, agentlab.Errorf(agentlab.CodeConflict, "the %s of the sandbox has changed", kind)
		}
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
