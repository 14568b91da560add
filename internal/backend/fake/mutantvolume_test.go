package fake_test

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// volumeMutants are the broken sentences of backend.Volumes, each with the test that
// must find it.
var volumeMutants = map[string]string{
	"an existing volume is changed":         "Volumes/Create",
	"volumes are listed twice":              "Volumes/Create",
	"a grown volume stays as it is":         "Volumes/Create",
	"an attached volume grows":              "Volumes/Attach",
	"a volume has two sandboxes":            "Volumes/Attach",
	"destroy deletes the volume":            "Volumes/Attach",
	"detaching ignores the sandbox":         "Volumes/Attach",
	"a sandbox with a volume is saved":      "Volumes/Attach",
	"a sandbox with a volume is restored":   "Volumes/Saved",
	"any snapshot of a volume is restored":  "Volumes/Snapshots",
	"foreign volumes are taken":             "Volumes/Foreign",
	"a full storage is unavailable":         "Volumes/Full",
	"partial volumes are attached":          "Volumes/CrashPoints",
	"attaching has no effect in a guest":    "VMVolumes/Attach",
	"restoring a volume does nothing":       "VMVolumes/Snapshot",
	"a clone is empty":                      "VMVolumes/Snapshot",
	"a snapshot's clone is of the volume":   "VMVolumes/Snapshot",
	"a suspended sandbox loses its volume":  "VMVolumes/Suspend",
	"a suspended sandbox gets a volume":     "VMVolumes/Suspend",
	"destroying a running one deletes, too": "VMVolumes/Destroy",
}

// ifCode returns nil for an error with a code, if the mutant breaks that.
func (m *mutant) ifCode(err error, breaks string, code agentlab.Code) error {
	if m.breaks == breaks && agentlab.CodeOf(err) == code {
		return nil
	}
	return err
}

func (m *mutant) CreateVolume(ctx context.Context, spec backend.VolumeSpec) (backend.Volume, error) {
	v, err := m.Driver.CreateVolume(ctx, spec)
	switch {
	case m.breaks == "an existing volume is changed" && err == nil:
		v.SizeGB = spec.SizeGB
	case m.breaks == "a full storage is unavailable" && agentlab.CodeOf(err) == agentlab.CodeNoSpace:
		err = agentlab.Errorf(agentlab.CodeUnavailable, "it is full").WithHint("wait")
	}
	return v, m.ifCode(err, "foreign volumes are taken", agentlab.CodeExists)
}

func (m *mutant) ListVolumes(ctx context.Context) ([]backend.Volume, error) {
	all, err := m.Driver.ListVolumes(ctx)
	if m.breaks == "volumes are listed twice" {
		all = append(all, all...)
	}
	return all, err
}

func (m *mutant) GrowVolume(ctx context.Context, ref backend.VolumeRef, gb int) error {
	if m.breaks == "a grown volume stays as it is" {
		return nil
	}
	return m.ifCode(m.Driver.GrowVolume(ctx, ref, gb), "an attached volume grows", agentlab.CodeConflict)
}

func (m *mutant) AttachVolume(ctx context.Context, ref backend.Ref, v backend.VolumeRef) error {
	in, ierr := m.Driver.Inspect(ctx, ref)
	if m.breaks == "attaching has no effect in a guest" && ierr == nil && in.Power == backend.PowerRunning {
		return nil
	}
	err := m.Driver.AttachVolume(ctx, ref, v)
	if in.Power == backend.PowerSuspended {
		err = m.ifCode(err, "a suspended sandbox gets a volume", agentlab.CodeConflict)
	}
	if now, _ := m.InspectVolume(ctx, v); now.Partial {
		return m.ifCode(err, "partial volumes are attached", agentlab.CodeConflict)
	}
	return m.ifCode(err, "a volume has two sandboxes", agentlab.CodeConflict)
}

func (m *mutant) DetachVolume(ctx context.Context, ref backend.Ref, v backend.VolumeRef) error {
	if m.breaks == "detaching ignores the sandbox" {
		now, _ := m.InspectVolume(ctx, v)
		ref = now.AttachedTo
	}
	err := m.Driver.DetachVolume(ctx, ref, v)
	return m.ifCode(err, "a suspended sandbox loses its volume", agentlab.CodeConflict)
}

func (m *mutant) RestoreVolume(ctx context.Context, ref backend.VolumeSnapshotRef) error {
	if m.breaks == "restoring a volume does nothing" {
		return nil
	}
	return m.ifCode(m.Driver.RestoreVolume(ctx, ref), "any snapshot of a volume is restored", agentlab.CodeNotFound)
}

func (m *mutant) CloneVolume(ctx context.Context, ref backend.VolumeRef, uid string) (backend.Volume, error) {
	if now, err := m.InspectVolume(ctx, ref); m.breaks == "a clone is empty" && err == nil {
		return m.Driver.CreateVolume(ctx, backend.VolumeSpec{UID: uid, SizeGB: now.SizeGB})
	}
	return m.Driver.CloneVolume(ctx, ref, uid)
}

func (m *mutant) CloneVolumeSnapshot(ctx context.Context, ref backend.VolumeSnapshotRef, uid string) (backend.Volume, error) {
	if m.breaks == "a snapshot's clone is of the volume" {
		later := agentlab.NewUID()
		if _, err := m.Driver.SnapshotVolume(ctx, ref.Of, later); err != nil {
			return backend.Volume{}, err
		}
		ref.UID = later
	}
	return m.Driver.CloneVolumeSnapshot(ctx, ref, uid)
}

// deleteVolume deletes the volume of a sandbox with it, if the mutant breaks that.
func (m *mutant) deleteVolume(ctx context.Context, ref backend.Ref) {
	in, _ := m.Driver.Inspect(ctx, ref)
	if m.breaks != "destroy deletes the volume" && (m.breaks != "destroying a running one deletes, too" || in.Power != backend.PowerRunning) {
		return
	}
	all, _ := m.Driver.ListVolumes(ctx)
	for _, v := range all {
		if v.AttachedTo.UID == ref.UID {
			_ = m.Driver.DetachVolume(ctx, ref, v.Ref)
			_ = m.Driver.DeleteVolume(ctx, v.Ref)
		}
	}
}
