package backendtest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// snapshotter returns the driver as a Snapshotter, and deletes all snapshots at
// the end of the test.
func (s *suite) snapshotter() backend.Snapshots {
	s.Helper()
	d := s.groups().Snapshots
	if d == nil {
		sp := s.spec(1)
		sp.From = &backend.SnapshotRef{UID: agentlab.NewUID(), Of: s.h.Spec(2).Ref()}
		for what, err := range map[string]error{"Validate": s.d.Validate(sp), "Create": s.d.Create(s.ctx(), sp)} {
			s.wantCode(what+" from a snapshot", err, agentlab.CodeUnsupported)
			if e, _ := errors.AsType[*agentlab.Error](err); e.Field != "from" {
				s.Errorf("%s names field %q", what, e.Field)
			}
		}
		s.Skip("skipped: this driver has no Snapshots")
	}
	s.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.Context()), s.cfg.Patience)
		defer cancel()
		all, err := s.saver().Snapshots(ctx)
		for _, snap := range all {
			err = errors.Join(err, s.saver().DeleteSnapshot(ctx, snap.Ref))
		}
		if err != nil {
			s.Errorf("clean up the snapshots: %v", err)
		}
	})
	return d
}

func (s *suite) saver() backend.Snapshots { return s.groups().Snapshots }

// save saves a snapshot, twice.
func (s *suite) save(ref backend.Ref, memory bool) backend.SnapshotRef {
	s.Helper()
	uid := agentlab.NewUID()
	a, err := s.saver().SaveSnapshot(s.ctx(), ref, uid)
	s.ok("SaveSnapshot", err)
	b, err := s.saver().SaveSnapshot(s.ctx(), ref, uid)
	s.ok("SaveSnapshot again", err)
	if a.Ref.UID != uid || a.Ref.Of.UID != ref.UID || a.Memory != memory || a.Partial {
		s.Errorf("SaveSnapshot returns %+v", a)
	}
	l := s.snapshotListed(a.Ref)
	if l == nil || !reflect.DeepEqual(a, b) || !reflect.DeepEqual(*l, a) {
		s.Errorf("SaveSnapshot returns %+v, then %+v, and Snapshots %+v", a, b, l)
	}
	return a.Ref
}

// snapshotListed returns the snapshot from Snapshots, nil if there is none.
func (s *suite) snapshotListed(ref backend.SnapshotRef) *backend.Snapshot {
	s.Helper()
	all, err := s.saver().Snapshots(s.ctx())
	s.ok("Snapshots", err)
	var found *backend.Snapshot
	for _, snap := range all {
		if snap.Ref.UID != ref.UID {
			continue
		}
		if found != nil {
			s.Fatalf("Snapshots has %s twice", ref.UID)
		}
		if snap.Partial && snap.Spec != nil {
			s.Errorf("a partial snapshot has a Spec: %+v", snap)
		}
		found = &snap
	}
	return found
}

// from returns the nth Spec, which starts from a snapshot.
func (s *suite) from(n int, ref backend.SnapshotRef) backend.Spec {
	sp := s.spec(n)
	sp.From = &ref
	return sp
}

// createFrom creates a sandbox from a snapshot, if the backend of this harness can
// copy one.
func (s *suite) createFrom(sp backend.Spec) bool {
	s.Helper()
	err := s.d.Create(s.ctx(), sp)
	if s.h.NoFrom == "" {
		s.ok("Create from a snapshot", err)
		return true
	}
	s.wantCode("Create from a snapshot that cannot be copied", err, s.h.NoFrom)
	if agentlab.HintOf(err) == "" {
		s.Errorf("the error has no hint: %v", err)
	}
	s.wantAbsent(sp.Ref())
	return false
}

// snapshotsStopped tests snapshots of sandboxes that do not run.
func (s *suite) snapshotsStopped() {
	s.snapshotter()
	s.sub("Absent", (*suite).snapshotAbsent)
	s.sub("Source", (*suite).snapshotSource)
	s.sub("From", (*suite).snapshotFrom)
	s.sub("Cancelled", (*suite).snapshotCancelled)
	s.sub("CrashPoints", func(s *suite) {
		for i, p := range s.h.CrashPoints {
			s.sub(fmt.Sprintf("%s/%s", p.Method, p.Name), func(s *suite) { s.crashSnapshot(20+3*i, p) })
		}
	})
}

func (s *suite) snapshotAbsent() {
	gone := s.h.Spec(1).Ref()
	ref := backend.SnapshotRef{UID: agentlab.NewUID(), Of: gone}
	_, err := s.saver().SaveSnapshot(s.ctx(), gone, ref.UID)
	s.wantCode("SaveSnapshot of no sandbox", err, agentlab.CodeNotFound)
	s.wantCode("RestoreSnapshot of none", s.saver().RestoreSnapshot(s.ctx(), ref), agentlab.CodeNotFound)
	s.ok("DeleteSnapshot of none", s.saver().DeleteSnapshot(s.ctx(), ref))
	all, err := s.saver().Snapshots(s.ctx())
	s.ok("Snapshots", err)
	if len(all) != 0 {
		s.Errorf("Snapshots of an empty place: %+v", all)
	}
	sp := s.from(2, ref)
	s.wantCode("Create from no snapshot", s.d.Create(s.ctx(), sp), agentlab.CodeNotFound)
	s.wantAbsent(sp.Ref())
}

// snapshotSource tests the methods for the sandbox that was saved, and for
// another one.
func (s *suite) snapshotSource() {
	sp, other := s.create(1), s.create(2)
	ref := s.save(sp.Ref(), false)
	if l := s.snapshotListed(ref); l != nil && l.Spec != nil && (l.Spec.UID != sp.UID || l.Spec.Image != sp.Image || l.Spec.Resources != sp.Resources) {
		s.Errorf("its Spec is %+v, want %+v", *l.Spec, sp)
	}
	s.wantPower(sp.Ref(), backend.PowerStopped)
	_, err := s.saver().SaveSnapshot(s.ctx(), other.Ref(), ref.UID)
	s.wantCode("SaveSnapshot with the mark of another sandbox's", err, agentlab.CodeExists)
	wrong := backend.SnapshotRef{UID: ref.UID, Of: other.Ref()}
	s.wantCode("RestoreSnapshot of another sandbox's", s.saver().RestoreSnapshot(s.ctx(), wrong), agentlab.CodeNotFound)
	s.ok("DeleteSnapshot of another sandbox's", s.saver().DeleteSnapshot(s.ctx(), wrong))
	if s.snapshotListed(ref) == nil {
		s.Fatal("the snapshot of another sandbox was deleted")
	}
	for range 2 {
		s.ok("RestoreSnapshot", s.saver().RestoreSnapshot(s.ctx(), ref))
		s.wantPower(sp.Ref(), backend.PowerStopped)
	}
	if s.h.Reopen != nil {
		s.reopen()
	}
	if s.snapshotListed(ref) == nil {
		s.Fatal("the snapshot does not stay")
	}
	s.ok("Destroy of the source", s.d.Destroy(s.ctx(), sp.Ref()))
	s.wantAbsent(sp.Ref())
	if kept := s.snapshotListed(ref) != nil; kept != s.can().KeptSnapshots {
		s.Errorf("after Destroy of the source: kept %v, and the capability is %v", kept, s.can().KeptSnapshots)
	}
	s.wantCode("RestoreSnapshot without the sandbox", s.saver().RestoreSnapshot(s.ctx(), ref), agentlab.CodeNotFound)
	s.wantPower(other.Ref(), backend.PowerStopped)
	if s.can().KeptSnapshots {
		next := s.from(3, ref)
		s.ok("Create from the snapshot of a destroyed sandbox", s.d.Create(s.ctx(), next))
		s.wantPower(next.Ref(), backend.PowerStopped)
	}
	for range 2 {
		s.ok("DeleteSnapshot", s.saver().DeleteSnapshot(s.ctx(), ref))
	}
	if l := s.snapshotListed(ref); l != nil {
		s.Errorf("Snapshots still has %+v", *l)
	}
}

// snapshotFrom tests Spec.From.
func (s *suite) snapshotFrom() {
	sp := s.spec(1)
	sp.Resources.RootSizeGB = 40
	s.ok("Create", s.d.Create(s.ctx(), sp))
	ref := s.save(sp.Ref(), false)
	for field, change := range map[string]func(*backend.Spec){
		"image":                func(c *backend.Spec) { c.Image = "other@sha256:0" },
		"resources.cores":      func(c *backend.Spec) { c.Resources.Cores++ },
		"resources.memory_mb":  func(c *backend.Spec) { c.Resources.MemoryMB *= 2 },
		"resources.nested":     func(c *backend.Spec) { c.Resources.Nested = agentlab.NestedAuto },
		"storage.root_size_gb": func(c *backend.Spec) { c.Resources.RootSizeGB-- },
	} {
		c := s.from(2, ref)
		c.Resources = sp.Resources
		change(&c)
		err := s.d.Create(s.ctx(), c)
		s.wantCode("Create with another "+field, err, agentlab.CodeInvalid)
		if e, _ := errors.AsType[*agentlab.Error](err); e.Field != field {
			s.Errorf("the error names field %q, want %q", e.Field, field)
		}
		s.wantAbsent(c.Ref())
	}
	foreign := s.from(2, backend.SnapshotRef{UID: ref.UID, Of: s.h.Spec(2).Ref()})
	foreign.Resources = sp.Resources
	s.wantCode("Create from a snapshot of another sandbox", s.d.Create(s.ctx(), foreign), agentlab.CodeNotFound)
	s.wantAbsent(foreign.Ref())

	same, larger := s.from(3, ref), s.from(4, ref)
	same.Resources, larger.Resources = sp.Resources, sp.Resources
	larger.Resources.RootSizeGB = 41
	if !s.createFrom(larger) {
		return
	}
	s.createFrom(same)
	s.ok("DeleteSnapshot", s.saver().DeleteSnapshot(s.ctx(), ref))
	for _, c := range []backend.Spec{same, larger} {
		s.ok("Create again, without the snapshot", s.d.Create(s.ctx(), c))
		if in := s.wantPower(c.Ref(), backend.PowerStopped); in.Name != c.Name {
			s.Errorf("its name is %q, want %q", in.Name, c.Name)
		}
	}
	late := s.from(5, ref)
	late.Resources = sp.Resources
	s.wantCode("Create from a deleted snapshot", s.d.Create(s.ctx(), late), agentlab.CodeNotFound)
	s.ok("Destroy", s.d.Destroy(s.ctx(), sp.Ref()))
	s.wantPower(same.Ref(), backend.PowerStopped)
}

// snapshotCancelled ends the contexts of the methods before the call, and after
// increasing times.
func (s *suite) snapshotCancelled() {
	sp := s.create(1)
	ref := s.save(sp.Ref(), false)
	for _, after := range []time.Duration{0, time.Millisecond, 10 * time.Millisecond} {
		fresh := backend.SnapshotRef{UID: agentlab.NewUID(), Of: sp.Ref()}
		child := s.from(2, ref)
		for what, call := range map[string]func(context.Context) error{
			"Snapshots": func(ctx context.Context) error { _, err := s.saver().Snapshots(ctx); return err },
			"SaveSnapshot": func(ctx context.Context) error {
				_, err := s.saver().SaveSnapshot(ctx, sp.Ref(), fresh.UID)
				return err
			},
			"RestoreSnapshot": func(ctx context.Context) error {
				err := s.saver().RestoreSnapshot(ctx, ref)
				if s.h.NewestOnly && agentlab.CodeOf(err) == agentlab.CodeConflict {
					return nil // there is a newer one already
				}
				return err
			},
			"Create":         func(ctx context.Context) error { return s.d.Create(ctx, child) },
			"DeleteSnapshot": func(ctx context.Context) error { return s.saver().DeleteSnapshot(ctx, fresh) },
		} {
			s.cutShort(what, after, call)
		}
		s.wantKnown(sp.Ref())
		if s.h.NewestOnly {
			s.ok("DeleteSnapshot of a newer one", s.saver().DeleteSnapshot(s.ctx(), fresh))
		}
		s.ok("RestoreSnapshot to the end", s.saver().RestoreSnapshot(s.ctx(), ref))
		s.createFrom(child)
		s.ok("Destroy", s.d.Destroy(s.ctx(), child.Ref()))
		_, err := s.saver().SaveSnapshot(s.ctx(), sp.Ref(), fresh.UID)
		s.ok("SaveSnapshot to the end", err)
		s.ok("DeleteSnapshot to the end", s.saver().DeleteSnapshot(s.ctx(), fresh))
		if l := s.snapshotListed(fresh); l != nil {
			s.Errorf("Snapshots still has %+v", *l)
		}
	}
}

// wantUnusable checks the error of a call with a snapshot that was listed as partial. A
// task of the backend that has outlived the driver may have completed it since then: the
// call may have succeeded if it is whole now.
func (s *suite) wantUnusable(what string, err error, whole func() bool) (succeeded bool) {
	s.Helper()
	if code := agentlab.CodeOf(err); (err == nil || s.h.NoFrom != "" && code == s.h.NoFrom) && whole() {
		return err == nil
	}
	s.wantCode(what, err, agentlab.CodeNotFound)
	return false
}

// crashSnapshot simulates a crash in a method that has to do with snapshots, or in
// a Create from one, opens the driver again, and finishes what was interrupted.
func (s *suite) crashSnapshot(n int, p CrashPoint) {
	sp := s.create(n)
	ref := backend.SnapshotRef{UID: agentlab.NewUID(), Of: sp.Ref()}
	save := func() error { _, err := s.saver().SaveSnapshot(s.ctx(), sp.Ref(), ref.UID); return err }
	child := s.from(n+1, ref)
	call, first := save, save
	switch p.Method {
	case MethodSaveSnapshot:
		first = nil
	case MethodRestoreSnapshot:
		call = func() error { return s.saver().RestoreSnapshot(s.ctx(), ref) }
	case MethodDeleteSnapshot:
		call = func() error { return s.saver().DeleteSnapshot(s.ctx(), ref) }
	case MethodCreate:
		if s.h.NoFrom != "" {
			return
		}
		call = func() error { return s.d.Create(s.ctx(), child) }
	default:
		return
	}
	if first != nil {
		s.ok("SaveSnapshot", first())
	}
	p.Arm(s.T)
	if err := call(); err == nil {
		s.Fatal("the crash point was not reached")
	}
	s.reopen()
	s.wantKnown(sp.Ref())
	if l := s.snapshotListed(ref); l == nil && p.Method != MethodSaveSnapshot && p.Method != MethodDeleteSnapshot {
		s.Fatal("the snapshot does not stay")
	} else if l != nil && l.Partial {
		whole := func() bool { now := s.snapshotListed(ref); return now != nil && !now.Partial }
		s.wantUnusable("RestoreSnapshot of a partial one", s.saver().RestoreSnapshot(s.ctx(), ref), whole)
		late := s.from(n+2, ref)
		if s.wantUnusable("Create from a partial one", s.d.Create(s.ctx(), late), whole) {
			s.ok("Destroy", s.d.Destroy(s.ctx(), late.Ref()))
		}
		s.wantAbsent(late.Ref())
	}
	if p.Method == MethodRestoreSnapshot {
		s.ok("Create", s.d.Create(s.ctx(), sp))
		s.wantPower(sp.Ref(), backend.PowerStopped)
	}
	s.ok(string(p.Method)+" again", call())
	switch p.Method {
	case MethodCreate:
		s.wantPower(child.Ref(), backend.PowerStopped)
		s.ok("Destroy", s.d.Destroy(s.ctx(), child.Ref()))
	case MethodRestoreSnapshot:
		s.wantPower(sp.Ref(), backend.PowerStopped)
	case MethodDeleteSnapshot:
		if l := s.snapshotListed(ref); l != nil {
			s.Errorf("Snapshots still has %+v", *l)
		}
	default:
		s.ok("RestoreSnapshot", s.saver().RestoreSnapshot(s.ctx(), ref))
	}
	s.ok("DeleteSnapshot", s.saver().DeleteSnapshot(s.ctx(), ref))
	s.ok("Destroy", s.d.Destroy(s.ctx(), sp.Ref()))
}
