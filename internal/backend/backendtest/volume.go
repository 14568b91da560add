package backendtest

import (
	"context"
	"errors"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// VolumeHarness is the part of a Harness for drivers that implement
// backend.Volumes.
type VolumeHarness struct {
	// VolumeStorage is the storage of the suite's volumes; "" is the default one.
	// NoVolumeSnapshots means that it cannot save what is in a volume.
	VolumeStorage     string
	NoVolumeSnapshots bool

	// ForeignVolume creates an object of another owner in the place of a volume, and
	// returns a check that it is unchanged.
	ForeignVolume func(t *testing.T, spec backend.VolumeSpec) (untouched func(t *testing.T))

	// FillVolumes fills the storage; free frees it.
	FillVolumes func(t *testing.T) (free func())

	// VolumeCommand returns the command in the guest that writes a text at the begin
	// of the volume and syncs it ("write TEXT"), prints it ("read"), or prints the
	// size in bytes ("size"). Without a volume it ends with code 3. The default is a
	// shell script for Linux.
	VolumeCommand func(args ...string) []string
}

// keeper returns the driver as Volumes, and deletes all volumes at the end of the
// test, when its sandboxes have been destroyed.
func (s *suite) keeper() backend.Volumes {
	s.Helper()
	d := s.groups().Volumes
	if d == nil {
		s.Skip("skipped: this driver has no Volumes")
	}
	s.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.Context()), s.cfg.Patience)
		defer cancel()
		all, err := s.vols().ListVolumes(ctx)
		for _, v := range all {
			err = errors.Join(err, s.vols().DeleteVolume(ctx, v.Ref))
		}
		if err != nil {
			s.Errorf("clean up the volumes: %v", err)
		}
	})
	return d
}

func (s *suite) vols() backend.Volumes { return s.groups().Volumes }

// snaps returns the volumes; false if their storage has no snapshots.
func (s *suite) snaps() (backend.Volumes, bool) { return s.vols(), !s.h.NoVolumeSnapshots }

func (s *suite) volumeSpec(gb int) backend.VolumeSpec {
	return backend.VolumeSpec{UID: agentlab.NewUID(), SizeGB: gb, Storage: s.h.VolumeStorage}
}

// volume creates a volume.
func (s *suite) volume(gb int) backend.VolumeRef {
	s.Helper()
	spec := s.volumeSpec(gb)
	v, err := s.vols().CreateVolume(s.ctx(), spec)
	s.ok("CreateVolume", err)
	if v.Ref.UID != spec.UID || v.SizeGB != gb || v.Partial || v.AttachedTo != (backend.Ref{}) {
		s.Fatalf("CreateVolume returns %+v", v)
	}
	return backend.VolumeRef{UID: spec.UID}
}

// wantVolume checks a volume that is not partial: its size, and the sandbox that has
// it. Inspect and List agree.
func (s *suite) wantVolume(ref backend.VolumeRef, gb int, sandbox string) backend.Volume {
	s.Helper()
	v, err := s.vols().InspectVolume(s.ctx(), ref)
	s.ok("InspectVolume", err)
	if v.Partial || v.Ref.UID != ref.UID || v.SizeGB != gb || v.AttachedTo.UID != sandbox {
		s.Fatalf("the volume is %+v, want %d GiB, attached to %q", v, gb, sandbox)
	}
	if l := s.volumeListed(ref); l == nil || l.Ref.UID != ref.UID || l.SizeGB != gb || l.AttachedTo.UID != sandbox || l.Partial {
		s.Fatalf("ListVolumes has %+v, and InspectVolume %+v", l, v)
	}
	return v
}

// volumeListed returns the volume from ListVolumes, nil if there is none.
func (s *suite) volumeListed(ref backend.VolumeRef) *backend.Volume {
	s.Helper()
	all, err := s.vols().ListVolumes(s.ctx())
	s.ok("ListVolumes", err)
	var found *backend.Volume
	for _, v := range all {
		if v.Ref.UID != ref.UID {
			continue
		}
		if found != nil {
			s.Fatalf("ListVolumes has %s twice", ref.UID)
		}
		if v.Partial != (v.Reason != "") {
			s.Errorf("partial, and the reason: %+v", v)
		}
		found = &v
	}
	return found
}

func (s *suite) wantNoVolume(ref backend.VolumeRef) {
	s.Helper()
	_, err := s.vols().InspectVolume(s.ctx(), ref)
	s.wantCode("InspectVolume of none", err, agentlab.CodeNotFound)
	if l := s.volumeListed(ref); l != nil {
		s.Fatalf("ListVolumes still has %+v", *l)
	}
}

// conflict checks an error with code conflict, which has a hint.
func (s *suite) conflict(what string, err error) {
	s.Helper()
	s.wantCode(what, err, agentlab.CodeConflict)
	if agentlab.HintOf(err) == "" {
		s.Errorf("%s: the error has no hint: %v", what, err)
	}
}

// volumesStill tests volumes of sandboxes that do not run.
func (s *suite) volumesStill() {
	s.keeper()
	s.sub("Invalid", (*suite).volumeInvalid)
	s.sub("Absent", (*suite).volumeAbsent)
	s.sub("Create", (*suite).volumeCreate)
	s.sub("Attach", (*suite).volumeAttach)
	s.sub("Saved", (*suite).volumeSaved)
	s.sub("Snapshots", (*suite).volumeSnapshots)
	s.sub("Clones", (*suite).volumeClones)
	s.sub("NoSnapshots", (*suite).volumeUnsupported)
	s.sub("Parallel", (*suite).volumeParallel)
	s.sub("Foreign", (*suite).volumeForeign)
	s.sub("Full", (*suite).volumeFull)
	s.sub("Cancelled", (*suite).volumeCancelled)
	s.sub("CrashPoints", (*suite).volumeCrashes)
}

func (s *suite) volumeInvalid() {
	for _, test := range []struct {
		field  string
		code   agentlab.Code
		change func(*backend.VolumeSpec)
	}{
		{"uid", agentlab.CodeInvalid, func(v *backend.VolumeSpec) { v.UID = "" }},
		{"size_gb", agentlab.CodeInvalid, func(v *backend.VolumeSpec) { v.SizeGB = 0 }},
		{"size_gb", agentlab.CodeInvalid, func(v *backend.VolumeSpec) { v.SizeGB = backend.MaxVolumeGB + 1 }},
		{"storage", agentlab.CodeUnsupported, func(v *backend.VolumeSpec) { v.Storage = "no-such-storage" }},
	} {
		spec := s.volumeSpec(1)
		test.change(&spec)
		_, cerr := s.vols().CreateVolume(s.ctx(), spec)
		for what, err := range map[string]error{"ValidateVolume": s.vols().ValidateVolume(spec), "CreateVolume": cerr} {
			if test.field == "storage" && what == "ValidateVolume" && err == nil {
				continue // it does no I/O, and may not know the storages
			}
			s.wantCode(what, err, test.code)
			if e, _ := errors.AsType[*agentlab.Error](err); e.Field != test.field {
				s.Errorf("%s names field %q, want %q", what, e.Field, test.field)
			}
		}
		s.wantNoVolume(backend.VolumeRef{UID: spec.UID})
	}
	s.ok("ValidateVolume", s.vols().ValidateVolume(s.volumeSpec(backend.MaxVolumeGB)))
}

func (s *suite) volumeAbsent() {
	gone, sp := backend.VolumeRef{UID: agentlab.NewUID()}, s.create(1)
	ref := sp.Ref()
	all, err := s.vols().ListVolumes(s.ctx())
	s.ok("ListVolumes", err)
	if len(all) != 0 {
		s.Errorf("ListVolumes of an empty place: %+v", all)
	}
	s.wantNoVolume(gone)
	s.ok("DeleteVolume of none", s.vols().DeleteVolume(s.ctx(), gone))
	s.wantCode("GrowVolume of none", s.vols().GrowVolume(s.ctx(), gone, 2), agentlab.CodeNotFound)
	s.wantCode("AttachVolume of none", s.vols().AttachVolume(s.ctx(), ref, gone), agentlab.CodeNotFound)
	s.ok("DetachVolume of none", s.vols().DetachVolume(s.ctx(), ref, gone))
	v := s.volume(1)
	s.wantCode("AttachVolume to no sandbox", s.vols().AttachVolume(s.ctx(), s.h.Spec(2).Ref(), v), agentlab.CodeNotFound)
	s.ok("DetachVolume from no sandbox", s.vols().DetachVolume(s.ctx(), s.h.Spec(2).Ref(), v))
	s.wantVolume(v, 1, "")
	d, ok := s.snaps()
	if !ok {
		return
	}
	snap := backend.VolumeSnapshotRef{UID: agentlab.NewUID(), Of: v}
	_, err = d.SnapshotVolume(s.ctx(), gone, agentlab.NewUID())
	s.wantCode("SnapshotVolume of none", err, agentlab.CodeNotFound)
	s.wantCode("RestoreVolume to no snapshot", d.RestoreVolume(s.ctx(), snap), agentlab.CodeNotFound)
	fresh := backend.VolumeRef{UID: agentlab.NewUID()}
	_, err = d.CloneVolume(s.ctx(), gone, fresh.UID)
	s.wantCode("CloneVolume of none", err, agentlab.CodeNotFound)
	_, err = d.CloneVolumeSnapshot(s.ctx(), snap, fresh.UID)
	s.wantCode("CloneVolumeSnapshot of none", err, agentlab.CodeNotFound)
	s.wantNoVolume(fresh)
	s.ok("DeleteVolumeSnapshot of none", d.DeleteVolumeSnapshot(s.ctx(), snap))
	saved, err := d.VolumeSnapshots(s.ctx())
	s.ok("VolumeSnapshots", err)
	if len(saved) != 0 {
		s.Errorf("VolumeSnapshots of an empty place: %+v", saved)
	}
}

// volumeCreate tests CreateVolume, GrowVolume and DeleteVolume, and handles.
func (s *suite) volumeCreate() {
	spec := s.volumeSpec(1)
	ref := backend.VolumeRef{UID: spec.UID}
	for range 2 {
		v, err := s.vols().CreateVolume(s.ctx(), spec)
		s.ok("CreateVolume", err)
		if v.Ref.UID != spec.UID || v.SizeGB != 1 || spec.Storage != "" && v.Storage != spec.Storage {
			s.Errorf("CreateVolume returns %+v", v)
		}
		s.wantVolume(ref, 1, "")
	}
	for range 2 {
		s.ok("GrowVolume", s.vols().GrowVolume(s.ctx(), ref, 3))
		s.wantVolume(ref, 3, "")
	}
	s.wantCode("GrowVolume to a smaller size", s.vols().GrowVolume(s.ctx(), ref, 2), agentlab.CodeInvalid)
	s.wantCode("GrowVolume to a size that is too large", s.vols().GrowVolume(s.ctx(), ref, backend.MaxVolumeGB+1), agentlab.CodeInvalid)
	v, err := s.vols().CreateVolume(s.ctx(), spec)
	s.ok("CreateVolume of one that has grown", err)
	if v.SizeGB != 3 {
		s.Errorf("CreateVolume changes a volume that exists: %+v", v)
	}
	if s.h.Reopen != nil {
		s.reopen()
	}
	v = s.wantVolume(ref, 3, "")
	if len(v.Ref.Handle) > backend.MaxHandle {
		s.Errorf("a handle of %d bytes", len(v.Ref.Handle))
	}
	for i, handle := range []string{v.Ref.Handle, "nonsense", "1", ""} {
		ref.Handle = handle
		s.ok("GrowVolume with handle "+handle, s.vols().GrowVolume(s.ctx(), ref, 4+i))
		s.wantVolume(ref, 4+i, "")
	}
	wrong := backend.VolumeRef{UID: agentlab.NewUID(), Handle: v.Ref.Handle}
	s.wantCode("GrowVolume with the mark of another one", s.vols().GrowVolume(s.ctx(), wrong, 9), agentlab.CodeNotFound)
	s.ok("DeleteVolume with the mark of another one", s.vols().DeleteVolume(s.ctx(), wrong))
	other := s.volume(1)
	s.wantVolume(ref, 7, "")
	for range 2 {
		s.ok("DeleteVolume", s.vols().DeleteVolume(s.ctx(), backend.VolumeRef{UID: ref.UID, Handle: "nonsense"}))
		s.wantNoVolume(ref)
	}
	s.wantVolume(other, 1, "")
}

// volumeAttach tests AttachVolume and DetachVolume with stopped sandboxes.
func (s *suite) volumeAttach() {
	a, b := s.volume(1), s.volume(1)
	one, two := s.create(1), s.create(2)
	for range 2 {
		s.ok("AttachVolume", s.vols().AttachVolume(s.ctx(), one.Ref(), a))
		if v := s.wantVolume(a, 1, one.UID); v.AttachedTo.Handle != "" {
			s.wantPower(v.AttachedTo, backend.PowerStopped)
		}
	}
	s.conflict("AttachVolume to another sandbox", s.vols().AttachVolume(s.ctx(), two.Ref(), a))
	s.conflict("AttachVolume of a second one", s.vols().AttachVolume(s.ctx(), one.Ref(), b))
	s.ok("DetachVolume from another sandbox", s.vols().DetachVolume(s.ctx(), two.Ref(), a))
	s.ok("DetachVolume of another volume", s.vols().DetachVolume(s.ctx(), one.Ref(), b))
	s.wantVolume(a, 1, one.UID)
	s.attachedIsKept(one, a)
	if s.h.Reopen != nil {
		s.reopen()
	}
	s.wantVolume(a, 1, one.UID)
	s.wantVolume(b, 1, "")
	s.ok("Stop", s.d.Stop(s.ctx(), one.Ref(), 0))
	s.ok("Create again", s.d.Create(s.ctx(), one))
	s.wantVolume(a, 1, one.UID)
	for range 2 {
		s.ok("DetachVolume", s.vols().DetachVolume(s.ctx(), one.Ref(), a))
		s.wantVolume(a, 1, "")
	}
	s.ok("AttachVolume of the other one", s.vols().AttachVolume(s.ctx(), one.Ref(), b))
	s.ok("AttachVolume to the other one", s.vols().AttachVolume(s.ctx(), two.Ref(), a))
	s.ok("Destroy", s.d.Destroy(s.ctx(), one.Ref()))
	s.wantVolume(b, 1, "")
	s.wantVolume(a, 1, two.UID)
	s.ok("AttachVolume after Destroy", s.vols().AttachVolume(s.ctx(), s.create(3).Ref(), b))
	s.ok("DetachVolume from a destroyed sandbox", s.vols().DetachVolume(s.ctx(), one.Ref(), b))
	s.wantVolume(b, 1, s.h.Spec(3).UID)
	s.ok("Create with the mark of a destroyed one", s.d.Create(s.ctx(), one))
	s.wantVolume(a, 1, two.UID)
	s.wantVolume(b, 1, s.h.Spec(3).UID)
}

// attachedIsKept calls the methods that must not change an attached volume.
func (s *suite) attachedIsKept(sp backend.Spec, ref backend.VolumeRef) {
	s.Helper()
	s.conflict("GrowVolume", s.vols().GrowVolume(s.ctx(), ref, 2))
	s.conflict("DeleteVolume", s.vols().DeleteVolume(s.ctx(), ref))
	if d := s.groups().Snapshots; d != nil {
		_, err := d.SaveSnapshot(s.ctx(), sp.Ref(), agentlab.NewUID())
		s.conflict("SaveSnapshot of a sandbox with a volume", err)
		all, err := d.Snapshots(s.ctx())
		s.ok("Snapshots", err)
		if len(all) != 0 {
			s.Errorf("after that there is %+v", all)
		}
	}
	s.wantVolume(ref, 1, sp.UID)
	d, ok := s.snaps()
	if !ok {
		return
	}
	fresh := agentlab.NewUID()
	_, err := d.CloneVolume(s.ctx(), ref, fresh)
	s.conflict("CloneVolume", err)
	s.wantNoVolume(backend.VolumeRef{UID: fresh})
	snap, err := d.SnapshotVolume(s.ctx(), ref, fresh)
	if !s.can().AttachedVolumeSnapshots {
		s.conflict("SnapshotVolume", err)
		return
	}
	s.ok("SnapshotVolume", err)
	s.conflict("RestoreVolume", d.RestoreVolume(s.ctx(), snap.Ref))
	s.ok("DeleteVolumeSnapshot", d.DeleteVolumeSnapshot(s.ctx(), snap.Ref))
	s.wantVolume(ref, 1, sp.UID)
}

// volumeSaved restores a sandbox that got a volume after it was saved.
func (s *suite) volumeSaved() {
	if s.groups().Snapshots == nil {
		s.Skip("skipped: this driver has no Snapshots")
	}
	s.snapshotter()
	sp, v := s.create(1), s.volume(1)
	snap := s.save(sp.Ref(), false)
	s.ok("AttachVolume", s.vols().AttachVolume(s.ctx(), sp.Ref(), v))
	s.conflict("RestoreSnapshot of a sandbox with a volume", s.saver().RestoreSnapshot(s.ctx(), snap))
	s.wantVolume(v, 1, sp.UID)
	s.ok("DetachVolume", s.vols().DetachVolume(s.ctx(), sp.Ref(), v))
	s.ok("RestoreSnapshot", s.saver().RestoreSnapshot(s.ctx(), snap))
	s.wantVolume(v, 1, "")
}
