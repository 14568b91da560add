package agentlab

import (
	"strings"
	"time"
)

// SnapshotKind is the purpose of a snapshot.
type SnapshotKind string

// The kinds of snapshots.
const (
	SnapshotSaved SnapshotKind = "saved" // a user saved it
	SnapshotFork  SnapshotKind = "fork"  // for the sandboxes of one fork, and deleted when they are created; or with Setup for those of jobs
)

// forkMark begins the UID of each snapshot for a fork: it identifies one that has no
// row as temporary.
const forkMark = "forksnap"

// NewForkUID returns a new UID for a snapshot of kind fork.
func NewForkUID() string { return forkMark + NewUID()[len(forkMark):] }

// IsForkUID reports whether NewForkUID has made a UID.
func IsForkUID(uid string) bool { return strings.HasPrefix(uid, forkMark) }

// SnapshotState is the state of a snapshot. Its row is deleted after the
// snapshot on the backend.
type SnapshotState string

// The states of a snapshot.
const (
	SnapshotSaving   SnapshotState = "SAVING"
	SnapshotReady    SnapshotState = "SAVED"
	SnapshotDeleting SnapshotState = "DELETING"
	SnapshotDeleted  SnapshotState = "DELETED" // in events only
)

// Snapshot is a saved sandbox: its disk and, if it ran or was suspended, its
// memory.
type Snapshot struct {
	UID   string // random ownership mark (NewUID, NewForkUID), set on the backend's object
	Name  string // unique among the saved ones of a sandbox; "" for a fork
	Kind  SnapshotKind
	State SnapshotState
	Keep  bool // it is not deleted with its sandbox, nor by retention; a fork: nor when no sandbox is being created from it

	// The sandbox that it was saved of. It may no longer exist.
	VMID        int
	SandboxUID  string
	SandboxName string
	Handle      string // backend.Ref.Handle of the sandbox
	Backend     string
	Profile     string
	Image       string // name@digest
	Resources   Resources
	Options     Options

	Setup  SetupEntry // of a snapshot after the commands under setup; zero for others
	UsedAt time.Time  // UTC, when a job used it last; zero if it is not such a snapshot

	Memory bool  // the memory of the guest was saved
	Bytes  int64 // that it occupies on the backend; 0 if that is not known

	CreatedAt time.Time // UTC, when it was requested
	SavedAt   time.Time // UTC; zero if it is not complete
}

// SnapshotFilter selects snapshots, in the order of their creation.
type SnapshotFilter struct {
	SandboxUID string // "" means any
}

// Origin is the snapshot that a sandbox was created from. The zero value means
// that it was created from its image.
type Origin struct {
	Snapshot string // UID
	Sandbox  string // UID of the sandbox that was saved
	Handle   string // backend.Ref.Handle of that sandbox
	Name     string // SANDBOX/NAME, or SANDBOX for a fork; only for users
}

// SnapshotQuota is the maximum of the snapshots that users save. Zero means no
// maximum.
type SnapshotQuota struct {
	Count int
	Bytes int64
}
