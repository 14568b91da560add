package api

import "time"

// TokenCreate is the request for an API token.
type TokenCreate struct {
	Name       string   `json:"name" doc:"Unique name"`
	Role       string   `json:"role,omitempty" enum:"read,write,admin" default:"read" doc:"Role"`
	Verbs      []string `json:"verbs,omitempty" doc:"Allow only calls with these verbs; empty means all of the role"`
	Sandboxes  []string `json:"sandboxes,omitempty" doc:"Allow only calls about these sandboxes (VMID or name) and their jobs; empty means all"`
	TTLMinutes int      `json:"ttl_minutes" minimum:"1" maximum:"525600" doc:"Lifetime in minutes"`
}

// Token is an API token, without its secret.
type Token struct {
	ID         string         `json:"id"`
	Name       string         `json:"name"`
	Role       string         `json:"role" enum:"read,write,admin"`
	Verbs      []string       `json:"verbs" doc:"Allowed verbs; empty means all of the role"`
	Sandboxes  []TokenSandbox `json:"sandboxes" doc:"Allowed sandboxes, with their jobs; empty means all"`
	CreatedAt  time.Time      `json:"created_at"`
	ExpiresAt  time.Time      `json:"expires_at"`
	LastUsedAt *time.Time     `json:"last_used_at,omitempty" doc:"Accurate to about a minute"`
}

// TokenSandbox is a sandbox that a token may access, with its name and number when
// the token was created. A later sandbox with that name is another sandbox.
type TokenSandbox struct {
	VMID int    `json:"vmid"`
	Name string `json:"name"`
}

// TokenCreated is a new token with its secret, which is shown only once.
type TokenCreated struct {
	Token  Token  `json:"token"`
	Secret string `json:"secret" doc:"Token to send as Authorization: Bearer SECRET"`
}
