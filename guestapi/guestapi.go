// Package guestapi defines the wire types between a sandbox and the
// controller.
//
// There are two protocols, both plain HTTP/1.1 with JSON bodies:
//
//   - The guest plane, served by the controller, called by agent-runner. Each
//     sandbox has its own listener, which identifies the caller; a token
//     authorises the call. Paths below, "Guest plane".
//   - Guest control, served by agent-runner in the guest, called by the
//     controller over the stream that the driver's DialControl opens. Paths
//     below, "Guest control". The controller treats every answer as hostile.
package guestapi

import (
	"encoding/json"
	"time"
)

// Guest plane. All paths except bootstrap require "Authorization: Bearer
// <runner token>".
const (
	PathBootstrap = "/v1/bootstrap/fetch"  // POST BootstrapRequest → BootstrapResponse; one time
	PathReport    = "/v1/runner/report"    // POST Report → Directive
	PathDirective = "/v1/runner/directive" // GET ?wait=SECONDS (≤ 55) → Directive; answers early when it changes
	PathLog       = "/v1/runner/log"       // POST raw bytes, ?offset=N[&final=1] → LogAck; idempotent by offset; the controller may accept fewer bytes than were sent, unless final
	PathRepo      = "/v1/runner/repo"      // GET → git bundle of the job's local repository
	PathNetwork   = "/v1/runner/network"   // POST NetworkNarrow → 204; before the agent starts; only ever narrows
	PathMessages  = "/v1/messages"         // POST MessagePost → Message; GET ?scope=KIND&after=ID&wait=SECONDS (≤ 55) → MessageList; with the messages token
	PathLease     = "/v1/lease"            // POST LeaseRenew → Lease; GET → Lease; with the messages token
	PathUpload    = "/upload/"             // PUT /upload/<path>, raw bytes, Content-Length or chunked → UploadAck; on the upload port too
)

// BootstrapRequest exchanges the one-time token for a BootstrapResponse.
type BootstrapRequest struct {
	Token string `json:"token"`
	VMID  int    `json:"vmid"`
}

// BootstrapResponse has everything that agent-runner needs, and only data of
// this sandbox.
type BootstrapResponse struct {
	Git                *Git              `json:"git,omitempty"`
	Env                map[string]string `json:"env,omitempty"`      // environment of the agent; secret
	SSHKeys            map[string]string `json:"ssh_keys,omitempty"` // private keys for the agent's ssh, by host
	ClaudeSettingsJSON string            `json:"claude_settings_json,omitempty"`
	Artifact           *ArtifactTarget   `json:"artifact,omitempty"`
	ArtifactStore      *ArtifactTarget   `json:"artifact_store,omitempty"` // outside of AgentLab; receives a copy of each artifact
	Policy             Policy            `json:"policy"`
	Runner             RunnerTarget      `json:"runner"`
	Messages           MessagesTarget    `json:"messages"`
	CACertificates     []string          `json:"ca_certificates,omitempty"` // PEM; the guest trusts them in addition to those of its image
	Job                *Job              `json:"job,omitempty"`             // nil: a sandbox without a job; the runner stages secrets and ends
	// Workspace reports that a workspace is mounted at WorkspaceDir: the caches of
	// package managers, and unless Job has another path the checkout, are on it.
	Workspace bool `json:"workspace,omitempty"`

	Cache *RegistryCache `json:"cache,omitempty"` // nil: package managers ask their registries
}

// RegistryCache is the cache of package registries on the controller's address.
type RegistryCache struct {
	URL      string   `json:"url"`                 // without a path, e.g. http://10.77.0.1:8844
	Kinds    []string `json:"kinds"`               // of registries that the policy allows: "apt", "docker", "go", "npm", "pypi"
	AptHosts []string `json:"apt_hosts,omitempty"` // mirrors for which the cache is a proxy
}

// PathCache is the path below which the registry cache answers; below it are the
// kinds of registries.
const PathCache = "/cache/"

// Git is the credential for the job's remote.
type Git struct {
	URL           string `json:"url,omitempty"` // the credential is used only for this URL's scheme and host
	Token         string `json:"token,omitempty"`
	Username      string `json:"username,omitempty"` // default "x-access-token"
	SSHPrivateKey string `json:"ssh_private_key,omitempty"`
	SSHKnownHosts string `json:"ssh_known_hosts,omitempty"`
}

// ArtifactTarget is the URL and the token for uploads.
type ArtifactTarget struct {
	Endpoint string `json:"endpoint"` // e.g. http://10.77.0.1:8846/upload
	Token    string `json:"token"`
	MaxBytes int64  `json:"max_bytes"` // for the whole job
}

// RunnerTarget is the token that authenticates reports, logs and directives.
type RunnerTarget struct {
	Token string `json:"token"`
}

// LeaseRenew asks for a longer lease of this sandbox. The lease is never shortened.
type LeaseRenew struct {
	Minutes int `json:"minutes,omitempty"` // from now; 0 means the default of the profile
}

// Lease is the lease of this sandbox.
type Lease struct {
	ExpiresAt time.Time `json:"expires_at"`
}

// MessagesTarget is the token for messages and for the lease.
type MessagesTarget struct {
	Token string `json:"token"`
}

// MessagePost is a message of an agent. The controller knows the sandbox by its
// channel and sets the author and the ID of the scope.
type MessagePost struct {
	Scope string          `json:"scope,omitempty"` // "job", "workspace" or "session": the one of this sandbox; default the job, or the workspace
	Kind  string          `json:"kind,omitempty"`  // a word; default "note"
	Text  string          `json:"text,omitempty"`
	JSON  json.RawMessage `json:"json,omitempty"` // an object
}

// Message is a stored message.
type Message struct {
	ID     int64           `json:"id"` // strictly increasing
	Time   time.Time       `json:"time"`
	Author string          `json:"author"`
	Kind   string          `json:"kind"`
	Text   string          `json:"text"`
	JSON   json.RawMessage `json:"json,omitempty"`
}

// MessageList has at most MaxMessages messages in ascending order of ID.
type MessageList struct {
	Messages []Message `json:"messages"`
}

// MaxMessages bounds a MessageList.
const MaxMessages = 20

// Policy informs the agent of what it may do. The enforcement is outside of
// the guest.
type Policy struct {
	AllowedDomains []string `json:"allowed_domains"`
	Mode           string   `json:"mode"` // "dangerous"
}

// Job is the work.
type Job struct {
	ID        string `json:"id"`
	RepoURL   string `json:"repo_url,omitempty"` // clone through the network
	Bundled   bool   `json:"bundled,omitempty"`  // clone from PathRepo
	Ref       string `json:"ref,omitempty"`
	Depth     int    `json:"depth,omitempty"`
	Task      string `json:"task"`
	Agent     string `json:"agent"` // "none": no task; a user works in the sandbox, with its secrets staged
	Mode      string `json:"mode"`
	ClonePath string `json:"clone_path,omitempty"` // default /tmp/repo, on a workspace WorkspaceDir/repo
	// Seconds is the agent's time limit, counted from the fetch. At its
	// end the agent gets SIGTERM, 10 s later SIGKILL, and the runner
	// uploads the results so far.
	Seconds int64 `json:"seconds"`
	Upload  bool  `json:"upload"` // upload artifacts
	// Keepalive means that the sandbox is kept after the job, so the checkout
	// is not deleted. Secrets are wiped unless Agent is "none".
	Keepalive bool `json:"keepalive,omitempty"`
	// Image is the name of the sandbox's image, "" if the controller does not say;
	// ImageChosen means that it was requested for this job.
	Image       string `json:"image,omitempty"`
	ImageChosen bool   `json:"image_chosen,omitempty"`

	NoSetup bool `json:"no_setup,omitempty"` // do not run the commands under setup and start no services of the repository's .agentlab.yaml
	// Devcontainer is whether the dev container of the repository is used: "auto", which
	// "" means too, "on" or "off".
	Devcontainer string `json:"devcontainer,omitempty"`
	// Branch is the branch of the work; default agentlab/ID.
	Branch string `json:"branch,omitempty"`
	// Judge is a shell command that judges the agent's work in the checkout
	// after an agent that completed.
	Judge string `json:"judge,omitempty"`
	// Prepare means that the job, whose agent is "none", only clones the
	// repository and runs its setup commands, for jobs in copies of this
	// sandbox: the Git credential is deleted before the final report. Prepared is,
	// for a job in such a copy, the commit that was checked out.
	Prepare  bool   `json:"prepare,omitempty"`
	Prepared string `json:"prepared,omitempty"`
	// Reuse means that this sandbox is a copy of one in which a job with Prepare of an
	// earlier job has ended: its checkout is updated, and its setup commands do not run.
	Reuse bool `json:"reuse,omitempty"`
	// NoPush means that nothing is pushed: the Git credential is deleted
	// before the agent starts.
	NoPush bool `json:"no_push,omitempty"`
	// Salvage means that no agent runs: the runner collects and uploads the work that
	// an earlier job left on this disk before its VM ended.
	Salvage bool `json:"salvage,omitempty"`
	// Inner makes the agent run in a nested sandbox inside this one. nil
	// means no nested sandbox.
	Inner *InnerSandbox `json:"inner_sandbox,omitempty"`
}

// SetupRun is the input of 'agentlab-agent setup', which runs the commands under setup
// of a session's repository, unless they have run in this sandbox.
type SetupRun struct {
	Commands []string `json:"commands"`
	Dir      string   `json:"dir"`     // the checkout
	Seconds  int      `json:"seconds"` // time limit of all commands together
}

// InnerSandbox is a sandbox for the agent alone, inside the virtual machine.
type InnerSandbox struct {
	Kind string   `json:"kind"`           // "bubblewrap"
	Args []string `json:"args,omitempty"` // further options of bwrap
}

// Report is the state of the job. Reports are idempotent. The runner sends one
// at each change of phase, and at least one every 15 s.
type Report struct {
	Status   string  `json:"status"`            // "RUNNING", "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"
	Phase    string  `json:"phase"`             // "bootstrap", "clone", "setup", "agent", "judge", "collect", "upload", "done"
	Message  string  `json:"message,omitempty"` // one line; the reason if it failed
	ExitCode *int    `json:"exit_code,omitempty"`
	Result   *Result `json:"result,omitempty"` // with a final status

	Progress *Progress    `json:"progress,omitempty"` // in phase "clone"
	Kills    *MemoryKills `json:"kills,omitempty"`    // if there are any

	KeyRejected bool `json:"key_rejected,omitempty"` // the agent failed because its model rejects its key
}

// Progress is the progress of a clone.
type Progress struct {
	Step    string `json:"step"` // one of the constants below
	Percent int    `json:"percent"`
}

// Steps of a clone, in order.
const (
	StepDownload = "download" // of the bundle of a local repository
	StepReceive  = "receive"  // objects
	StepResolve  = "resolve"  // deltas
	StepCheckout = "checkout"
)

// Result is the wire format of agentlab.JobResult.
type Result struct {
	BaseCommit string `json:"base_commit,omitempty"`
	HeadCommit string `json:"head_commit,omitempty"`
	Branch     string `json:"branch,omitempty"`
	Commits    int    `json:"commits"`
	Pushed     bool   `json:"pushed"`
	Dirty      bool   `json:"dirty"`
	// Uncommitted is the number of files that differ from HeadCommit.
	Uncommitted int `json:"uncommitted,omitempty"`
	// JudgeExit is the exit code of the job's judge, nil if it did not run.
	// Score is the number on its last line of output, nil if there is none.
	JudgeExit *int     `json:"judge_exit,omitempty"`
	Score     *float64 `json:"score,omitempty"`
}

// RefChanges is a ref in a job's result bundle. It points to a commit on top
// of the result with the changes that the agent did not commit.
const RefChanges = "refs/agentlab/changes"

// RefModules is the prefix of the refs, in the bundle of a local repository,
// that point to the commits of its submodules. The commit ID follows.
const RefModules = "refs/agentlab/modules/"

// Limits on the submodules of a repository.
const (
	MaxModules     = 200
	MaxModuleDepth = 8    // of submodules in submodules
	MaxSentModules = 2000 // commits of submodules that a session reports
)

// NetworkNarrow is the network policy in the configuration of a repository. It
// becomes a further layer of the sandbox's policy: a flow is allowed only if
// the profile allows it too. Rules have the syntax of profiles, without presets
// and files. Unless it is strict, the controller adds what the job itself
// needs: the agent's model and the repository's host.
type NetworkNarrow struct {
	Mode  string   `json:"mode"`
	Allow []string `json:"allow,omitempty"`
	Deny  []string `json:"deny,omitempty"`
	Ports []string `json:"ports,omitempty"`

	Strict bool `json:"strict,omitempty"`
}

// Directive is the controller's current instruction to the runner.
type Directive struct {
	Stop        string `json:"stop,omitempty"`         // "", "CANCELLED" or "TIMEOUT": stop the agent, upload, report this
	Reason      string `json:"reason,omitempty"`       // why the controller itself ends the job, in one line; "" if Stop is reason enough
	SecondsLeft int64  `json:"seconds_left,omitempty"` // until the agent's deadline, by the controller's clock; 0 means no deadline
}

// LogAck is the number of bytes of the agent log that the controller has
// stored. The runner continues from there.
type LogAck struct {
	Size int64 `json:"size"`
	Full bool  `json:"full,omitempty"` // the log quota is used up; send no more
}

// UploadAck confirms a stored artifact.
type UploadAck struct {
	Path   string `json:"path"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// ErrorBody is the body of every answer with status 400 or above, on both
// protocols.
type ErrorBody struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// Guest control. Served over HTTP/1.1 on the control stream.
const (
	PathHealth    = "/v1/health"           // GET → Health
	PathPrepare   = "/v1/prepare"          // POST PrepareRequest → {}; before the guest is saved as a template
	PathIdentity  = "/v1/identity"         // PUT Identity → Health; idempotent
	PathWorkspace = "/v1/workspace"        // PUT WorkspaceRequest → Workspace: mounts it; DELETE → {}: unmounts it; both idempotent
	PathFreeze    = "/v1/workspace/freeze" // PUT FreezeRequest → {}: freezes its file system; DELETE → Thawed: ends that; both idempotent
	PathSync      = "/v1/sync"             // POST → {}: writes what is in memory to all disks
	PathExec      = "/v1/exec"             // POST ExecRequest with Upgrade: StreamProtocol → 101, then internal/stream frames
	PathAttach    = "/v1/attach"           // POST AttachRequest with Upgrade: StreamProtocol → 101, then internal/stream frames
	PathSSHKey    = "/v1/ssh-key"          // POST SSHKeyRequest → SSHKeyResponse
	PathPower     = "/v1/power"            // POST PowerRequest → {}

	// StreamProtocol is the token of the HTTP Upgrade for exec and attach.
	StreamProtocol = "agentlab-stream"
)

// ControlConfig is the content of /etc/agentlab/control.json, from which
// guests with an address learn how to authenticate the controller. It is
// AgentLab's part of their cloud-init seed and has no secrets.
type ControlConfig struct {
	VMID       int    `json:"vmid"`
	UID        string `json:"uid"`        // of the sandbox
	Controller string `json:"controller"` // where the guest plane is, e.g. http://10.77.0.1:8844
	HostKey    []byte `json:"host_key"`   // base64; ed25519 public key that authenticates the controller
}

// ControlFile is the path of a guest's ControlConfig.
const ControlFile = "/etc/agentlab/control.json"

// Health is the state of a guest that answers, with the progress of its boot.
type Health struct {
	Version string `json:"version"` // of agent-runner
	// BootID is /proc/sys/kernel/random/boot_id. A guest that continues from a
	// template or from another sandbox has the one of that guest until it gets its
	// identity, and then its own.
	BootID   string        `json:"boot_id"`
	Uptime   time.Duration `json:"uptime_ns"`
	Identity string        `json:"identity"` // UID of the sandbox, "" until PathIdentity
	System   string        `json:"system"`   // of the distribution's init: "starting", "running", "degraded", "unknown"

	// Bootstrapped reports that the runner has received the answer to its
	// bootstrap token.
	Bootstrapped bool `json:"bootstrapped,omitempty"`

	// Nested is the agentlab.NestedState of the guest, "" unless its identity has
	// Nested.
	Nested string `json:"nested,omitempty"`
}

// PrepareRequest asks a guest without identity to do what each of its copies
// would have to do: after the answer it can be saved as a template.
type PrepareRequest struct {
	Network *Network `json:"network,omitempty"` // of the copies
	Nested  bool     `json:"nested,omitempty"`  // load KVM
}

// WorkspaceDir is where a guest mounts the volume of its workspace.
const WorkspaceDir = "/work"

// MountTimeout limits a mount or unmount of a workspace: a large file system may be
// checked and repaired first, and written at its end.
const MountTimeout = 30 * time.Minute

// VolumeSerial is the serial number of the disk of a workspace in its guest
// (/sys/block/*/serial). It is the same for all volumes: a sandbox has at most one,
// and a VM that copies a template has the devices of the template.
const VolumeSerial = "agentlab-work"

// WorkspaceRequest asks a guest to mount the volume of its workspace at
// WorkspaceDir.
type WorkspaceRequest struct {
	// Format makes a new file system if the volume has none. The controller sets it
	// until a guest has mounted the volume: a file system that is incomplete is then
	// one whose creation was interrupted. Later it is a damaged one.
	Format bool `json:"format,omitempty"`
	// Bytes is the size of the volume, for which the guest waits.
	Bytes int64 `json:"bytes"`
}

// FreezeRequest asks a guest to write everything to the volume of its workspace, and
// to let processes that change the file system wait until it is thawed. The guest thaws
// it by itself after a time: the controller may be gone. It also thaws it before it
// mounts or unmounts the workspace.
type FreezeRequest struct {
	Seconds int `json:"seconds"` // from 1 to MaxFreezeSeconds
}

// MaxFreezeSeconds is the longest time that a guest freezes its workspace.
const MaxFreezeSeconds = 60

// Thawed is the end of a freeze.
type Thawed struct {
	// Held reports whether the file system was frozen from the answer to the
	// FreezeRequest until now. A guest can be wrong about this.
	Held bool `json:"held"`
}

// Workspace is the mounted file system of a workspace.
type Workspace struct {
	Bytes    int64 `json:"bytes"`              // of the file system
	Used     int64 `json:"used"`               // bytes
	New      bool  `json:"new,omitempty"`      // this call has created it
	Repaired bool  `json:"repaired,omitempty"` // errors were corrected when it was checked
}

// ExecRequest runs a command in the guest.
type ExecRequest struct {
	Command []string          `json:"command"`        // argv; empty: the user's login shell
	Env     map[string]string `json:"env,omitempty"`  // added to the user's environment
	Dir     string            `json:"dir,omitempty"`  // default: the user's home
	User    string            `json:"user,omitempty"` // default "agent"
	TTY     bool              `json:"tty,omitempty"`
	Rows    uint16            `json:"rows,omitempty"`
	Cols    uint16            `json:"cols,omitempty"`
	Term    string            `json:"term,omitempty"`
}

// AttachRequest attaches to a named terminal of the sandbox, which is created
// on first use. The terminal stays when its clients disconnect; a client that
// attaches receives the recent output first.
type AttachRequest struct {
	Session string `json:"session,omitempty"` // default "main"
	Rows    uint16 `json:"rows,omitempty"`
	Cols    uint16 `json:"cols,omitempty"`
	Term    string `json:"term,omitempty"`
}

// SSHKeyRequest authorises an ephemeral public key for a user.
type SSHKeyRequest struct {
	User      string `json:"user,omitempty"` // default "agent"
	PublicKey string `json:"public_key"`     // one authorized_keys line, no options
	Seconds   int64  `json:"seconds"`        // until it expires, 1..86400
}

// SSHKeyResponse has what a client needs to verify the guest's sshd. sshd runs
// when the response is sent.
type SSHKeyResponse struct {
	User     string   `json:"user"`
	Port     uint16   `json:"port"`
	HostKeys []string `json:"host_keys"` // public key lines
}

// PowerRequest asks the guest's init to stop.
type PowerRequest struct {
	Action string `json:"action"` // "poweroff" or "reboot"
}
