package agentlab

import (
	"slices"
	"strings"
	"time"
)

// Role is the access level of a caller of the control API. Each role includes
// the roles before it.
type Role string

// The roles, the lowest first.
const (
	RoleRead  Role = "read"  // look
	RoleWrite Role = "write" // create, change and use sandboxes and jobs
	RoleAdmin Role = "admin" // change profiles, images and secrets
)

// Roles lists all roles, the lowest first.
var Roles = []Role{RoleRead, RoleWrite, RoleAdmin}

// Event kinds of tokens.
const (
	EventTokenCreated = "token.created"
	EventTokenRevoked = "token.revoked"
)

// Bounds of an API token's lifetime. Every token expires.
const (
	MaxTokenTTL       = 365 * 24 * time.Hour
	MaxTokenVerbs     = 64
	MaxTokenSandboxes = 256
)

// TokenSandbox is a sandbox that a token is restricted to. The UID decides,
// because names and VMIDs are reused after a sandbox is destroyed.
type TokenSandbox struct {
	UID  string `json:"uid"`
	VMID int    `json:"vmid"` // when the token was created, shown to users
	Name string `json:"name"` // the same
}

// APIToken is a bearer token of the control API. Only its hash is stored. The
// zero value allows nothing; AnyVerb and AnySandbox must be set for an
// unrestricted token.
type APIToken struct {
	ID         string         // "tok-" and 13 characters
	Name       string         // what it is for; ValidateName holds; unique
	Hash       string         // lower-case hex SHA-256 of the token
	Role       Role           // the maximum access
	AnyVerb    bool           // all calls of the role; else Verbs
	Verbs      []string       // only these, sorted
	AnySandbox bool           // all sandboxes, and calls without a sandbox; else Sandboxes
	Sandboxes  []TokenSandbox // only calls about these
	CreatedAt  time.Time
	ExpiresAt  time.Time
	LastUsedAt time.Time // accurate to about a minute; zero if never used
}

// NewTokenID returns a new ID of an API token.
func NewTokenID() string { return "tok-" + randomID(8) }

// May reports whether the token allows calls with the verb.
func (t APIToken) May(verb string) bool { return t.AnyVerb || slices.Contains(t.Verbs, verb) }

// Covers reports whether the token allows calls about the sandbox with that
// UID.
func (t APIToken) Covers(uid string) bool {
	return t.AnySandbox || uid != "" && slices.ContainsFunc(t.Sandboxes, func(s TokenSandbox) bool { return s.UID == uid })
}

// Validate checks a token before it is stored, or after it was read. Errors
// have code invalid.
func (t APIToken) Validate() error {
	bad := func(field, format string, args ...any) *Error {
		return Errorf(CodeInvalid, format, args...).WithField(field)
	}
	switch {
	case !isID(t.ID, "tok-"):
		return bad("id", "%q is not the id of a token", t.ID)
	case len(t.Hash) != 64 || strings.Trim(t.Hash, "0123456789abcdef") != "":
		return bad("hash", "not a SHA-256 checksum in lower-case hexadecimal")
	case !slices.Contains(Roles, t.Role):
		return bad("role", "%q is not a role", t.Role).WithHint("choose one of read, write, admin")
	case t.AnyVerb != (len(t.Verbs) == 0) || len(t.Verbs) > MaxTokenVerbs || slices.Contains(t.Verbs, ""):
		return bad("verbs", "a token has 1 to %d verbs, or any", MaxTokenVerbs)
	case t.AnySandbox != (len(t.Sandboxes) == 0) || len(t.Sandboxes) > MaxTokenSandboxes:
		return bad("sandboxes", "a token has 1 to %d sandboxes, or any", MaxTokenSandboxes)
	case slices.ContainsFunc(t.Sandboxes, func(s TokenSandbox) bool { return s.UID == "" }):
		return bad("sandboxes", "the uid of a sandbox is missing")
	case t.CreatedAt.IsZero() || !t.ExpiresAt.After(t.CreatedAt) || t.ExpiresAt.Sub(t.CreatedAt) > MaxTokenTTL:
		return bad("ttl_minutes", "the lifetime of a token must be positive and at most %d days", int(MaxTokenTTL.Hours()/24)).
			WithHint("use a shorter one, and create a new token when it has expired")
	}
	return ValidateName(t.Name)
}
