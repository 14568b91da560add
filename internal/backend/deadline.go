package backend

import (
	"context"
	"time"
)

// Deadline is when a sandbox is powered off without anybody asking.
type Deadline struct {
	// Lease identifies the deadline: the end of the lease that it enforces, by
	// the caller's clock. The backend does not compare it with any clock.
	Lease time.Time `json:"lease"`
	// Left is the time that is left when the call is made; more than 0.
	Left time.Duration `json:"left"`
}

// DeadlineSetter is implemented by drivers with Capabilities.Deadline: what
// runs a sandbox's VM enforces the end of its lease by itself, whether or not
// the driver's process lives.
type DeadlineSetter interface {
	// SetDeadline powers the sandbox off when d.Left has passed: the guest is
	// asked first, then its power is cut. The time is measured by a clock that
	// nobody sets and that goes on while the host sleeps. A deadline replaces
	// the one before; one with the same Lease changes nothing, so that a
	// changed clock of the caller moves no deadline that is in force.
	//
	// It is allowed in every power state from Create to Destroy, and holds for
	// later Starts until the host is restarted. A sandbox that was powered off
	// this way is PowerStopped with Instance.Expired, until the next Start or
	// Stop. Code unsupported means that what runs this VM is too old to know
	// deadlines.
	SetDeadline(ctx context.Context, ref Ref, d Deadline) error
}
