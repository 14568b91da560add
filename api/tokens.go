package api

import "time"

// TokenCreate asks for a token of the control API.
type TokenCreate struct {
	Name       string   `json:"name" doc:"What it is for; unique"`
	Role       string   `json:"role,omitempty" enum:"read,write,admin" default:"read" doc:"The most that it may do"`
	Verbs      []string `json:"verbs,omitempty" doc:"Only calls with these verbs; empty means all that the role may do"`
	Sandboxes  []string `json:"sandboxes,omitempty" doc:"Only calls about these sandboxes (VMID or name) and their jobs; empty means no such bound"`
	TTLMinutes int      `json:"ttl_minutes" minimum:"1" maximum:"525600" doc:"Minutes that it lives"`
}

// Token is a right to use the control API, without its secret.
type Token struct {
	ID         string         `json:"id"`
	Name       string         `json:"name"`
	Role       string         `json:"role" enum:"read,write,admin"`
	Verbs      []string       `json:"verbs" doc:"Only these; empty means all that the role may do"`
	Sandboxes  []TokenSandbox `json:"sandboxes" doc:"Only these and their jobs; empty means no such bound"`
	CreatedAt  time.Time      `json:"created_at"`
	ExpiresAt  time.Time      `json:"expires_at"`
	LastUsedAt *time.Time     `json:"last_used_at,omitempty" doc:"To the minute or so"`
}

// TokenSandbox is a sandbox that a token is bound to, with the name and number
// that it had when the token was made. One that is made later under that name
// is another sandbox.
type TokenSandbox struct {
	VMID int    `json:"vmid"`
	Name string `json:"name"`
}

// TokenCreated is a new token with its secret, which is shown only once.
type TokenCreated struct {
	Token  Token  `json:"token"`
	Secret string `json:"secret" doc:"What to send as Authorization: Bearer SECRET"`
}
