package guestapi

// SessionPrepare is the input of 'agentlab-agent session prepare', which chooses the
// multiplexer and makes the repository of a session unless it exists.
type SessionPrepare struct {
	Terminal *SessionTerminal `json:"terminal,omitempty"` // nil: as it is
	Init     RepoInit         `json:"init"`
}

// SessionTerminal chooses the multiplexer of new terminals.
type SessionTerminal struct {
	Name    string `json:"name"`
	Default bool   `json:"default,omitempty"` // only if none was chosen, and no terminal runs in another one
}

// SessionPrepared is the output of 'agentlab-agent session prepare'.
type SessionPrepared struct {
	// Terminal is nil if none was asked for. If its multiplexer is missing, or another one
	// has terminals, nothing was prepared.
	Terminal *TerminalChoice `json:"terminal,omitempty"`
	State    RepoState       `json:"state"`
	NoLink   string          `json:"no_link,omitempty"`  // why there is no link ProjectDir
	Dotfiles string          `json:"dotfiles,omitempty"` // Sum of the dotfiles that the home directory has
}

// SessionApply is the first line of the input of 'agentlab-agent session apply'. What it
// counts the bytes of follows, in the order of the fields. A field that is nil or empty
// leaves its step out.
type SessionApply struct {
	Receive     *RepoReceive        `json:"receive,omitempty"`
	BundleBytes int64               `json:"bundle_bytes,omitempty"` // of the bundle for Receive
	Worktree    string              `json:"worktree,omitempty"`     // branch that gets a work tree unless it has one
	Dotfiles    *SessionDotfiles    `json:"dotfiles,omitempty"`
	Env         *SessionEnv         `json:"env,omitempty"`
	Environment *SessionEnvironment `json:"environment,omitempty"`
	Setup       *SetupRun           `json:"setup,omitempty"`
}

// SessionDotfiles are dotfiles of the user for the home directory.
type SessionDotfiles struct {
	Bytes   int64  `json:"bytes"`             // of the archive, which is one of 'agentlab-agent files push'
	Sum     string `json:"sum"`               // identifies the files; hexadecimal
	Install string `json:"install,omitempty"` // a file among them that installs the others, which stay in a directory of their own
}

// SessionEnv are environment files for a work tree.
type SessionEnv struct {
	Bytes int64  `json:"bytes"` // as of SessionDotfiles
	Dir   string `json:"dir"`   // the work tree, relative to RepoDir; "" is RepoDir itself
}

// SessionEnvironment asks for the services and the dev container of the repository.
type SessionEnvironment struct {
	Devcontainer string `json:"devcontainer,omitempty"` // mode; "" is the mode that was used last
}

// SessionEvent is a line of the output of 'agentlab-agent session apply'. Steps that have
// ended stay done when a later one fails. Standard error has the output of the programs of
// a step.
type SessionEvent struct {
	Begin       string        `json:"begin,omitempty"`    // the step that begins: one of ApplySteps
	Received    *RepoReceived `json:"received,omitempty"` // of Receive
	State       *RepoState    `json:"state,omitempty"`    // after Receive and Worktree
	Environment *Environment  `json:"environment,omitempty"`
	SetupFailed string        `json:"setup_failed,omitempty"` // why the commands under setup failed; the session works without them
	Done        bool          `json:"done,omitempty"`         // the last line
}

// The steps of 'agentlab-agent session apply', in their order.
const (
	ApplyReceive     = "receive"
	ApplyWorktree    = "worktree"
	ApplyDotfiles    = "dotfiles"
	ApplyEnv         = "env"
	ApplyEnvironment = "environment"
	ApplySetup       = "setup"
)

// ApplySteps are the steps in their order.
var ApplySteps = []string{ApplyReceive, ApplyWorktree, ApplyDotfiles, ApplyEnv, ApplyEnvironment, ApplySetup}
