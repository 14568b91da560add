package agentlab

import (
	"encoding/json"
	"fmt"
	"time"
)

// Event is a row that records a change. It is written in the transaction of
// the change and sent to subscribers after the commit.
type Event struct {
	ID          int64 // strictly increasing in commit order
	Time        time.Time
	Kind        string // "sandbox.state", "job.status", "job.phase", "artifact.stored", "gc.deleted", …
	SandboxVMID int    // 0 if the event is not about a sandbox
	JobID       string // "" if the event is not about a job
	Message     string // one redacted line for people
	Data        string // JSON object for programs; "" or "{}" if there is no more data
}

// NewEvent returns an event with a formatted message and data as its JSON
// object; encoding/json must be able to encode data.
func NewEvent(kind string, data map[string]any, format string, args ...any) Event {
	e := Event{Kind: kind, Message: fmt.Sprintf(format, args...)}
	if text, err := json.Marshal(data); err == nil && len(data) > 0 {
		e.Data = string(text)
	}
	return e
}

// About returns a copy of e that is about a sandbox and a job; 0 and "" mean
// none.
func (e Event) About(vmid int, jobID string) Event {
	e.SandboxVMID, e.JobID = vmid, jobID
	return e
}

// Event kinds.
const (
	EventSandboxCreated = "sandbox.created"
	EventSandboxState   = "sandbox.state"
	EventSandboxLease   = "sandbox.lease"
	EventSandboxNetwork = "sandbox.network"
	EventSandboxNested  = "sandbox.nested" // whether virtual machines run in it

	EventSandboxSnapshot = "sandbox.snapshot"
	EventSandboxForked   = "sandbox.forked"

	EventWorkspaceState    = "workspace.state"
	EventWorkspaceSnapshot = "workspace.snapshot"
	EventWorkspaceLease    = "workspace.lease"
	EventSession           = "session"

	EventImageBuild     = "image.build" // progress of an image that a sandbox waits for
	EventJobCreated     = "job.created"
	EventJobStatus      = "job.status"
	EventJobPhase       = "job.phase"
	EventJobUnshipped   = "job.unshipped"
	EventJobMemory      = "job.memory" // the kernel of its guest has ended processes
	EventArtifactStored = "artifact.stored"
	EventMessage        = "message.posted"
	EventGC             = "gc.deleted"
	EventDrift          = "backend.drift"
	EventDaemon         = "daemon"
	EventSpace          = "host.space"
	EventClock          = "host.clock"
)

// EventKinds are the kinds of all events.
var EventKinds = []string{
	EventSandboxCreated, EventSandboxState, EventSandboxLease, EventSandboxNetwork, EventSandboxNested, EventSandboxSnapshot, EventSandboxForked,
	EventWorkspaceState, EventWorkspaceSnapshot, EventWorkspaceLease, EventSession,
	EventImageBuild, EventJobCreated, EventJobStatus, EventJobPhase, EventJobUnshipped, EventJobMemory, EventArtifactStored,
	EventMessage, EventGC, EventDrift, EventDaemon, EventSpace, EventClock, EventTokenCreated, EventTokenRevoked,
}

// Artifact is a file that a job uploaded, stored by the controller.
type Artifact struct {
	JobID     string
	Path      string // relative, slash-separated, ValidateArtifactPath holds
	Size      int64  // bytes
	SHA256    string // lower-case hex
	MIME      string // detected by AgentLab, never taken from the guest
	CreatedAt time.Time
}

// BootstrapToken is a one-time token with which a sandbox's runner fetches its
// configuration and secrets. Only the hash of the token is stored.
type BootstrapToken struct {
	Hash       string // lower-case hex SHA-256 of the token
	VMID       int
	ExpiresAt  time.Time
	ConsumedAt time.Time // zero until consumed
}

// Bounds of a bootstrap token's lifetime.
const (
	MinBootstrapTTL = 5 * time.Minute
	MaxBootstrapTTL = 15 * time.Minute
)
