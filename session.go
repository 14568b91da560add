package agentlab

import (
	"strings"
	"time"
)

// Session is a name for a workspace and the sandbox that currently uses it. Its
// sandbox can be destroyed and another one created; the work is on the workspace.
type Session struct {
	ID          string // NewSessionID
	Name        string // unique
	Profile     string // of its sandboxes and jobs
	Image       string // name of the image of its sandboxes; "" means the profile's or the default
	WorkspaceID string // no other session has it
	Branch      string // Git branch that its jobs work on; "" if it is for none. Branches of several repositories can have the same name
	VMID        int    // its current sandbox, which may no longer exist; 0 if it never had one
	UID         string // of its current sandbox
	CreatedAt   time.Time
	UpdatedAt   time.Time
}

// SessionAction is what happened to a session, in its events.
type SessionAction string

// The actions of sessions.
const (
	SessionCreated   SessionAction = "created" // also as a fork
	SessionResumed   SessionAction = "resumed"
	SessionStopped   SessionAction = "stopped"
	SessionSuspended SessionAction = "suspended"
	SessionRenamed   SessionAction = "renamed"
	SessionDeleted   SessionAction = "deleted"
)

// SessionActions are all actions.
var SessionActions = []SessionAction{SessionCreated, SessionResumed, SessionStopped, SessionSuspended, SessionRenamed, SessionDeleted}

// SessionSandbox is an entry of the history of a session.
type SessionSandbox struct {
	Number    int // in the order of creation
	SessionID string
	VMID      int
	UID       string
	Name      string // of the sandbox
	JobID     string // the job that it was created for; "" if there was none
	CreatedAt time.Time
}

// MaxSessionHistory is the number of sandboxes that the history of a session has.
const MaxSessionHistory = 200

// NewSessionID returns a new ID: "se-" and 13 characters (64 random bits).
func NewSessionID() string { return sessionPrefix + randomID(8) }

const sessionPrefix = "se-"

// IsSessionID reports whether s has the format of a session's ID.
func IsSessionID(s string) bool { return isID(s, sessionPrefix) }

// ValidateSessionName checks the name of a new session: ValidateName holds, and it
// does not have the format of an ID.
func ValidateSessionName(s string) error {
	if err := ValidateName(s); err != nil {
		return err
	}
	if IsSessionID(s) {
		return Errorf(CodeInvalid, "%q is a session ID, not a name", s).WithField("name").WithHint("choose another name")
	}
	return nil
}

// SessionNameOf returns the name of the session of a branch or directory: its letters
// and digits, as a DNS label.
func SessionNameOf(branch string) string {
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(branch))
	name = strings.Trim(name, "-")
	return strings.Trim(name[:min(len(name), 40)], "-")
}

// SessionRequest is a request for a session.
type SessionRequest struct {
	Name      string // "" means one that is made of Branch
	Profile   string // "" means the default
	Backend   string // of its workspace; "" means any, and for a new one the profile's or the default
	Image     string // name of an image; "" means the profile's or the default
	Branch    string
	IfMissing bool // return the session with Name, or without a name that of Branch, if there is one
	Quick     bool // without Image: while that of the profile must be built, use the one of agents if it is smaller
	// Workspace is the workspace; without a name, a new one with the name of the
	// session.
	Workspace WorkspaceSelection
}
