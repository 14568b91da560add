package agentlab

import (
	"slices"
	"time"
)

// JobRequest is a request to create a job. Zero values mean the profile's or
// the configured defaults.
type JobRequest struct {
	RepoURL   string
	BundleID  string // an uploaded git bundle instead of RepoURL
	Ref       string
	Depth     int
	Profile   string
	Backend   string // of its sandboxes; "" means the one of its workspace, else the profile's, else the default
	Image     string
	Task      string
	Agent     string
	Mode      string
	TTL       time.Duration
	Keepalive *bool

	NoPreflight bool // skip the check of the agent's key and model endpoint
	NoSetup     bool // do not run the setup commands of the repository, and start no services

	Devcontainer string       // one of DevcontainerModes; "" means the profile's
	Setup        *SetupSource // of the repository's commands; nil means that no snapshot after them is used or made

	Attempts *JobAttempts // nil means that the job runs its agent once

	Workspace *WorkspaceSelection // of its sandbox, which is then created with the job; nil means none
	Session   string              // ID of the session that Workspace belongs to; "" means none
	Branch    string              // of the work; "" means agentlab/ID

	// Sandbox requests a sandbox together with the job; only its Name,
	// Cores and MemoryMB are used. nil means a sandbox with the name of the
	// job, created when the limits allow one more.
	Sandbox *SandboxRequest
}

// The kinds of maintenance sandboxes, see ProfileFiles and ProfileDisk.
const (
	MaintenanceFiles = "files"
	MaintenanceDisk  = "disk"

	// MaintenanceSalvage is for the job service only.
	MaintenanceSalvage = "salvage"
)

// SandboxRequest is a request to create a sandbox. Zero values mean the
// profile's or the configured defaults.
type SandboxRequest struct {
	Name      string // generated when empty
	Profile   string
	Backend   string // "" means the one of its snapshot or workspace, else the profile's, else the default
	Image     string // image name; when empty, that of the profile, then the default
	Keepalive *bool
	TTL       time.Duration
	Cores     int
	MemoryMB  int
	Nested    Nested // "" means that of the profile

	// From is the snapshot SANDBOX/NAME to start from; "" means the image. Profile,
	// image, cores and memory are then by default those of the snapshot.
	From string

	Workspace *WorkspaceSelection // nil means none

	// Maintenance is MaintenanceFiles or MaintenanceDisk for a maintenance sandbox, which
	// has a Workspace, and of a profile only the image, the resources and the options of
	// the backend; otherwise "".
	Maintenance string

	Job *JobRequest // a job to run in it; set by callers of the API only

	// The rest is set by the job service only.

	JobID        string        // the job that it is for
	Session      string        // ID of the session that it is for; set by the session service, too
	Extra        time.Duration // added to the lease for uploads; does not count against the maximum
	DefaultImage string        // replaces the configured default
	Fork         string        // UID of the snapshot, made by SaveForAttempts, to start from; "" means the image
}

// MaxFork is the maximum number of sandboxes of one fork.
const MaxFork = 64

// ForkRequest is a request to create sandboxes that continue the guest of
// another one.
type ForkRequest struct {
	Count      int           // 1 to MaxFork
	NamePrefix string        // of the names PREFIX-1, PREFIX-2, …; "" means the name of the source
	TTL        time.Duration // 0 means the profile's
}

// JobFilter selects jobs, the newest first.
type JobFilter struct {
	Statuses    []JobStatus // empty means all
	SandboxVMID int         // 0 means any
	ParentID    string      // only attempts of this job, and the one that prepares them; "" means any job
	Salvages    string      // only jobs that extract the work of this job; "" means any job
	Limit       int         // maximum number; 0 means no limit
	Before      JobKey      // only jobs after this one in the list; the zero value is the first page
}

// JobKey is the position of a job in a list. The job may no longer exist.
type JobKey struct {
	CreatedAt time.Time
	ID        string
}

// Key returns the position of j in a list.
func (j Job) Key() JobKey { return JobKey{CreatedAt: j.CreatedAt, ID: j.ID} }

// SandboxFilter selects sandboxes in ascending order of VMID.
type SandboxFilter struct {
	States    []SandboxState // empty means all
	Destroyed bool           // include DESTROYED sandboxes; so does the state DESTROYED in States
	Limit     int            // maximum number; 0 means no limit
	AfterVMID int            // only higher VMIDs; the cursor of a page
	NoPooled  bool           // without those of the warm pool
}

// EventFilter selects events in ascending order of ID.
type EventFilter struct {
	AfterID     int64    // only later events
	Kinds       []string // empty means all
	SandboxVMID int      // 0 means any
	JobIDs      []string // of these jobs; empty means any
	Limit       int      // maximum number; 0 means no limit
	Tail        bool     // with Limit, the last ones instead of the first
	From        int64    // only this event and later ones
}

// Match reports whether an event is selected, ignoring Limit and Tail.
func (f EventFilter) Match(e Event) bool {
	return e.ID > f.AfterID && (len(f.Kinds) == 0 || slices.Contains(f.Kinds, e.Kind)) &&
		(f.SandboxVMID == 0 || f.SandboxVMID == e.SandboxVMID) && (len(f.JobIDs) == 0 || slices.Contains(f.JobIDs, e.JobID)) && e.ID >= f.From
}

// Grant is a permission that a sandbox gets when it exchanges its bootstrap
// token. Only the hash of the grant's token is stored.
type Grant struct {
	Hash      string // lower-case hex SHA-256 of the token
	Kind      string // GrantRunner, GrantUpload or GrantMessages
	VMID      int
	JobID     string // "" for a sandbox without a job
	ExpiresAt time.Time
}

// The kinds of grants.
const (
	GrantRunner = "runner" // reports, logs, directives and the repository of one job
	GrantUpload = "upload" // artifacts of one job

	GrantMessages = "messages" // messages of the scopes of one sandbox
)
