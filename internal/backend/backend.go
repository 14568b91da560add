// Package backend is the contract between AgentLab's services and the places
// where sandboxes run. A driver implements Driver and whatever optional
// interfaces its Capabilities announce; internal/backend/backendtest checks
// every sentence written here.
//
// Rules for every method:
//
//   - It is idempotent: calling it again after success, failure or a crash at
//     any point inside it is safe and leads to the same result.
//   - It is cancellable: when ctx ends it returns soon, and what it had begun
//     is found by List and can be finished or destroyed by another call.
//   - It may be called from many goroutines; calls for one Ref are serialised
//     by the caller, calls for different Refs are not.
//   - It touches only what bears our mark (the UID). A foreign object in our
//     way is never overwritten or removed: the sandbox is made in another place,
//     or the error is agentlab.CodeExists.
//   - The connections and listeners that it returns outlive ctx, which bounds
//     their opening only. Their addresses are not nil and their deadlines work;
//     CloseWrite is optional.
//   - Its errors are *agentlab.Error with one of the codes not_found, exists,
//     busy, unsupported, denied, no_space, unavailable, unknown_outcome,
//     invalid or internal. Unknown is never reported as not_found.
//
// Volumes, snapshots and forks will fit in without a change of these methods: a
// volume and a snapshot are named by a Ref, too; Spec gets the volumes to attach
// and the sandbox or snapshot to begin from; each is an optional interface of
// its own. Capabilities then says only what an interface cannot, such as whether
// a volume can be attached to a running VM.
package backend

import (
	"context"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Ref names one sandbox on a backend. Two Refs with one UID name the same
// sandbox.
type Ref struct {
	UID string // ownership mark; the key
	// Handle is Ref.Handle of what Inspect and List returned: it says where the
	// sandbox is. It is opaque and at most MaxHandle bytes long. Every method
	// works without it, and with one that is outdated, if slower: the driver
	// then looks for the mark. What a Handle names and does not bear the mark is
	// left alone. A Handle changes only while the sandbox does not run.
	Handle string
}

// MaxHandle bounds Ref.Handle, in bytes.
const MaxHandle = 1024

// RefOf returns the Ref of a sandbox.
func RefOf(sb agentlab.Sandbox) Ref { return Ref{UID: sb.UID, Handle: sb.Handle} }

// Driver is what every backend must do.
type Driver interface {
	// Info is constant for the life of the driver and does no I/O.
	Info() Info

	// Check looks at the host and tells what is missing or wrong, each
	// finding with a remedy. It changes nothing.
	Check(ctx context.Context) []Finding

	// Validate refuses, with code unsupported and the field named, whatever
	// in spec this backend cannot honour. It does no I/O; Create calls it.
	// A request is validated before it gets a number: VMID may be 0 here.
	Validate(spec Spec) error

	// Create makes disk and configuration, marked with spec.UID before
	// anything else, and does not start it. A second Create with the same
	// spec is a success; one with the same VMID and another UID makes a sandbox
	// of its own or is exists. Afterwards Inspect answers PowerStopped.
	Create(ctx context.Context, spec Spec) error

	// Start powers it on (a suspended one is agentlab.CodeConflict) and returns when the VM runs, which is before
	// anything in the guest answers. Starting a running sandbox succeeds.
	Start(ctx context.Context, ref Ref) error

	// Stop powers it off: it asks the guest, waits up to grace, then cuts the
	// power. grace 0 cuts at once, and so does any on a suspended one, whose
	// guest cannot be asked. Stopping a stopped sandbox succeeds, and
	// a crashed one is PowerStopped afterwards.
	Stop(ctx context.Context, ref Ref, grace time.Duration) error

	// Destroy removes VM, disk and every other trace, in any power state, and
	// returns when nothing is left. Destroying what does not exist succeeds.
	Destroy(ctx context.Context, ref Ref) error

	// Inspect tells what is there now. Code not_found means proven absent.
	Inspect(ctx context.Context, ref Ref) (Instance, error)

	// List tells all that bears our mark, including what a crash left half
	// made.
	List(ctx context.Context) ([]Instance, error)

	// DialControl opens a fresh stream to the guest control server
	// (package guestapi, "guest control"). It fails with unavailable while
	// the guest does not answer yet.
	DialControl(ctx context.Context, ref Ref) (net.Conn, error)

	// DialGuest opens a TCP stream to a port on the guest's address. A port
	// that is bound to the guest's loopback only is reached where the backend
	// can.
	DialGuest(ctx context.Context, ref Ref, port uint16) (net.Conn, error)

	// ListenGuest returns the listener on which connections arrive that this
	// guest, and no other, makes to the controller's address (ports 8844 and
	// 8846). It works from Create to Destroy, also before the first Start, and
	// may be opened again after it was closed or its owner died; the last opener
	// wins. Accept may fail at any time, because the path to the guest broke:
	// the caller opens the listener again. Closing it leaves the connections
	// that it accepted open.
	ListenGuest(ctx context.Context, ref Ref) (net.Listener, error)

	// Close releases what the driver holds in this process. VMs go on.
	Close() error
}

// ConsoleLogger is implemented by drivers with Capabilities.ConsoleLog.
type ConsoleLogger interface {
	// ConsoleLog opens what the VM wrote to its console since it was created
	// (bounded by the driver; the oldest is dropped). With follow, Read
	// blocks for more until ctx ends or the sandbox is gone.
	ConsoleLog(ctx context.Context, ref Ref, follow bool) (io.ReadCloser, error)
}

// Accelerator is implemented by drivers that choose how a VM's CPUs are run.
type Accelerator interface {
	// Accel tells the choice, e.g. "kvm" or "tcg"; "" while it is not known.
	Accel(ctx context.Context) string
}

// NetworkUpdater is implemented by drivers with Capabilities.NetworkUpdate.
type NetworkUpdater interface {
	// UpdateNetwork gives a sandbox another policy, for good: a later Start
	// uses it too. When it returns nil the policy is in force, and flows of a
	// running guest that it forbids are cut. After an error the sandbox has
	// the old policy or no network at all, never a mixture.
	UpdateNetwork(ctx context.Context, ref Ref, n agentlab.Network) error
}

// Suspender is implemented by drivers with Capabilities.Suspend.
type Suspender interface {
	// Suspend freezes a running sandbox: its memory stays, its CPUs stand
	// still, Inspect answers PowerSuspended. Suspending a suspended one
	// succeeds, a stopped one is agentlab.CodeConflict.
	Suspend(ctx context.Context, ref Ref) error

	// Resume lets it go on where it stood. Resuming a running one succeeds,
	// a stopped one is agentlab.CodeConflict.
	Resume(ctx context.Context, ref Ref) error
}

// NumberChecker is implemented by drivers with Capabilities.SharedNumbers:
// others on the backend take their numbers from the same range.
type NumberChecker interface {
	// Taken tells which numbers from first to last, both included, anything on
	// the backend has, be it ours or not. It reserves nothing: Create still
	// answers exists when somebody was quicker. What it tells may be as old as
	// a few seconds. An error says nothing about any number.
	Taken(ctx context.Context, first, last int) ([]int, error)
}

// EgressLogger is implemented by drivers with Capabilities.EgressLog.
type EgressLogger interface {
	// EgressLog returns the records of a sandbox whose Seq is above after,
	// oldest first, at most limit of them. It does not wait. A gap between
	// numbers means that records were dropped (the log is bounded).
	EgressLog(ctx context.Context, ref Ref, after int64, limit int) ([]agentlab.EgressRecord, error)
}

// Info describes a driver.
type Info struct {
	Name         string // "qemu", "proxmox", …
	Version      string // of the driver's handle format, for rows that outlive an upgrade
	Capabilities Capabilities
	// ConsoleHint says where the console of a VM is, for a user of a driver
	// without Capabilities.ConsoleLog.
	ConsoleHint string
	// ControllerURL and UploadURL are where a guest finds the guest plane.
	ControllerURL string // e.g. http://10.77.0.1:8844
	UploadURL     string // e.g. http://10.77.0.1:8846/upload
	// GuestNetwork is what every guest of this driver is told to configure
	// with its identity; nil when its network is configured by other means.
	GuestNetwork *guestapi.Network
	// Addresses is the network that sandboxes' addresses are leased from
	// before they are made (Spec.IPv4, Spec.IPv6); nil when every guest has a
	// network of its own and needs none.
	Addresses *AddressPool
}

// AddressPool is a network whose addresses are leased to sandboxes, one each.
type AddressPool struct {
	IPv4 netip.Prefix // network and broadcast address are never leased
	IPv6 netip.Prefix // 64 bits; not valid: no IPv6. A sandbox gets the address that ends in its IPv4 address
	// Reserved are addresses that are not leased, the gateway among them.
	Reserved []netip.Addr
}

// Capabilities announces the optional interfaces and fields.
type Capabilities struct {
	ConsoleLog bool
	NetworkOff bool // Spec.Network.Mode "off"
	// Allowlist: Spec.Network.Mode "allowlist", with names checked on what is
	// really dialled, and Deny, Ports, Limits and Layers in every mode.
	Allowlist     bool
	Private       bool // Spec.Network.Private: TCP to single private destinations and ports of the host
	NetworkUpdate bool // NetworkUpdater
	EgressLog     bool // EgressLogger
	Suspend       bool // Suspender
	Deadline      bool // DeadlineSetter
	SharedNumbers bool // NumberChecker

	// Of Spec.Hardware, what the backend honours; anything else is refused.
	CPUList       bool
	Balloon       bool
	Bridges       []string // the bridges that a sandbox may be on: those whose policy is enforced
	NICModels     []string
	FirewallGroup bool

	// Templates: Spec.Image names a template VM, profiles may say
	// template_vmid.
	Templates bool
}

// Spec says everything about a sandbox to be made. A driver honours every
// field or refuses it by name.
type Spec struct {
	VMID      int
	UID       string
	Name      string // becomes the hostname
	Image     string // image reference "name@digest"; on backends with template VMs, the template
	Resources agentlab.Resources
	Hardware  agentlab.Hardware
	Network   agentlab.Network
	// IPv4 and IPv6 are leased to this sandbox alone until it is destroyed;
	// not valid on backends without Info.Addresses.
	IPv4, IPv6 netip.Addr
}

// Ref returns the Ref of the sandbox that s describes.
func (s Spec) Ref() Ref { return Ref{UID: s.UID} }

// Power is what a backend knows of a sandbox's VM.
type Power string

// The power states.
const (
	PowerPartial   Power = "partial" // a Create or Destroy was cut short
	PowerStopped   Power = "stopped"
	PowerRunning   Power = "running"
	PowerSuspended Power = "suspended" // its CPUs stand still
	PowerCrashed   Power = "crashed"   // it stopped without being asked; Instance.Reason tells why
)

// Instance is one sandbox as its backend sees it.
type Instance struct {
	Ref    Ref
	VMID   int // the sandbox's number as its mark has it; 0 when not known
	Name   string
	Power  Power
	IP     string // the guest's address on its own network; "" when not known
	Reason string // for PowerCrashed and PowerPartial; of PowerRunning, why the host has paused the guest, "" when it has not
	// Expired: it is PowerStopped because its deadline passed (DeadlineSetter).
	Expired bool
	// Spec is what it was made from, with the policy that it has now; nil where
	// it is not whole. A backend that cannot change the policy of a sandbox may
	// leave it out.
	Spec *Spec
	// HostRestarted: it is PowerCrashed because its host was restarted, and
	// nothing is wrong with the sandbox itself.
	HostRestarted bool
}

// Finding is one result of Check.
type Finding struct {
	Name   string // short and stable, e.g. "kvm"
	Level  Level
	Detail string // what was seen
	Remedy string // what to do; empty when Level is LevelOK
}

// Level grades a Finding.
type Level string

// The levels. An error means that sandboxes cannot start.
const (
	LevelOK    Level = "ok"
	LevelWarn  Level = "warn"
	LevelError Level = "error"
)
