package agentlab

import (
	"encoding/json"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// MessageScope is whose messages they are. A feed of messages belongs to one
// scope.
type MessageScope struct {
	Kind MessageScopeKind
	ID   string
}

// MessageScopeKind is a kind of object that has messages.
type MessageScopeKind string

// The kinds of objects that have messages. The scope of a job is also that of all
// its attempts; its ID is that of the job.
const (
	MessageScopeJob       MessageScopeKind = "job"
	MessageScopeWorkspace MessageScopeKind = "workspace"
	MessageScopeSession   MessageScopeKind = "session"
)

// MessageScopeKinds are all kinds.
var MessageScopeKinds = []MessageScopeKind{MessageScopeJob, MessageScopeWorkspace, MessageScopeSession}

// Validate returns an error with code invalid for an unknown kind and for an empty
// ID.
func (s MessageScope) Validate() error {
	switch {
	case !slices.Contains(MessageScopeKinds, s.Kind):
		return Errorf(CodeInvalid, "%q has no messages", s.Kind).WithField("scope").WithHint("use the scope job, workspace or session")
	case s.ID == "":
		return Errorf(CodeInvalid, "the ID is missing").WithField("scope")
	}
	return nil
}

// MessageScope returns the scope of the messages of a job: an attempt shares
// that of its job.
func (j Job) MessageScope() MessageScope {
	if j.ParentID != "" {
		return MessageScope{Kind: MessageScopeJob, ID: j.ParentID}
	}
	return MessageScope{Kind: MessageScopeJob, ID: j.ID}
}

// Message is a row of the feed of a scope. Messages are never changed.
type Message struct {
	ID     int64 // strictly increasing in commit order
	Time   time.Time
	Scope  MessageScope
	Author string // set by the daemon from the channel of the call
	Kind   string // a word such as "note"
	Text   string
	Data   string // JSON object; "" if there is none
}

// Bounds of a message in bytes.
const (
	MaxMessageText = 16 << 10
	MaxMessageData = 16 << 10
	maxMessageKind = 32
)

// Validate checks what the poster of a message chooses. Code invalid.
func (m Message) Validate() error {
	bad := func(field, format string, args ...any) error {
		return Errorf(CodeInvalid, format, args...).WithField(field)
	}
	switch {
	case len(m.Kind) > maxMessageKind || strings.TrimLeft(m.Kind, "abcdefghijklmnopqrstuvwxyz0123456789-_.") != "" || m.Kind == "":
		return bad("kind", "a kind has 1 to %d of the characters a-z, 0-9, '-', '_' and '.'", maxMessageKind)
	case m.Text == "" && m.Data == "":
		return bad("text", "a message requires a text or JSON")
	case len(m.Text) > MaxMessageText:
		return bad("text", "the text has %d bytes, the maximum is %d", len(m.Text), MaxMessageText)
	case len(m.Data) > MaxMessageData:
		return bad("json", "the JSON has %d bytes, the maximum is %d", len(m.Data), MaxMessageData)
	case !utf8.ValidString(m.Text):
		return bad("text", "the text is not valid UTF-8")
	case m.Data != "" && (m.Data[0] != '{' || !utf8.ValidString(m.Data) || !json.Valid([]byte(m.Data))):
		return bad("json", "it is not a JSON object")
	}
	return m.Scope.Validate()
}

// MessageFilter selects messages of one scope.
type MessageFilter struct {
	Scope   MessageScope
	AfterID int64 // only messages with a larger ID
	Limit   int   // 0 means all
	Tail    bool  // the newest Limit messages instead of the oldest
}

// MessageLimits bound the messages of one scope. A message above PerMinute is
// refused. Above the others the oldest messages are deleted, so that an author
// who posts too much removes first its own.
type MessageLimits struct {
	PerMinute int // new messages of one author in a minute
	PerAuthor int // stored messages of one author; at least PerMinute
	PerScope  int // stored messages; at least PerAuthor
}
