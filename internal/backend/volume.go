package backend

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Volumes is the group of drivers that have volumes: disks that outlive the
// sandboxes to which they are attached. A sandbox has at most one volume, and a
// volume is attached to at most one sandbox. Only the guest reads and writes what
// is in a volume: the driver copies it, and never interprets it.
//
// A sandbox is created without a volume; AttachVolume gives it one. In the guest it
// is the disk with the serial number VolumeSerial. Without a volume there is no such
// disk, or its size is 0.
//
// An attached volume stays attached until DetachVolume or Destroy of its sandbox:
// in any power state, when the VM ends, and after a restart of the host. It is
// changed only by its guest: the errors of all methods that would change, copy or
// delete it have agentlab.CodeConflict and a hint. SnapshotVolume is the exception,
// with Capabilities.AttachedVolumeSnapshots. For a partial volume the errors of all
// methods that use what is in it have agentlab.CodeConflict too. While a volume is attached, the errors of
// Snapshots.SaveSnapshot and RestoreSnapshot for its sandbox have
// agentlab.CodeConflict too. Destroy detaches the volume, and does not change it.
//
// For volumes, the rules for every method say: calls for one volume need no
// serialisation, whatever their sandbox is. Of two calls that contradict each other,
// such as two that attach it to different sandboxes, one succeeds. A volume that
// cannot be read is partial, so that it is not taken for absent. If the backend has
// no space left the error has agentlab.CodeNoSpace, and the volumes and snapshots
// that were there before are unchanged.
type Volumes interface {
	// ValidateVolume returns an error with code unsupported, or invalid, and the
	// name of the field if this backend does not support a setting of spec. It does
	// no I/O; CreateVolume calls it.
	ValidateVolume(spec VolumeSpec) error

	// CreateVolume creates an empty volume, which reads as zeros. It writes the mark
	// spec.UID first. If there is a volume with that UID it returns that one, as it
	// is. It completes a partial one, unless its restoration was interrupted: the
	// error then has agentlab.CodeConflict.
	CreateVolume(ctx context.Context, spec VolumeSpec) (Volume, error)

	// DeleteVolume deletes a volume and its snapshots, and returns when everything is
	// deleted. Clones of it do not change. Deleting a volume that does not exist
	// succeeds.
	DeleteVolume(ctx context.Context, ref VolumeRef) error

	// GrowVolume makes a volume larger. What it contains does not change, and the new
	// space reads as zeros. It succeeds if the volume has that size; for a smaller
	// size the error has agentlab.CodeInvalid. After an error, and after a crash at any
	// point, it has the old or the new size.
	GrowVolume(ctx context.Context, ref VolumeRef, sizeGB int) error

	// InspectVolume returns the current state. Code not_found means that the volume is
	// proven to be absent.
	InspectVolume(ctx context.Context, ref VolumeRef) (Volume, error)

	// ListVolumes returns all volumes with AgentLab's mark, including partial ones.
	ListVolumes(ctx context.Context) ([]Volume, error)

	// AttachVolume attaches a volume to a sandbox that is stopped or crashed, or, with
	// Capabilities.VolumeHotplug, running: its guest then has the disk when the method
	// returns, or very soon. Attaching it again succeeds. The error has
	// agentlab.CodeNotFound if there is no such volume or sandbox, and
	// agentlab.CodeConflict if the volume is attached to another sandbox, if the
	// sandbox has another volume, or if its power state does not allow it.
	// After an error, and after a crash at any point, the volume is attached or it is
	// not, as ListVolumes has it: another call attaches it, and DetachVolume detaches
	// it. Until then a running guest may or may not have the disk.
	AttachVolume(ctx context.Context, ref Ref, volume VolumeRef) error

	// DetachVolume takes a volume from a sandbox that is stopped or crashed, or, with
	// Capabilities.VolumeHotplug, running. When it returns nil the volume has all that
	// the guest had synced, and the guest can neither read nor write it. The driver does
	// not ask the guest: the caller makes sure that it has unmounted the volume. If a
	// guest does not release the disk the error has agentlab.CodeBusy. If the power
	// state does not allow it the error has agentlab.CodeConflict. After an error, and
	// after a crash at any point, the volume is attached or it is not, as ListVolumes
	// has it, and another call detaches it. Detaching a volume that is not attached to
	// this sandbox succeeds and changes nothing, also if one of them does not exist.
	DetachVolume(ctx context.Context, ref Ref, volume VolumeRef) error

	// The methods below save, restore and copy what is in a volume. One that the storage
	// of a volume cannot perform returns agentlab.CodeUnsupported with the reason, and
	// changes nothing.

	// SnapshotVolume saves the content of a volume, with uid, a UID of its own, as the
	// mark. Of a volume that is attached to a running sandbox it saves what a power cut
	// at that time would leave: what the guest has synced, and perhaps more. The guest
	// continues. Saving a snapshot that exists returns it; if it is one of another
	// volume the error has agentlab.CodeExists. After an error, and after a crash at any
	// point, the volume is as before, and there is no snapshot, a partial one, which
	// another call replaces, or the whole snapshot. If a volume was saved too often
	// since it was attached the error has agentlab.CodeConflict.
	SnapshotVolume(ctx context.Context, ref VolumeRef, uid string) (VolumeSnapshot, error)

	// VolumeSnapshots returns all snapshots of volumes with AgentLab's mark, including
	// partial ones.
	VolumeSnapshots(ctx context.Context) ([]VolumeSnapshot, error)

	// RestoreVolume replaces the content and the size of a volume by those of one of
	// its snapshots; what they were is lost. The snapshot stays. After an error, and
	// after a crash at any point, the volume is as before, as the snapshot is, or
	// partial: another call then restores it. If there is no volume, or no snapshot of
	// it that is not partial, the error has agentlab.CodeNotFound. A storage that can
	// return only to the newest snapshot of a volume returns agentlab.CodeConflict for
	// others, and nothing changes.
	RestoreVolume(ctx context.Context, snapshot VolumeSnapshotRef) error

	// CloneVolume creates a volume with the content and the size of another one, on
	// the same storage, and with uid as the mark. The other one does not change, and
	// from then on neither depends on the other: both may be changed and deleted in any
	// order. Only a volume that is not attached can be cloned. If there is a volume with
	// that UID CloneVolume returns it, as it is; it completes a partial one as
	// CreateVolume does. If the other volume does not exist the error has
	// agentlab.CodeNotFound.
	CloneVolume(ctx context.Context, ref VolumeRef, uid string) (Volume, error)

	// CloneVolumeSnapshot is CloneVolume with the content of a snapshot, whose volume may
	// be attached or partial. The new volume has the size of the snapshot or, on backends
	// that cannot make it smaller, the present one of the snapshot's volume. If there is no such snapshot, or it is
	// partial, the error has agentlab.CodeNotFound.
	CloneVolumeSnapshot(ctx context.Context, snapshot VolumeSnapshotRef, uid string) (Volume, error)

	// DeleteVolumeSnapshot deletes a snapshot. Its volume, and clones of it, do not
	// change, and the volume may be attached. Deleting one that does not exist succeeds,
	// and so does deleting one of another volume than snapshot.Of, which stays.
	DeleteVolumeSnapshot(ctx context.Context, snapshot VolumeSnapshotRef) error
}

// VolumeSerial is the serial number of a sandbox's volume in its guest.
const VolumeSerial = guestapi.VolumeSerial

// MaxVolumeGB bounds the size of a volume, in GiB.
const MaxVolumeGB = 64 << 10

// VolumeSpec is the complete description of a volume to create.
type VolumeSpec struct {
	UID    string // ownership mark
	SizeGB int    // in GiB, from 1 to MaxVolumeGB
	// Storage is the name of one of the backend's storages; "" is the one for volumes
	// in its configuration. Backends without storages reject names.
	Storage string
}

// Check returns an error with code invalid, and the name of the field, if no backend
// supports s.
func (s VolumeSpec) Check() error {
	if s.UID == "" {
		return agentlab.Errorf(agentlab.CodeInvalid, "a volume needs a mark").WithField("uid")
	}
	if s.SizeGB < 1 || s.SizeGB > MaxVolumeGB {
		return agentlab.Errorf(agentlab.CodeInvalid, "%d GiB is not between 1 and %d", s.SizeGB, MaxVolumeGB).WithField("size_gb")
	}
	return nil
}

// VolumeRef identifies a volume on a backend. Two VolumeRefs with the same UID
// identify the same volume.
type VolumeRef struct {
	UID string // ownership mark, and the key
	// Handle is VolumeRef.Handle of a result of another method: it says where the
	// volume is. The rules for Ref.Handle apply to it.
	Handle string
}

// Volume is the state of one volume on its backend.
type Volume struct {
	Ref     VolumeRef
	SizeGB  int    // as the guest sees it; 0 if the volume is partial and that is not known
	Storage string // on which it is; "" on a backend without storages
	// Bytes is what the volume occupies on the backend, with what it shares with
	// snapshots and clones; 0 if that is not known.
	Bytes int64
	// AttachedTo is the sandbox that has the volume; zero if none has it.
	AttachedTo Ref
	Partial    bool   // a method that creates, restores or deletes it was interrupted, or it cannot be read
	Reason     string // why it is partial
}

// VolumeSnapshotRef identifies a snapshot of a volume.
type VolumeSnapshotRef struct {
	UID string    // ownership mark
	Of  VolumeRef // the volume; it exists as long as the snapshot does
}

// VolumeSnapshot is the saved content of a volume.
type VolumeSnapshot struct {
	Ref    VolumeSnapshotRef
	SizeGB int // of the volume when it was saved; 0 if the snapshot is partial
	// Partial means that SnapshotVolume or DeleteVolumeSnapshot was interrupted, or
	// that the snapshot cannot be read.
	Partial bool
}
