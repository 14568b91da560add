package agentlab

import "time"

// WorkspaceSelection is the workspace that a request wants for a sandbox.
type WorkspaceSelection struct {
	Workspace string        // ID or name
	Create    bool          // create it; it is an error if it exists
	Ensure    bool          // create it unless it exists
	SizeGB    int           // of a new one, in GiB; 0 means the default
	Storage   string        // of a new one; "" means the backend's default
	Backend   string        // its backend; "" means any, and for a new one the default
	Wait      time.Duration // how long to wait for it while another sandbox has it, 0 to MaxWorkspaceWait
}

// MaxWorkspaceWait is the longest time for which a sandbox can wait for a workspace.
const MaxWorkspaceWait = 24 * time.Hour

// WorkspaceUse is the selected workspace of a new sandbox.
type WorkspaceUse struct {
	ID      string
	Backend string     // its backend
	New     *Workspace // it is created with the sandbox; nil means that it exists
	Created Event      // of New
	Quota   WorkspaceQuota
	Wait    time.Duration
}

// LeaseRelease is how the release of a workspace was requested.
type LeaseRelease string

// The kinds of release.
const (
	ReleaseNone   LeaseRelease = ""       // not requested
	ReleaseClean  LeaseRelease = "clean"  // after the guest has unmounted it
	ReleaseForced LeaseRelease = "forced" // also if the guest does not unmount it
)

// WorkspaceLease is the right of a sandbox to use a workspace, or its place in the
// queue for it. It ends when the workspace is detached, at the latest when the sandbox
// is destroyed.
type WorkspaceLease struct {
	Number      int // the order of the queue of a workspace
	WorkspaceID string
	VMID        int    // of the sandbox
	UID         string // of the sandbox
	Nonce       string // random; a release names it, so that it cannot end a later lease
	RequestedAt time.Time
	WaitUntil   time.Time // one that is not acquired by then fails
	AcquiredAt  time.Time // zero while it waits
	Release     LeaseRelease
	Reason      string // why the workspace is not attached, mounted or released yet; one line
}

// Acquired reports whether the sandbox owns the workspace.
func (l WorkspaceLease) Acquired() bool { return !l.AcquiredAt.IsZero() }

// LeaseStep is what happened to the lease of a workspace.
type LeaseStep string

// The steps of a lease, in its events.
const (
	LeaseStepQueued   LeaseStep = "queued" // it waits until others have ended
	LeaseStepAcquired LeaseStep = "acquired"
	LeaseStepEnded    LeaseStep = "ended"
)
