package api

import (
	"bytes"
	"encoding/json"
	"time"
)

// Object is a JSON object with values of package encoding/json. A number is a
// json.Number, so that it keeps all its digits.
type Object map[string]any

// UnmarshalJSON implements json.Unmarshaler.
func (o *Object) UnmarshalJSON(p []byte) error {
	d := json.NewDecoder(bytes.NewReader(p))
	d.UseNumber()
	return d.Decode((*map[string]any)(o))
}

// MessagePost is a message to post.
type MessagePost struct {
	Kind string `json:"kind,omitempty" maxLength:"32" doc:"A word such as note, the default"`
	Text string `json:"text,omitempty" maxLength:"16384" doc:"Text, at most 16 KiB"`
	JSON Object `json:"json,omitempty" doc:"Data for programs, at most 16 KiB"`
}

// Message is a message in the feed of a job, a workspace or a session.
type Message struct {
	ID        int64     `json:"id" doc:"Strictly increasing"`
	Time      time.Time `json:"time"`
	ScopeKind string    `json:"scope_kind" doc:"job, workspace or session"`
	ScopeID   string    `json:"scope_id" doc:"ID of the job, the workspace or the session; attempts share the messages of their job"`
	Author    string    `json:"author" doc:"Set by the daemon: user:UID, token:NAME, or job:ID and sandbox:NAME for an agent"`
	Kind      string    `json:"kind"`
	Text      string    `json:"text"`
	JSON      Object    `json:"json,omitempty"`
}
