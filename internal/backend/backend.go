// Package backend is the contract between AgentLab's services and the places
// where sandboxes run. A driver implements Driver and the optional groups of methods
// (Groups) that it supports. The tests of internal/backend/backendtest check every
// sentence of this documentation.
//
// Rules for every method:
//
//   - It is idempotent: calling it again after success, failure or a crash at
//     any point is safe and has the same result.
//   - It is cancellable: when ctx ends it returns soon. List then includes a
//     partial sandbox, and another call can finish or destroy it.
//   - It may be called from many goroutines; the caller serialises calls for
//     one Ref, but not calls for different Refs.
//   - It changes only objects with our mark (the UID). It never overwrites or
//     removes a foreign object: the sandbox is created in another place, or the
//     error is agentlab.CodeExists.
//   - The connections and listeners that it returns outlive ctx, which bounds
//     their opening only. Their addresses are not nil and their deadlines work;
//     CloseWrite is optional.
//   - Its errors are *agentlab.Error with one of the codes not_found, exists,
//     busy, conflict, unsupported, denied, no_space, unavailable,
//     unknown_outcome, invalid or internal. An unknown state is never reported as
//     not_found.
//
// Capabilities has only what a group cannot express.
package backend

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Ref identifies a sandbox on a backend. Two Refs with the same UID identify
// the same sandbox.
type Ref struct {
	UID string // ownership mark, and the key
	// Handle is Ref.Handle of a result of Inspect or List: it says where the
	// sandbox is. It is opaque and at most MaxHandle bytes long. Every method
	// also works without it or with an outdated one, but more slowly: the driver
	// then searches for the mark. A VM that a Handle identifies is not touched
	// if it does not have the mark. A Handle changes only while the sandbox does
	// not run.
	Handle string
}

// MaxHandle bounds Ref.Handle, in bytes.
const MaxHandle = 1024

// RefOf returns the Ref of a sandbox.
func RefOf(sb agentlab.Sandbox) Ref { return Ref{UID: sb.UID, Handle: sb.Handle} }

// VolumeRefOf returns the VolumeRef of a workspace.
func VolumeRefOf(v agentlab.Workspace) VolumeRef { return VolumeRef{UID: v.UID, Handle: v.Handle} }

// IsTransient reports whether an error of a driver may end by itself.
func IsTransient(err error) bool {
	switch agentlab.CodeOf(err) {
	case agentlab.CodeBusy, agentlab.CodeUnavailable, agentlab.CodeUnknownOutcome, agentlab.CodeTimeout:
		return true
	}
	return false
}

// Driver is the interface that every backend implements.
type Driver interface {
	// Info returns the same value for the life of the driver and does no
	// I/O.
	Info() Info

	// Check examines the host and returns what is missing or wrong, each
	// finding with a remedy. It changes nothing.
	Check(ctx context.Context) []Finding

	// Validate returns an error with code unsupported and the name of the
	// field if this backend does not support a setting of spec. It does no
	// I/O; Create calls it. A request is validated before it gets a number,
	// so VMID may be 0 here.
	Validate(spec Spec) error

	// Create creates the disk and the configuration, and does not start the VM.
	// It writes the mark spec.UID first. A second Create with the same spec
	// succeeds, also if its Name or its Network has changed: the new policy is in
	// force, and the VM keeps its name or gets the new one. One with the same VMID and another UID creates a separate
	// sandbox or returns code exists. After Create, Inspect returns
	// PowerStopped.
	Create(ctx context.Context, spec Spec) error

	// Start powers the sandbox on and returns when the VM runs, before the guest answers.
	// Starting a running sandbox succeeds; for a suspended one the error has
	// agentlab.CodeConflict.
	Start(ctx context.Context, ref Ref) error

	// Stop powers the sandbox off: it asks the guest to power off, waits up
	// to grace, then cuts the power. With grace 0, and for a suspended
	// sandbox, whose guest cannot be asked, it cuts the power at once.
	// Stopping a stopped sandbox succeeds. A crashed one is PowerStopped
	// afterwards.
	Stop(ctx context.Context, ref Ref, grace time.Duration) error

	// Destroy deletes the VM, its disk and all other data of the sandbox, in
	// any power state, and returns when everything is deleted. It detaches the
	// sandbox's volume (Volumes). Destroying a sandbox that does not exist
	// succeeds.
	Destroy(ctx context.Context, ref Ref) error

	// Inspect returns the current state. Code not_found means that the
	// sandbox is proven to be absent.
	Inspect(ctx context.Context, ref Ref) (Instance, error)

	// List returns all sandboxes with AgentLab's mark, including partial
	// ones that a crash left behind.
	List(ctx context.Context) ([]Instance, error)

	// DialControl opens a new stream to the guest control server (package
	// guestapi, "guest control"). It fails with code unavailable until the
	// guest answers.
	DialControl(ctx context.Context, ref Ref) (net.Conn, error)

	// DialGuest opens a TCP stream to a port on the guest's address. A port
	// that is bound only to the guest's loopback is reached if the backend
	// supports it.
	DialGuest(ctx context.Context, ref Ref, port uint16) (net.Conn, error)

	// ListenGuest returns a listener for the connections of this guest only to
	// the controller's address (ControllerPort and UploadPort). It works from Create to
	// Destroy, also before the first Start. It may be opened again after it was
	// closed or its owner ended; a new listener replaces the previous one.
	// Accept may fail at any time, if the path to the guest is interrupted: the
	// caller then opens the listener again. Closing the listener does not close
	// the accepted connections.
	ListenGuest(ctx context.Context, ref Ref) (net.Listener, error)

	// Close releases the driver's resources in this process. VMs keep
	// running.
	Close() error
}

// Ports on the controller's address that lead to ListenGuest.
const (
	ControllerPort = 8844
	UploadPort     = 8846
)

// Info describes a driver.
type Info struct {
	Name         string // "qemu", "proxmox", …
	Version      string // of the driver's handle format, for rows that were written before an upgrade
	Capabilities Capabilities
	// Options are the profile keys that only backends such as this one have.
	// OptionsOK returns an error with code unsupported, and the key's Path as
	// Field, for a value that this driver cannot honour, although it is Valid;
	// nil accepts every valid value. It does no I/O.
	Options   []Option
	OptionsOK func(agentlab.Options) error
	// ConsoleHint says where the console of a VM is, for a user of a driver
	// without the group Console.
	ConsoleHint string
	// CheckLimit is how long Check may take while a client waits; 0 means 30 s.
	CheckLimit time.Duration
	// ControllerURL and UploadURL are the URLs of the guest plane for
	// guests.
	ControllerURL string // e.g. http://10.77.0.1:8844
	UploadURL     string // e.g. http://10.77.0.1:8846/upload
	// GuestNetwork is the network configuration that every guest of this
	// driver gets with its identity; nil if its network is configured by
	// other means.
	GuestNetwork *guestapi.Network
	// Addresses is the network that addresses are leased from before
	// sandboxes are created (Spec.IPv4, Spec.IPv6); nil if every guest has
	// its own network.
	Addresses *AddressPool
}

// AddressPool is a network whose addresses are leased to sandboxes, one each.
type AddressPool struct {
	IPv4 netip.Prefix // network and broadcast address are never leased
	IPv6 netip.Prefix // 64 bits; zero means no IPv6. A sandbox gets the address that ends in its IPv4 address
	// Reserved lists addresses that are not leased, including the gateway.
	Reserved []netip.Addr
}

// Capabilities announces the optional fields of Spec, and the optional methods of its
// groups, that a driver supports.
type Capabilities struct {
	NetworkOff bool // Spec.Network.Mode "off"
	// Allowlist: Spec.Network.Mode "allowlist", with names checked for the
	// address that is actually dialled, and Deny, Ports, Limits and Layers in
	// every mode.
	Allowlist bool
	Private   bool // Spec.Network.Private: TCP to single private destinations and ports of the host
	// KeptSnapshots: Destroy keeps the snapshots of a sandbox (Snapshots).
	KeptSnapshots bool
	// Forks: a sandbox with Spec.From continues the guest of the snapshot, if its
	// memory was saved. Otherwise it boots.
	Forks bool
	// VolumeHotplug: volumes are attached to running sandboxes, and detached from
	// them (Volumes).
	VolumeHotplug bool
	// AttachedVolumeSnapshots: a volume is saved while it is attached, in any power
	// state of its sandbox (Volumes.SnapshotVolume).
	AttachedVolumeSnapshots bool
	// SuspendToDisk and Deadlines: the methods of Power that can suspend a sandbox to
	// disk, and that set its deadline.
	SuspendToDisk, Deadlines bool
	// EgressRecords: the egress log also takes decisions that the controller makes for a
	// guest (Net.RecordEgress).
	EgressRecords bool
	// SharedNumbers: the backend has other users, which take numbers from the same range
	// (Host.Taken).
	SharedNumbers bool
}

// Spec is the complete description of a sandbox to create. A driver supports a
// field or rejects it by name.
type Spec struct {
	VMID      int
	UID       string
	Name      string // becomes the hostname
	Image     string // image reference "name@digest"
	Resources agentlab.Resources
	// Options are settings that only this backend has (Info.Options). Handles
	// of older versions have them under this JSON name.
	Options agentlab.Options `json:"Hardware"`
	Network agentlab.Network
	// IPv4 and IPv6 are leased to this sandbox only until it is destroyed.
	// They are zero on backends without Info.Addresses.
	IPv4, IPv6 netip.Addr
	// From is the snapshot whose disk, and memory with Capabilities.Forks, the
	// sandbox starts with; nil starts it from Image. Its image, cores, memory and
	// options must be those of the snapshot (CheckFrom), and its disk not smaller;
	// a size of 0 is that of the image. The first Start continues the guest, which
	// has the identity of the snapshot's until it gets its own; after a Stop the
	// sandbox boots. It does not boot by itself: if the host cannot continue the
	// guest, or its memory is lost, Start fails as after SuspendToDisk. The snapshot may be deleted after Create
	// returned. If there is no such snapshot, or it is partial, the error of Create
	// has agentlab.CodeNotFound; if the backend cannot copy it, CodeUnsupported,
	// or CodeConflict while the sandbox that was saved runs. It needs a driver with
	// the group Snapshots.
	From *SnapshotRef `json:",omitempty"`
}

// CheckDisk returns an error with code invalid if a disk of gb GiB is smaller than
// its image, in bytes. 0 GiB is the size of the image.
func CheckDisk(gb int, image int64) error {
	if gb == 0 || int64(gb)<<30 >= image {
		return nil
	}
	least := (image + 1<<30 - 1) >> 30
	return agentlab.Errorf(agentlab.CodeInvalid, "a disk of %d GiB is smaller than its image (%d GiB)", gb, least).
		WithField("storage.root_size_gb").WithHint("set storage.root_size_gb in the profile to at least %d", least)
}

// Ref returns the Ref of the sandbox that s describes.
func (s Spec) Ref() Ref { return Ref{UID: s.UID} }

// PowerState is the power state of a sandbox's VM.
type PowerState string

// The power states.
const (
	PowerPartial   PowerState = "partial" // a Create or Destroy was interrupted
	PowerStopped   PowerState = "stopped"
	PowerRunning   PowerState = "running"
	PowerSuspended PowerState = "suspended" // its CPUs are paused
	PowerCrashed   PowerState = "crashed"   // it stopped without a request; Instance.Reason has the cause
)

// Instance is the state of one sandbox on its backend.
type Instance struct {
	Ref    Ref
	VMID   int // the sandbox's number from its mark; 0 if not known
	HostVM int // if VMID is not known, the number of the VM on a backend that numbers VMs
	Name   string
	Power  PowerState
	IP     string // the guest's address on its own network; "" when not known
	Reason string // for PowerCrashed and PowerPartial; for PowerRunning, why the host has paused the guest, "" if it has not
	// Expired means that it is PowerStopped because its deadline passed
	// (Power.SetDeadline).
	Expired bool
	// Spec is the Spec of the sandbox with its current policy; nil if the
	// sandbox is partial. A backend that cannot change the policy of a sandbox
	// may omit it.
	Spec *Spec
	// Copied means that its running guest was started with a saved memory, such as
	// that of a template.
	Copied bool
	// HostRestarted means that it is PowerCrashed because its host was
	// restarted; the sandbox itself has no fault.
	HostRestarted bool
	// GuestRebooted means that it is PowerCrashed because its guest rebooted, and the
	// backend does not start it again by itself.
	GuestRebooted bool
}

// Number returns the number with which users name the instance: that of the
// sandbox, or, if it is not known, that of its VM; 0 if there is none.
func (in Instance) Number() int { return cmp.Or(in.VMID, in.HostVM) }

// Finding is one result of Check.
type Finding struct {
	Name   string // short and stable, e.g. "kvm"
	Level  Level
	Detail string // what the check found
	Remedy string // what to do; empty if Level is LevelOK
}

// Findf returns a finding whose detail is a formatted text.
func Findf(name string, level Level, remedy, format string, args ...any) Finding {
	return Finding{Name: name, Level: level, Detail: fmt.Sprintf(format, args...), Remedy: remedy}
}

// Level is the severity of a Finding.
type Level string

// The levels. LevelError means that sandboxes cannot start.
const (
	LevelOK    Level = "ok"
	LevelWarn  Level = "warn"
	LevelError Level = "error"
)
