package agentlab

import "time"

// Profile is a bundle of resources, network policy, secrets bundle and
// behaviour: what a sandbox is made from (seed 000 §15). Profiles are read
// and checked by internal/profile.
type Profile struct {
	Name            string
	Image           string // image name; "" means the default image for the job's agent
	Resources       Resources
	Hardware        Hardware
	Network         Network
	Workspace       string // "none" or "attach"
	Mode            string // "dangerous"
	Keepalive       bool   // default for --keepalive
	TTL             time.Duration
	SecretsBundle   string // "" means no secrets
	ClonePath       string // absolute path in the guest; "" means the runner's default
	UploadArtifacts bool
	ArtifactTTL     time.Duration // how long artifacts are kept; 0 means the configured default
	InnerSandbox    string        // "" or InnerBubblewrap: the agent runs in a further sandbox inside the sandbox
	InnerArgs       []string      // further options of the inner sandbox
	CACertificates  []string      // certificates that its guests trust beside those of the image, each as PEM
	YAML            string        // the text it was read from, for 'profile show'
}

// InnerBubblewrap is the inner sandbox made by bubblewrap(1).
const InnerBubblewrap = "bubblewrap"
