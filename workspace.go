package agentlab

import "time"

// WorkspaceState is the state of a workspace. Its row is deleted after its volume.
type WorkspaceState string

// The states of a workspace.
const (
	WorkspaceCreating  WorkspaceState = "CREATING"  // its volume is being created or copied
	WorkspaceReady     WorkspaceState = "READY"     // it can be used
	WorkspaceGrowing   WorkspaceState = "GROWING"   // its volume is being made larger
	WorkspaceRestoring WorkspaceState = "RESTORING" // its volume gets the content of a snapshot
	WorkspaceFailed    WorkspaceState = "FAILED"    // its volume was not created, is missing, or is partial
	WorkspaceTrashed   WorkspaceState = "TRASHED"   // deleted, but its volume still exists
	WorkspaceDeleting  WorkspaceState = "DELETING"  // its volume is being deleted
	WorkspaceDeleted   WorkspaceState = "DELETED"   // in events only
)

// WorkspaceStates are the states that rows have.
var WorkspaceStates = []WorkspaceState{
	WorkspaceCreating, WorkspaceReady, WorkspaceGrowing, WorkspaceRestoring, WorkspaceFailed, WorkspaceTrashed, WorkspaceDeleting,
}

// Live reports whether a workspace in that state is not deleted: it has its name.
func (s WorkspaceState) Live() bool { return s != WorkspaceTrashed && s != WorkspaceDeleting }

// WorkspaceOperation is what the backend does with the volume of a workspace.
type WorkspaceOperation string

// WorkspaceOperations are all operations.
var WorkspaceOperations = []WorkspaceOperation{"create", "fork", "resize", "restore"}

// Operation returns the operation that a workspace waits for, "" if there is none.
func (v Workspace) Operation() WorkspaceOperation {
	switch {
	case v.State == WorkspaceCreating && v.From.UID != "":
		return "fork"
	case v.State == WorkspaceCreating:
		return "create"
	case v.State == WorkspaceGrowing:
		return "resize"
	case v.State == WorkspaceRestoring:
		return "restore"
	}
	return ""
}

// Workspace is a disk that outlives the sandboxes that use it.
type Workspace struct {
	ID      string // NewWorkspaceID
	UID     string // random ownership mark (NewUID) of its volume
	Name    string // unique among those that are not deleted
	Backend string
	Storage string // one of the backend's storages; "" until it is known, and on backends without storages
	Handle  string // backend.VolumeRef.Handle
	SizeGB  int    // of the volume, in GiB; until it exists, as requested
	State   WorkspaceState
	Reason  string // why it is FAILED, or why the current step is tried again; one line

	Formatted bool // a guest has mounted it

	GrowToGB  int             // the requested size in GiB of a GROWING one; otherwise 0
	Restoring string          // UID of the snapshot of a RESTORING one; otherwise ""
	From      WorkspaceOrigin // what it is a copy of

	CreatedAt time.Time // UTC, when it was requested
	UpdatedAt time.Time // UTC
	ReadyAt   time.Time // UTC, when its volume was created; zero before
	TrashedAt time.Time // UTC; zero if it is not in the trash
}

// WorkspaceOrigin is the volume of which a workspace is a copy. The zero value means
// that it was created empty.
type WorkspaceOrigin struct {
	UID      string // of the volume
	Handle   string // backend.VolumeRef.Handle of the volume
	Snapshot string // UID of its snapshot; "" means the volume itself
	Name     string // WORKSPACE or WORKSPACE/SNAPSHOT; only for users
}

// WorkspaceSnapshotState is the state of a snapshot of a workspace. Its row is
// deleted after the snapshot on the backend.
type WorkspaceSnapshotState string

// The states of a snapshot of a workspace.
const (
	WorkspaceSnapshotSaving   WorkspaceSnapshotState = "SAVING"
	WorkspaceSnapshotReady    WorkspaceSnapshotState = "SAVED"
	WorkspaceSnapshotDeleting WorkspaceSnapshotState = "DELETING"
	WorkspaceSnapshotDeleted  WorkspaceSnapshotState = "DELETED" // in events only
)

// WorkspaceSnapshot is the saved content of a workspace. It is deleted with its
// workspace.
type WorkspaceSnapshot struct {
	UID         string // random ownership mark (NewUID) of the snapshot on the backend
	Name        string // unique among the snapshots of a workspace
	WorkspaceID string
	State       WorkspaceSnapshotState
	Consistency WorkspaceConsistency
	SizeGB      int       // of the workspace when it was saved, in GiB
	Formatted   bool      // as the workspace was when it was saved
	CreatedAt   time.Time // UTC, when it was requested
	SavedAt     time.Time // UTC; zero if it is not complete
}

// WorkspaceConsistency is what a snapshot of a workspace contains of what a sandbox has
// written. For one that is SAVING it is what was requested.
type WorkspaceConsistency string

// The kinds of consistency.
const (
	// ConsistencyDetached: no sandbox had the workspace.
	ConsistencyDetached WorkspaceConsistency = "detached"
	// ConsistencyFrozen: the guest had written everything, and changed nothing while
	// the workspace was saved, as the guest says. The file system is clean.
	ConsistencyFrozen WorkspaceConsistency = "frozen"
	// ConsistencyCrash: what a power cut would have left. The file system is repaired
	// from its journal when it is mounted.
	ConsistencyCrash WorkspaceConsistency = "crash"
)

// AttachedConsistencies are those that a snapshot of an attached workspace can have.
var AttachedConsistencies = []WorkspaceConsistency{ConsistencyFrozen, ConsistencyCrash}

// MaxWorkspaceSnapshots bounds the snapshots of one workspace.
const MaxWorkspaceSnapshots = 64

// WorkspaceQuota is the maximum of all workspaces, with those in the trash. Zero
// means no maximum.
type WorkspaceQuota struct {
	Count   int
	TotalGB int // of their sizes, in GiB
}

// NewWorkspaceID returns a new ID: "ws-" and 13 characters (64 random bits).
func NewWorkspaceID() string { return workspacePrefix + randomID(8) }

const workspacePrefix = "ws-"

// IsWorkspaceID reports whether s has the format of a workspace's ID.
func IsWorkspaceID(s string) bool { return isID(s, workspacePrefix) }

// ValidateWorkspaceName checks the name of a new workspace: ValidateName holds, and
// it does not have the format of an ID.
func ValidateWorkspaceName(s string) error {
	if err := ValidateName(s); err != nil {
		return err
	}
	if IsWorkspaceID(s) {
		return Errorf(CodeInvalid, "%q is a workspace ID, not a name", s).WithField("name").WithHint("choose another name")
	}
	return nil
}
