package backend

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Snapshots is the group of drivers that can save sandboxes and start others
// from what was saved. The caller serialises the calls for one Ref, including
// those with a SnapshotRef of it, and does not delete a snapshot while a sandbox
// is created from it.
type Snapshots interface {
	// SaveSnapshot saves the disk of a sandbox, and its memory if it runs or is
	// suspended, with uid, a UID of its own, as the mark. The caller has made a running
	// guest write its disks: the saved disk need not have what is only in its memory. A running guest
	// continues; its CPUs stop for a short time only. A guest that is suspended
	// stays suspended. Saving a snapshot that exists returns it; if it is one of
	// another sandbox the error is agentlab.CodeExists. After an error, and after
	// a crash at any point, the sandbox is as before, and there is no snapshot, a
	// partial one, which another call replaces, or the whole snapshot. If it was saved
	// too often since its VM was started, the error is agentlab.CodeConflict.
	SaveSnapshot(ctx context.Context, ref Ref, uid string) (Snapshot, error)

	// RestoreSnapshot replaces the disk and the memory of the sandbox that a
	// snapshot was saved of; what they were is lost. The sandbox may be in any
	// power state. Afterwards it is PowerStopped if the snapshot has no memory,
	// otherwise PowerSuspended or PowerRunning. Its network policy does not
	// change. After an error, and after a crash at any point, it is as before, as
	// the snapshot is, or PowerPartial: another call, or Create, then restores it.
	// The snapshot stays. If there is no sandbox, or no snapshot of it that is not
	// partial, the error is agentlab.CodeNotFound. A backend that can return only to
	// the newest snapshot of a sandbox returns agentlab.CodeConflict for others, and
	// nothing changes.
	RestoreSnapshot(ctx context.Context, ref SnapshotRef) error

	// Snapshots returns all snapshots with AgentLab's mark, including partial
	// ones.
	Snapshots(ctx context.Context) ([]Snapshot, error)

	// DeleteSnapshot deletes a snapshot. The sandboxes that were created from it
	// do not change. Deleting one that does not exist succeeds, and so does
	// deleting one of another sandbox than ref.Of, which stays.
	DeleteSnapshot(ctx context.Context, ref SnapshotRef) error
}

// SnapshotRef identifies a snapshot.
type SnapshotRef struct {
	UID string // ownership mark
	// Of is the sandbox that it was saved of. The sandbox may no longer exist if
	// Capabilities.KeptSnapshots is true; otherwise Destroy deletes the snapshots
	// of a sandbox. It is zero if the snapshot is partial and that is not known.
	Of Ref
}

// Snapshot is a saved sandbox.
type Snapshot struct {
	Ref SnapshotRef
	// Spec is the Spec of the sandbox when it was saved; nil if the snapshot is
	// partial. A backend that keeps no Spec omits it.
	Spec    *Spec
	Memory  bool      // the memory of its guest was saved
	Bytes   int64     // that it occupies on the backend; 0 if that is not known
	Saved   time.Time // zero if that is not known
	Partial bool      // SaveSnapshot or DeleteSnapshot was interrupted
}

// Forks reports whether a sandbox that is created from s continues the guest of
// s, for a driver with capabilities c. Otherwise it boots with the disk of s.
func (s Snapshot) Forks(c Capabilities) bool { return s.Memory && c.Forks }

// CheckFrom returns an error with code invalid and the name of the field if a
// sandbox with spec cannot start from a snapshot that has the Spec saved
// (Spec.From).
func (s Spec) CheckFrom(saved Spec) error {
	for _, f := range []struct {
		name string
		same bool
	}{
		{"image", s.Image == saved.Image},
		{"resources.cores", s.Resources.Cores == saved.Resources.Cores},
		{"resources.memory_mb", s.Resources.MemoryMB == saved.Resources.MemoryMB},
		{"resources.nested", s.Resources.Nested.Wanted() == saved.Resources.Nested.Wanted()},
		{"options", s.Options == saved.Options},
	} {
		if !f.same {
			return agentlab.Errorf(agentlab.CodeInvalid, "it differs from the snapshot's").WithField(f.name).
				WithHint("a sandbox from a snapshot needs the image, cores, memory, virtualization and options of the sandbox that was saved")
		}
	}
	if s.Resources.RootSizeGB < saved.Resources.RootSizeGB {
		return agentlab.Errorf(agentlab.CodeInvalid, "%d GiB is smaller than the disk of the snapshot (%d GiB)", s.Resources.RootSizeGB, saved.Resources.RootSizeGB).
			WithField("storage.root_size_gb").WithHint("use at least %d GiB", saved.Resources.RootSizeGB)
	}
	return nil
}

// Templates is the group of drivers that start sandboxes as copies of a guest
// that has booted and has no identity. The driver makes templates by itself, in
// the background, whenever a sandbox had to boot.
type Templates interface {
	// WarmTemplate makes the template for sandboxes like spec now, unless there is
	// one; only the fields Image, Resources and Options count. It replaces no other
	// one, except stale ones and those that the size limit removes. After an error
	// there is no template, and no part of one. The error has
	// agentlab.CodeUnsupported if this driver is configured to make none.
	WarmTemplate(ctx context.Context, spec Spec) (Template, error)

	// Templates returns the templates, the last used first.
	Templates(ctx context.Context) ([]Template, error)

	// DeleteTemplate deletes a template. Sandboxes that were started from it do
	// not change. Deleting one that does not exist succeeds.
	DeleteTemplate(ctx context.Context, key string) error
}

// Template is a booted guest without identity.
type Template struct {
	Key       string // identifies everything that a sandbox must share to start from it
	Image     string // image reference "name@digest"
	Resources agentlab.Resources
	Bytes     int64 // that it occupies on the host
	Made      time.Time
	Used      time.Time // when a sandbox was last created from it
	// Stale means that no sandbox can start from it, because its image was
	// removed, or the host's processor, QEMU or AgentLab was replaced since it was
	// made. Stale ones are deleted when the next template is made.
	Stale bool
}
