package backend

import (
	"context"
	"time"
)

// Deadline is the time at which a sandbox is powered off without a request.
type Deadline struct {
	// Lease identifies the deadline. It is the end of the enforced lease, by
	// the caller's clock. The backend does not compare it with any clock.
	Lease time.Time `json:"lease"`
	// Left is the time left at the call; it is positive.
	Left time.Duration `json:"left"`
}

// DeadlineSetter is implemented by drivers whose sandboxes' VMs are run by a
// process that enforces the end of a lease even if the driver's process has
// ended.
type DeadlineSetter interface {
	// SetDeadline powers the sandbox off when d.Left has passed: the guest is
	// asked to power off first, then the power is cut. The time is measured by
	// a clock that cannot be set and that also runs while the host is
	// suspended. A deadline replaces the one before. A deadline with the same
	// Lease changes nothing, so that a change of the caller's clock does not
	// move a deadline that is in force.
	//
	// It is allowed in every power state from Create to Destroy, and holds for
	// later Starts until the host is restarted. A sandbox that was powered off
	// this way is PowerStopped with Instance.Expired, until the next Start or
	// Stop. Code unsupported means that the process that runs this VM is too
	// old to support deadlines.
	SetDeadline(ctx context.Context, ref Ref, d Deadline) error
}
