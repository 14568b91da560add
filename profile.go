package agentlab

import "time"

// WorkspaceRequired is Profile.Workspace of a profile whose sandboxes and jobs need a
// workspace. Its value is that of the key storage.workspace.
const WorkspaceRequired = "attach"

// Profile is the template of a sandbox: resources, network policy, secrets
// bundle and behaviour. Package internal/profile parses and validates profiles.
type Profile struct {
	Name            string
	Backend         string // of sandboxes and new workspaces; "" means the default
	Image           string // image name; "" means the default image for the job's agent
	Resources       Resources
	Options         Options
	Network         Network
	Workspace       string // "none" or WorkspaceRequired
	Mode            string // "dangerous"
	Keepalive       bool   // default for --keepalive
	GuestRenew      bool   // guests may renew the leases of their sandboxes
	TTL             time.Duration
	SecretsBundle   string // "" means no secrets
	ClonePath       string // absolute path in the guest; "" means the runner's default
	UploadArtifacts bool
	ArtifactTTL     time.Duration // retention period of artifacts; 0 means the configured default
	InnerSandbox    string        // "" or InnerBubblewrap: the agent runs in a nested sandbox inside the VM
	InnerArgs       []string      // further options of the inner sandbox
	Terminal        string        // one of Terminals; "" means the default, tmux
	Devcontainer    string        // one of DevcontainerModes; "" means the default, auto
	CACertificates  []string      // certificates that guests trust in addition to those of the image, each as PEM
	NoCache         bool          // its sandboxes do not use the registry cache
	YAML            string        // source text, for 'profile show'
}

// InnerBubblewrap is the inner sandbox made by bubblewrap(1).
const InnerBubblewrap = "bubblewrap"

// The programs that keep the terminals of sessions running.
const (
	TerminalTmux   = "tmux"
	TerminalZellij = "zellij"
)

// Whether the dev container of a repository is used.
const (
	DevcontainerAuto = "auto" // if the image can run it
	DevcontainerOn   = "on"   // or the job or session does not start
	DevcontainerOff  = "off"
)

// DevcontainerModes are all of them; the first is the default.
var DevcontainerModes = []string{DevcontainerAuto, DevcontainerOn, DevcontainerOff}

// Terminals are all of them; the first is the default.
var Terminals = []string{TerminalTmux, TerminalZellij}
