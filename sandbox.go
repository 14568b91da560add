package agentlab

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"
)

// SandboxState is the state of a sandbox in its life cycle.
type SandboxState string

// The states of a sandbox. DESTROYED is final.
const (
	SandboxRequested    SandboxState = "REQUESTED"    // only the row exists
	SandboxProvisioning SandboxState = "PROVISIONING" // the backend is creating disk and VM
	SandboxBooting      SandboxState = "BOOTING"      // started; agent-runner has not answered yet
	SandboxPooled       SandboxState = "POOLED"       // it waits in the warm pool for its user, without an identity
	SandboxReady        SandboxState = "READY"        // agent-runner has answered and has its identity
	SandboxRunning      SandboxState = "RUNNING"      // a job runs in it
	SandboxCompleted    SandboxState = "COMPLETED"    // its job succeeded
	SandboxFailed       SandboxState = "FAILED"       // its job, its boot or its VM failed
	SandboxTimeout      SandboxState = "TIMEOUT"      // its lease or its job's time limit ended
	SandboxSuspended    SandboxState = "SUSPENDED"    // paused by request; its memory is kept
	SandboxStopped      SandboxState = "STOPPED"      // powered off, disk kept
	SandboxDestroyed    SandboxState = "DESTROYED"    // deleted from the backend
)

// SandboxStates lists all states of a sandbox, in the order of its life cycle.
var SandboxStates = []SandboxState{
	SandboxRequested, SandboxProvisioning, SandboxBooting, SandboxPooled, SandboxReady, SandboxRunning, SandboxCompleted,
	SandboxFailed, SandboxTimeout, SandboxSuspended, SandboxStopped, SandboxDestroyed,
}

var sandboxNext = map[SandboxState][]SandboxState{
	SandboxRequested:    {SandboxProvisioning, SandboxFailed, SandboxTimeout, SandboxDestroyed},
	SandboxProvisioning: {SandboxBooting, SandboxFailed, SandboxTimeout, SandboxStopped, SandboxDestroyed},
	SandboxBooting:      {SandboxPooled, SandboxReady, SandboxFailed, SandboxTimeout, SandboxStopped, SandboxDestroyed},
	SandboxPooled:       {SandboxBooting, SandboxFailed, SandboxDestroyed},
	SandboxReady:        {SandboxRunning, SandboxSuspended, SandboxStopped, SandboxFailed, SandboxTimeout, SandboxDestroyed},
	SandboxRunning:      {SandboxReady, SandboxSuspended, SandboxCompleted, SandboxStopped, SandboxFailed, SandboxTimeout, SandboxDestroyed},
	SandboxSuspended:    {SandboxReady, SandboxRunning, SandboxStopped, SandboxFailed, SandboxTimeout, SandboxDestroyed},
	SandboxCompleted:    {SandboxReady, SandboxStopped, SandboxFailed, SandboxTimeout, SandboxDestroyed},
	SandboxFailed:       {SandboxStopped, SandboxDestroyed},
	SandboxTimeout:      {SandboxStopped, SandboxDestroyed},
	SandboxStopped:      {SandboxBooting, SandboxSuspended, SandboxFailed, SandboxTimeout, SandboxDestroyed},
	SandboxDestroyed:    {},
}

// CanBecome reports whether the transition from s to next is in the table.
// A state may not become itself.
func (s SandboxState) CanBecome(next SandboxState) bool {
	return slices.Contains(sandboxNext[s], next)
}

// Valid reports whether s is one of the states above.
func (s SandboxState) Valid() bool { _, ok := sandboxNext[s]; return ok }

// Final reports whether s has no further transition.
func (s SandboxState) Final() bool { return s.Valid() && len(sandboxNext[s]) == 0 }

// HasVM reports whether the VM of a sandbox in state s is expected to run.
func (s SandboxState) HasVM() bool {
	switch s {
	case SandboxBooting, SandboxPooled, SandboxReady, SandboxRunning, SandboxCompleted, SandboxSuspended:
		return true
	}
	return false
}

// Desired is the requested state of a sandbox; the reconcile loop drives State
// towards it.
type Desired string

// The states that can be requested of a sandbox.
const (
	DesiredRunning         Desired = "running"
	DesiredSuspended       Desired = "suspended"
	DesiredSuspendedToDisk Desired = "suspended_to_disk"
	DesiredStopped         Desired = "stopped"
	DesiredDestroyed       Desired = "destroyed"
)

// Valid reports whether d is one of the states above.
func (d Desired) Valid() bool {
	switch d {
	case DesiredRunning, DesiredSuspended, DesiredSuspendedToDisk, DesiredStopped, DesiredDestroyed:
		return true
	}
	return false
}

// Suspended reports whether d is one of the two kinds of suspension.
func (d Desired) Suspended() bool { return d == DesiredSuspended || d == DesiredSuspendedToDisk }

// ProfileLost is the profile name of a sandbox whose row was lost and
// recreated. No profile can have this name.
const ProfileLost = "(unknown)"

// ProfilePool is the profile name of a sandbox of the warm pool until it is handed
// out. No profile can have this name.
const ProfilePool = "(pool)"

// The profile names of a maintenance sandbox, which only has a workspace: no network,
// no runner and no secrets. No profile can have these names.
const (
	ProfileFiles = "(files)" // its guest has mounted the workspace
	ProfileDisk  = "(disk)"  // its guest has the disk of the workspace, and does not mount it
)

// StartKind is how the first guest of a sandbox was started.
type StartKind string

// The kinds of starts.
const (
	StartBoot     StartKind = "boot"     // its guest booted
	StartTemplate StartKind = "template" // as a copy of a template
	StartSnapshot StartKind = "snapshot" // it continues the guest of a snapshot or of a fork's source
	StartPool     StartKind = "pool"     // it was handed out by the warm pool
)

// Sandbox is one isolated environment. It is identified by its VMID or its
// Name; both are unique among sandboxes that are not DESTROYED.
type Sandbox struct {
	VMID    int    // allocated by AgentLab, never reused while a row with it exists
	UID     string // random ownership mark (NewUID), set on the backend's object
	Name    string // ValidateName holds
	Backend string // its name in the configuration
	Profile string
	Image   string // image reference, resolved at creation: name@digest

	State   SandboxState
	Desired Desired
	Reason  string // why it is FAILED, TIMEOUT or STOPPED, or stays SUSPENDED; one redacted line
	Waiting string // why it is currently waiting; one redacted line, "" if it is not
	OnDisk  bool   // it is SUSPENDED to disk: its memory is a file, and no VM of it exists

	Resources Resources
	Options   Options
	Network   Network
	// IPv4 and IPv6 are leased to the sandbox from the backend's network
	// until it is DESTROYED. They are zero on backends that lease no
	// addresses.
	IPv4, IPv6 netip.Addr
	// NetworkPending reports that Network was changed and that the backend
	// has not confirmed the change yet.
	NetworkPending bool
	// Salvage reports that it is kept without power, because its job has ended and has
	// work that is not stored. The end of its lease destroys it.
	Salvage   bool
	Keepalive bool      // lease expiry stops and destroys it only if this is false or the lease was not renewed
	JobID     string    // the job it was created for; "" if a user created it
	Workspace string    // ID of its workspace, for which it has or wants a lease; "" if it has none
	From      Origin    // the snapshot it was created from
	Start     StartKind // "" until it is known
	// NestedState is whether virtual machines run in its guest, which the guest has
	// reported at its last start; "" if Resources.Nested is off, and before the report.
	NestedState NestedState
	// Unbootable reports that it is FAILED because its disk was started again and its
	// guest did not answer.
	Unbootable bool
	Restoring  string // UID of the snapshot to which it is being restored; "" if it is not
	IP         string // address of the guest on its own network; "" until known
	Handle     string // backend.Ref.Handle: opaque; "" if not known

	LeaseExpiresAt time.Time // UTC, always set
	CreatedAt      time.Time // UTC; moves with the clock of the host when that jumps, like BootedAt
	UpdatedAt      time.Time // UTC
	BootedAt       time.Time // UTC; zero until the first answer of agent-runner
}

// Pooled reports whether s belongs to the warm pool, and to no user yet.
func (s Sandbox) Pooled() bool { return s.Profile == ProfilePool }

// StartsAgain reports whether s has FAILED after its guest had booted, for example because
// the guest or the host has crashed, and its disk has not been started since.
func (s Sandbox) StartsAgain() bool {
	return s.State == SandboxFailed && s.Desired == DesiredRunning && !s.BootedAt.IsZero() && !s.Unbootable && s.Profile != ProfileLost
}

// Maintenance reports whether s is a maintenance sandbox.
func (s Sandbox) Maintenance() bool { return s.Profile == ProfileFiles || s.Profile == ProfileDisk }

// Equal reports whether s and o are equal in every field.
func (s Sandbox) Equal(o Sandbox) bool { return reflect.DeepEqual(s, o) }

// Resources are the resource limits of a sandbox.
type Resources struct {
	Cores      int // virtual CPUs, 1..256
	MemoryMB   int // MiB of RAM, 128..1048576
	RootSizeGB int // GiB of root disk; 0 means the image's own size
	Nested     Nested
}

// Validate checks the ranges.
func (r Resources) Validate() error {
	switch {
	case r.Cores < 1 || r.Cores > 256:
		return Errorf(CodeInvalid, "%d is not between 1 and 256", r.Cores).WithField("resources.cores")
	case r.MemoryMB < 128 || r.MemoryMB > 1<<20:
		return Errorf(CodeInvalid, "%d is not between 128 and 1048576", r.MemoryMB).WithField("resources.memory_mb")
	case r.RootSizeGB < 0 || r.RootSizeGB > 65536:
		return Errorf(CodeInvalid, "%d is not between 0 and 65536", r.RootSizeGB).WithField("storage.root_size_gb")
	case !r.Nested.Valid():
		return Errorf(CodeInvalid, "%q is not off, auto or on", string(r.Nested)).WithField("resources.nested")
	}
	return nil
}

// Lease bounds: a lease always exists and always ends.
const (
	MinTTL = time.Minute
	MaxTTL = 30 * 24 * time.Hour
)

// ValidateTTL checks the duration of a lease or job.
func ValidateTTL(d time.Duration) error { return CheckTTL(d, MaxTTL) }

// CheckTTL checks that a duration is at least MinTTL and at most the maximum.
func CheckTTL(d, most time.Duration) error {
	limit, which := MinTTL, "shorter than the minimum"
	switch {
	case d > most:
		limit, which = most, "longer than the maximum"
	case d >= MinTTL:
		return nil
	}
	return Errorf(CodeInvalid, "%s is %s of %s", FormatTTL(d), which, FormatTTL(limit)).
		WithField("ttl").WithHint("give a duration such as 30m, 4h or 2d")
}

// FormatTTL formats a duration without its zero units: 30d, 12h, 1h30m.
func FormatTTL(d time.Duration) string {
	const day = 24 * time.Hour
	if d >= day && d%day == 0 {
		return fmt.Sprintf("%dd", d/day)
	}
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = s[:len(s)-2]
	}
	if strings.HasSuffix(s, "h0m") {
		s = s[:len(s)-2]
	}
	return s
}
