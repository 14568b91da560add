package backendtest

import (
	"errors"
	"fmt"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// saveVolume saves a volume of gb GiB, twice.
func (s *suite) saveVolume(ref backend.VolumeRef, gb int) backend.VolumeSnapshotRef {
	s.Helper()
	d, _ := s.snaps()
	uid := agentlab.NewUID()
	for range 2 {
		v, err := d.SnapshotVolume(s.ctx(), ref, uid)
		s.ok("SnapshotVolume", err)
		if v.Ref.UID != uid || v.Ref.Of.UID != ref.UID || v.SizeGB != gb || v.Partial {
			s.Errorf("SnapshotVolume returns %+v", v)
		}
		if l := s.volumeSnapshotListed(v.Ref); l == nil || l.Ref.Of.UID != ref.UID || l.SizeGB != gb || l.Partial {
			s.Errorf("VolumeSnapshots has %+v", l)
		}
	}
	return backend.VolumeSnapshotRef{UID: uid, Of: ref}
}

// volumeSnapshotListed returns the snapshot from VolumeSnapshots, nil if there is
// none.
func (s *suite) volumeSnapshotListed(ref backend.VolumeSnapshotRef) *backend.VolumeSnapshot {
	s.Helper()
	d, _ := s.snaps()
	all, err := d.VolumeSnapshots(s.ctx())
	s.ok("VolumeSnapshots", err)
	var found *backend.VolumeSnapshot
	for _, v := range all {
		if v.Ref.UID != ref.UID {
			continue
		}
		if found != nil {
			s.Fatalf("VolumeSnapshots has %s twice", ref.UID)
		}
		found = &v
	}
	return found
}

// volumeSnapshots tests the methods with snapshots of volumes that are not attached.
func (s *suite) volumeSnapshots() {
	d, ok := s.snaps()
	if !ok {
		s.Skip("skipped: the storage has no snapshots")
	}
	a, b := s.volume(1), s.volume(1)
	first := s.saveVolume(a, 1)
	_, err := d.SnapshotVolume(s.ctx(), b, first.UID)
	s.wantCode("SnapshotVolume with the mark of another volume's", err, agentlab.CodeExists)
	wrong := backend.VolumeSnapshotRef{UID: first.UID, Of: b}
	s.wantCode("RestoreVolume of another volume's", d.RestoreVolume(s.ctx(), wrong), agentlab.CodeNotFound)
	_, err = d.CloneVolumeSnapshot(s.ctx(), wrong, agentlab.NewUID())
	s.wantCode("CloneVolumeSnapshot of another volume's", err, agentlab.CodeNotFound)
	s.ok("DeleteVolumeSnapshot of another volume's", d.DeleteVolumeSnapshot(s.ctx(), wrong))
	s.ok("GrowVolume", s.vols().GrowVolume(s.ctx(), a, 2))
	second := s.saveVolume(a, 2)
	if s.h.Reopen != nil {
		s.reopen()
		d, _ = s.snaps()
	}
	if l := s.volumeSnapshotListed(first); l == nil || l.SizeGB != 1 {
		s.Fatalf("the first snapshot is %+v", l)
	}
	if s.h.NewestOnly {
		s.conflict("RestoreVolume to an older one", d.RestoreVolume(s.ctx(), first))
		s.wantVolume(a, 2, "")
		s.ok("RestoreVolume", d.RestoreVolume(s.ctx(), second))
		s.wantVolume(a, 2, "")
		s.ok("DeleteVolumeSnapshot", d.DeleteVolumeSnapshot(s.ctx(), second))
	}
	for range 2 {
		s.ok("RestoreVolume", d.RestoreVolume(s.ctx(), first))
		s.wantVolume(a, 1, "")
	}
	for range 2 {
		s.ok("DeleteVolumeSnapshot", d.DeleteVolumeSnapshot(s.ctx(), first))
		if l := s.volumeSnapshotListed(first); l != nil {
			s.Fatalf("VolumeSnapshots still has %+v", *l)
		}
	}
	s.wantCode("RestoreVolume to a deleted one", d.RestoreVolume(s.ctx(), first), agentlab.CodeNotFound)
	s.wantVolume(a, 1, "")
	if !s.h.NewestOnly {
		s.ok("RestoreVolume to a newer one", d.RestoreVolume(s.ctx(), second))
		s.wantVolume(a, 2, "")
	}
	third := s.saveVolume(b, 1)
	s.ok("DeleteVolume", s.vols().DeleteVolume(s.ctx(), b))
	if l := s.volumeSnapshotListed(third); l != nil {
		s.Errorf("the snapshot of a deleted volume stays: %+v", *l)
	}
}

// volumeClones tests CloneVolume and CloneVolumeSnapshot.
func (s *suite) volumeClones() {
	d, ok := s.snaps()
	if !ok {
		s.Skip("skipped: the storage has no snapshots")
	}
	a := s.volume(1)
	snap := s.saveVolume(a, 1)
	s.ok("GrowVolume", s.vols().GrowVolume(s.ctx(), a, 2))
	old, clone, gb := agentlab.NewUID(), agentlab.NewUID(), 1
	if s.h.PresentSize {
		gb = 2
	}
	for range 2 {
		v, err := d.CloneVolume(s.ctx(), a, clone)
		s.ok("CloneVolume", err)
		if v.Ref.UID != clone || v.SizeGB != 2 || v.Storage != s.wantVolume(a, 2, "").Storage {
			s.Errorf("CloneVolume returns %+v", v)
		}
		if old == "" {
			continue
		}
		v, err = d.CloneVolumeSnapshot(s.ctx(), snap, old)
		if agentlab.CodeOf(err) == agentlab.CodeUnsupported {
			old = ""
			continue
		}
		s.ok("CloneVolumeSnapshot", err)
		if v.Ref.UID != old || v.SizeGB != gb {
			s.Errorf("CloneVolumeSnapshot returns %+v", v)
		}
	}
	c, o := backend.VolumeRef{UID: clone}, backend.VolumeRef{UID: old}
	sp := s.create(1)
	s.ok("AttachVolume", s.vols().AttachVolume(s.ctx(), sp.Ref(), a))
	if old != "" {
		other := backend.VolumeRef{UID: agentlab.NewUID()}
		_, err := d.CloneVolumeSnapshot(s.ctx(), snap, other.UID)
		s.ok("CloneVolumeSnapshot of an attached volume", err)
		s.wantVolume(other, gb, "")
	}
	s.ok("DeleteVolumeSnapshot of an attached volume", d.DeleteVolumeSnapshot(s.ctx(), snap))
	s.ok("DetachVolume", s.vols().DetachVolume(s.ctx(), sp.Ref(), a))
	s.saveVolume(c, 2)
	s.ok("DeleteVolume of the source", s.vols().DeleteVolume(s.ctx(), a))
	s.ok("GrowVolume of the clone", s.vols().GrowVolume(s.ctx(), c, 3))
	s.wantVolume(c, 3, "")
	if old != "" {
		s.wantVolume(o, gb, "")
	}
	v, err := d.CloneVolume(s.ctx(), a, clone)
	s.ok("CloneVolume again, without the source", err)
	if v.SizeGB != 3 {
		s.Errorf("CloneVolume changes a volume that exists: %+v", v)
	}
	s.ok("DeleteVolume of the clone", s.vols().DeleteVolume(s.ctx(), c))
	s.wantNoVolume(c)
}

// volumeUnsupported tests a storage that has no snapshots.
func (s *suite) volumeUnsupported() {
	d := s.groups().Volumes
	if d == nil || !s.h.NoVolumeSnapshots {
		s.Skip("skipped: the storage has snapshots, or the driver has no Volumes")
	}
	v := s.volume(1)
	_, err := d.SnapshotVolume(s.ctx(), v, agentlab.NewUID())
	s.wantCode("SnapshotVolume", err, agentlab.CodeUnsupported)
	all, err := d.VolumeSnapshots(s.ctx())
	s.ok("VolumeSnapshots", err)
	if len(all) != 0 {
		s.Errorf("after that there is %+v", all)
	}
	s.wantVolume(v, 1, "")
}

// volumeCalls are the methods with crash points, for the volume and the snapshot
// that volumeCrash has made.
func (s *suite) volumeCalls(ref backend.Ref, v backend.VolumeRef, snap backend.VolumeSnapshotRef, fresh string) map[Method]func() error {
	calls := map[Method]func() error{
		MethodCreateVolume: func() error {
			_, err := s.vols().CreateVolume(s.ctx(), backend.VolumeSpec{UID: fresh, SizeGB: 1, Storage: s.h.VolumeStorage})
			return err
		},
		MethodDeleteVolume: func() error { return s.vols().DeleteVolume(s.ctx(), v) },
		MethodGrowVolume:   func() error { return s.vols().GrowVolume(s.ctx(), v, 2) },
		MethodAttachVolume: func() error { return s.vols().AttachVolume(s.ctx(), ref, v) },
		MethodDetachVolume: func() error { return s.vols().DetachVolume(s.ctx(), ref, v) },
	}
	d, ok := s.snaps()
	if ok {
		calls[MethodSnapshotVolume] = func() error { _, err := d.SnapshotVolume(s.ctx(), v, snap.UID); return err }
		calls[MethodRestoreVolume] = func() error { return d.RestoreVolume(s.ctx(), snap) }
		calls[MethodCloneVolume] = func() error { _, err := d.CloneVolume(s.ctx(), v, fresh); return err }
		calls[MethodCloneVolumeSnapshot] = func() error { _, err := d.CloneVolumeSnapshot(s.ctx(), snap, fresh); return err }
		calls[MethodDeleteVolumeSnapshot] = func() error { return d.DeleteVolumeSnapshot(s.ctx(), snap) }
	}
	return calls
}

func (s *suite) volumeCrashes() {
	for i, p := range s.h.CrashPoints {
		if s.volumeCalls(backend.Ref{}, backend.VolumeRef{}, backend.VolumeSnapshotRef{}, "")[p.Method] == nil {
			continue
		}
		for _, then := range []string{"finish", "delete"} {
			s.sub(fmt.Sprintf("%s/%s/%s", p.Method, p.Name, then), func(s *suite) { s.volumeCrash(100+i, p, then == "delete") })
		}
	}
}

// volumeCrash simulates a crash in a method for volumes, opens the driver again, and
// finishes what was interrupted, or deletes everything.
func (s *suite) volumeCrash(n int, p CrashPoint, remove bool) {
	sp, v := s.create(n), s.volume(1)
	snap, fresh := backend.VolumeSnapshotRef{UID: agentlab.NewUID(), Of: v}, backend.VolumeRef{UID: agentlab.NewUID()}
	calls := s.volumeCalls(sp.Ref(), v, snap, fresh.UID)
	switch p.Method {
	case MethodDetachVolume:
		s.ok("AttachVolume", calls[MethodAttachVolume]())
	case MethodRestoreVolume, MethodCloneVolumeSnapshot, MethodDeleteVolumeSnapshot:
		s.ok("SnapshotVolume", calls[MethodSnapshotVolume]())
	default:
	}
	p.Arm(s.T)
	if err := calls[p.Method](); err == nil {
		s.Fatal("the crash point was not reached")
	}
	s.reopen()
	calls = s.volumeCalls(sp.Ref(), v, snap, fresh.UID)
	s.volumePartial(p.Method, calls, v, snap, fresh)
	if remove {
		s.ok("DetachVolume", calls[MethodDetachVolume]())
		if _, ok := s.snaps(); ok {
			s.ok("DeleteVolumeSnapshot", calls[MethodDeleteVolumeSnapshot]())
		}
		s.ok("DeleteVolume", errors.Join(s.vols().DeleteVolume(s.ctx(), v), s.vols().DeleteVolume(s.ctx(), fresh)))
		s.wantNoVolume(v)
		s.wantNoVolume(fresh)
		return
	}
	s.ok(string(p.Method)+" again", calls[p.Method]())
	gb, sandbox := 1, ""
	switch p.Method {
	case MethodDeleteVolume:
		s.wantNoVolume(v)
		return
	case MethodGrowVolume:
		gb = 2
	case MethodAttachVolume:
		sandbox = sp.UID
	case MethodCreateVolume, MethodCloneVolume, MethodCloneVolumeSnapshot:
		s.wantVolume(fresh, 1, "")
	case MethodSnapshotVolume, MethodRestoreVolume:
		if l := s.volumeSnapshotListed(snap); l == nil || l.Partial {
			s.Errorf("the snapshot is %+v", l)
		}
	case MethodDeleteVolumeSnapshot:
		if l := s.volumeSnapshotListed(snap); l != nil {
			s.Errorf("VolumeSnapshots still has %+v", *l)
		}
	default:
	}
	s.wantVolume(v, gb, sandbox)
	s.ok("DetachVolume", calls[MethodDetachVolume]())
	s.ok("DeleteVolume", s.vols().DeleteVolume(s.ctx(), v))
}

// volumePartial checks what an interrupted method has left.
func (s *suite) volumePartial(method Method, calls map[Method]func() error, v backend.VolumeRef, snap backend.VolumeSnapshotRef, fresh backend.VolumeRef) {
	s.Helper()
	if l := s.volumeListed(fresh); l != nil && l.Partial {
		s.conflict("GrowVolume of a partial one", s.vols().GrowVolume(s.ctx(), fresh, 5))
		s.conflict("AttachVolume of a partial one", s.vols().AttachVolume(s.ctx(), s.create(99).Ref(), fresh))
	}
	l := s.volumeListed(v)
	if method == MethodDeleteVolume {
		return
	}
	if l == nil || l.Partial && method != MethodRestoreVolume {
		s.Fatalf("the volume is %+v", l)
	}
	if l.Partial {
		s.conflict("AttachVolume of a partial one", calls[MethodAttachVolume]())
		s.conflict("SnapshotVolume of a partial one", func() error {
			d, _ := s.snaps()
			_, err := d.SnapshotVolume(s.ctx(), v, agentlab.NewUID())
			return err
		}())
		_, err := s.vols().CreateVolume(s.ctx(), backend.VolumeSpec{UID: v.UID, SizeGB: 1, Storage: s.h.VolumeStorage})
		s.conflict("CreateVolume of one whose restoration was interrupted", err)
	}
	if _, ok := s.snaps(); !ok {
		return
	}
	if l := s.volumeSnapshotListed(snap); l != nil && l.Partial {
		whole := func() bool { now := s.volumeSnapshotListed(snap); return now != nil && !now.Partial }
		s.wantUnusable("RestoreVolume to a partial snapshot", calls[MethodRestoreVolume](), whole)
		if s.wantUnusable("CloneVolumeSnapshot of a partial one", calls[MethodCloneVolumeSnapshot](), whole) {
			s.ok("DeleteVolume", s.vols().DeleteVolume(s.ctx(), fresh))
		}
		s.wantNoVolume(fresh)
	}
}
