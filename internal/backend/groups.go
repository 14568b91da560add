package backend

import (
	"context"
	"io"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Groups are the groups of methods that a driver implements in addition to Driver; nil
// means that it does not support the group.
type Groups struct {
	Power     Power
	Net       Net
	Console   Console
	Snapshots Snapshots
	Templates Templates
	Volumes   Volumes
	Host      Host
}

// GroupsOf returns the groups of a driver.
func GroupsOf(d Driver) (g Groups) {
	g.Power, _ = d.(Power)
	g.Net, _ = d.(Net)
	g.Console, _ = d.(Console)
	g.Snapshots, _ = d.(Snapshots)
	g.Templates, _ = d.(Templates)
	g.Volumes, _ = d.(Volumes)
	g.Host, _ = d.(Host)
	return g
}

// Power is the group of drivers that can suspend a sandbox.
type Power interface {
	// Suspend pauses a running sandbox: its memory is kept, its CPUs are
	// paused, and Inspect returns PowerSuspended. Suspending a suspended
	// sandbox succeeds; for a stopped one the error has
	// agentlab.CodeConflict.
	Suspend(ctx context.Context, ref Ref) error

	// Resume continues a suspended sandbox. Resuming a running sandbox
	// succeeds; for a stopped one the error has agentlab.CodeConflict.
	Resume(ctx context.Context, ref Ref) error

	// SuspendToDisk saves the memory of a running or suspended sandbox to disk
	// and ends its VM: no process of it remains. Inspect returns PowerSuspended,
	// also after a restart of the host, and Resume continues the guest as it was.
	// After an error, or a crash at any point, the sandbox is either as before or
	// suspended to disk. Suspending a sandbox that is suspended to disk succeeds;
	// for a stopped one the error has agentlab.CodeConflict. If the host cannot
	// continue the guest, because its processor or its emulator was replaced, the
	// error of Resume has agentlab.CodeUnsupported; Stop then discards the memory.
	//
	// A Resume whose ctx ends may go on: the next one waits for it. If the VM ends
	// after the guest has continued and before it answers with its identity, the
	// memory is lost: Inspect returns PowerCrashed with that reason, and the errors
	// of Start and Resume have agentlab.CodeConflict until Stop.
	//
	// Without Capabilities.SuspendToDisk the error has agentlab.CodeUnsupported, and
	// nothing changes.
	SuspendToDisk(ctx context.Context, ref Ref) error

	// SetDeadline powers the sandbox off when d.Left has passed: the guest is
	// asked to power off first, then the power is cut. The time is measured by
	// a clock that cannot be set and that also runs while the host is
	// suspended. A deadline replaces the one before. A deadline with the same
	// Lease changes nothing, so that a change of the caller's clock does not
	// move a deadline that is in force.
	//
	// It is enforced even if the driver's process has ended. It is allowed in every
	// power state from Create to Destroy, and holds for later Starts until the host is
	// restarted. A sandbox that was powered off this way is PowerStopped with
	// Instance.Expired, until the next Start or Stop. Code unsupported means that the
	// process that runs this VM is too old to support deadlines, or that the driver
	// lacks Capabilities.Deadlines.
	SetDeadline(ctx context.Context, ref Ref, d Deadline) error
}

// Deadline is the time at which a sandbox is powered off without a request.
type Deadline struct {
	// Lease identifies the deadline. It is the end of the enforced lease, by
	// the caller's clock. The backend does not compare it with any clock.
	Lease time.Time `json:"lease"`
	// Left is the time left at the call; it is positive.
	Left time.Duration `json:"left"`
}

// Net is the group of drivers that can change a sandbox's policy and that record the
// use of the network.
type Net interface {
	// UpdateNetwork replaces the policy of a sandbox, also for later Starts.
	// When it returns nil, the policy is in force, and connections of a
	// running guest that it denies are closed. After an error the sandbox has
	// the old policy or no network at all, never a mixture.
	UpdateNetwork(ctx context.Context, ref Ref, n agentlab.Network) error

	// EgressLog returns the records of a sandbox whose Seq is above after,
	// oldest first, at most limit of them. It does not wait. A gap between
	// sequence numbers means that records were dropped, because the size
	// of the log is limited.
	EgressLog(ctx context.Context, ref Ref, after int64, limit int) ([]agentlab.EgressRecord, error)

	// RecordEgress appends a record to the egress log of a sandbox whose VM
	// runs. It sets Seq and VMID. Without Capabilities.EgressRecords the error has
	// agentlab.CodeUnsupported.
	RecordEgress(ctx context.Context, ref Ref, r agentlab.EgressRecord) error
}

// Console is the group of drivers that keep what VMs write: the console, and disks of
// which this host can have a copy.
type Console interface {
	// ConsoleLog opens the console output of the VM since its creation. The
	// driver limits its size and drops the oldest output. With follow, Read
	// waits for more until ctx ends or the sandbox is destroyed.
	ConsoleLog(ctx context.Context, ref Ref, follow bool) (io.ReadCloser, error)

	// ExportDisk writes the root disk of a stopped sandbox to path, which must not
	// exist, as a sparse raw image. The sandbox does not change. If it is not
	// PowerStopped, the error has agentlab.CodeConflict. After an error there may be
	// a part of the file. A driver that cannot do it returns agentlab.CodeUnsupported.
	ExportDisk(ctx context.Context, ref Ref, path string) error
}

// Host is the group of drivers that know facts about their hosts. A driver that does not
// know one of them returns what the method says.
type Host interface {
	// Accel returns the accelerator of the VMs' CPUs, e.g. "kvm" or "tcg", and "" while
	// it is not known.
	Accel(ctx context.Context) string

	// Nested returns nil if the host, or one of several, can provide virtualization to
	// guests (Spec.Resources.Nested), or if that is not known. Otherwise the error has
	// code unsupported, the field resources.nested, and a hint with what to change. Start
	// returns the same error for a sandbox with on. With off, the guest has CPUs without
	// virtualization; with auto and on, CPUs that have it if the host can provide it. A
	// driver without this group rejects on, and its guests have no virtualization.
	Nested(ctx context.Context) error

	// Room returns an error with code no_space if the host, or every one of
	// several, lacks the memory or the disk space for another sandbox with these
	// resources now. It reserves nothing. After any other error that is not known.
	Room(ctx context.Context, r agentlab.Resources) error

	// Memory returns the memory of all processes of a running or suspended
	// sandbox. It does not wait for the guest. If it has no process the error has
	// agentlab.CodeConflict, and if that is never known, agentlab.CodeUnsupported.
	Memory(ctx context.Context, ref Ref) (Memory, error)

	// Taken returns the numbers from first to last, both included, that any
	// object on the backend has, whether AgentLab created it or not. It
	// reserves nothing: Create still returns code exists if another user took
	// the number in the meantime. The result may be a few seconds old. After
	// an error the state of every number is unknown. Without
	// Capabilities.SharedNumbers it returns nil.
	Taken(ctx context.Context, first, last int) ([]int, error)
}

// Memory is memory of the host, in bytes.
type Memory struct {
	Unique int64 // only this sandbox has it, and the host cannot drop it
	// Shared is memory that other processes have too, such as that of a template, or
	// that the host can drop, because it is unchanged from a file.
	Shared int64
	// Proportional is Unique, and of Shared the part that results when each page is
	// divided by the number of processes that have it.
	Proportional int64
}
