package backendtest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// volumeParallel makes calls that contradict each other, and others that do not.
func (s *suite) volumeParallel() {
	n := s.cfg.Parallel
	ctx, v := s.ctx(), s.volume(1)
	specs, errs, refs := make([]backend.Spec, n), make([]error, n), make([]backend.VolumeRef, n)
	for i := range n {
		specs[i] = s.create(i)
	}
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = s.vols().AttachVolume(ctx, specs[i].Ref(), v) })
	}
	wg.Wait()
	won := slices.Index(errs, nil)
	if won < 0 {
		s.Fatalf("none of %d got it: %v", n, errs)
	}
	for i, err := range errs {
		if i != won {
			s.conflict("AttachVolume of the one that another got", err)
		}
	}
	s.wantVolume(v, 1, specs[won].UID)
	spec := s.volumeSpec(1)
	for i := range n {
		wg.Go(func() {
			_, err := s.vols().CreateVolume(ctx, spec)
			got, err2 := s.vols().CreateVolume(ctx, s.volumeSpec(1))
			errs[i], refs[i] = errors.Join(err, err2), got.Ref
		})
	}
	wg.Wait()
	s.ok("CreateVolume", errors.Join(errs...))
	s.wantVolume(backend.VolumeRef{UID: spec.UID}, 1, "")
	for i := range n {
		wg.Go(func() {
			errs[i] = errors.Join(s.vols().GrowVolume(ctx, refs[i], 2), s.vols().DeleteVolume(ctx, refs[i]), s.vols().DeleteVolume(ctx, backend.VolumeRef{UID: spec.UID}))
		})
	}
	wg.Wait()
	s.ok("DeleteVolume", errors.Join(errs...))
	all, err := s.vols().ListVolumes(s.ctx())
	s.ok("ListVolumes", err)
	if left := slices.DeleteFunc(all, func(l backend.Volume) bool { return l.Ref.UID == v.UID }); len(left) != 0 && slices.ContainsFunc(left, func(l backend.Volume) bool {
		return slices.ContainsFunc(append(refs, backend.VolumeRef{UID: spec.UID}), func(r backend.VolumeRef) bool { return r.UID == l.Ref.UID })
	}) {
		s.Errorf("after all were deleted there is %+v", left)
	}
}

func (s *suite) volumeForeign() {
	if s.h.ForeignVolume == nil {
		s.Skip("skipped: this harness cannot make a foreign volume")
	}
	spec := s.volumeSpec(1)
	ref := backend.VolumeRef{UID: spec.UID}
	untouched := s.h.ForeignVolume(s.T, spec)
	if l := s.volumeListed(ref); l != nil && !l.Partial {
		s.Errorf("ListVolumes has the foreign volume as ours: %+v", *l)
	}
	if v, err := s.vols().CreateVolume(s.ctx(), spec); err == nil { // in another place
		s.wantVolume(v.Ref, 1, "")
	} else {
		s.wantCode("CreateVolume in the place of a foreign one", err, agentlab.CodeExists)
	}
	untouched(s.T)
	if d, ok := s.snaps(); ok {
		if v, err := d.CloneVolume(s.ctx(), s.volume(1), spec.UID); err == nil {
			s.wantVolume(v.Ref, 1, "")
		} else {
			s.wantCode("CloneVolume to the place of a foreign one", err, agentlab.CodeExists)
		}
		untouched(s.T)
	}
	_ = s.vols().GrowVolume(s.ctx(), ref, 2)
	untouched(s.T)
	s.wantAllowed("AttachVolume", s.vols().AttachVolume(s.ctx(), s.create(1).Ref(), ref))
	untouched(s.T)
	s.wantAllowed("DeleteVolume", s.vols().DeleteVolume(s.ctx(), ref))
	untouched(s.T)
}

// volumeFull calls the methods while the storage has no space left.
func (s *suite) volumeFull() {
	if s.h.FillVolumes == nil {
		s.Skip("skipped: this harness cannot fill the storage")
	}
	v, fresh := s.volume(1), s.volumeSpec(1)
	snap := backend.VolumeSnapshotRef{UID: agentlab.NewUID(), Of: v}
	d, ok := s.snaps()
	if ok {
		_, err := d.SnapshotVolume(s.ctx(), v, snap.UID)
		s.ok("SnapshotVolume", err)
	}
	free := s.h.FillVolumes(s.T)
	_, err := s.vols().CreateVolume(s.ctx(), fresh)
	s.wantCode("CreateVolume", err, agentlab.CodeNoSpace)
	if agentlab.HintOf(err) == "" {
		s.Errorf("the error has no hint: %v", err)
	}
	if ok {
		_, err := d.SnapshotVolume(s.ctx(), v, fresh.UID)
		s.wantCode("SnapshotVolume", err, agentlab.CodeNoSpace)
		_, err = d.CloneVolume(s.ctx(), v, fresh.UID)
		s.wantCode("CloneVolume", err, agentlab.CodeNoSpace)
		s.wantCode("RestoreVolume", d.RestoreVolume(s.ctx(), snap), agentlab.CodeNoSpace)
		if l := s.volumeSnapshotListed(snap); l == nil || l.Partial {
			s.Errorf("the snapshot is %+v", l)
		}
	}
	s.wantVolume(v, 1, "")
	free()
	_, err = s.vols().CreateVolume(s.ctx(), fresh)
	s.ok("CreateVolume", err)
	if ok {
		s.ok("RestoreVolume", d.RestoreVolume(s.ctx(), snap))
	}
	s.wantVolume(v, 1, "")
}

// volumeCancelled ends the contexts of the methods before the call, and after
// increasing times; afterwards everything can be completed.
func (s *suite) volumeCancelled() {
	sp, v := s.create(1), s.volume(1)
	d, ok := s.snaps()
	snap := backend.VolumeSnapshotRef{UID: agentlab.NewUID(), Of: v}
	if ok {
		_, err := d.SnapshotVolume(s.ctx(), v, snap.UID)
		s.ok("SnapshotVolume", err)
	}
	for i, after := range []time.Duration{0, time.Millisecond, 10 * time.Millisecond} {
		fresh, clone, clone2, gb := s.volumeSpec(1), agentlab.NewUID(), agentlab.NewUID(), i+2
		saved := backend.VolumeSnapshotRef{UID: agentlab.NewUID(), Of: v}
		type call struct {
			what string
			call func(context.Context) error
		}
		calls := []call{
			{"CreateVolume", func(ctx context.Context) error { _, err := s.vols().CreateVolume(ctx, fresh); return err }},
			{"InspectVolume", func(ctx context.Context) error { _, err := s.vols().InspectVolume(ctx, v); return err }},
			{"ListVolumes", func(ctx context.Context) error { _, err := s.vols().ListVolumes(ctx); return err }},
		}
		if ok {
			calls = append(calls, call{"SnapshotVolume", func(ctx context.Context) error { _, err := d.SnapshotVolume(ctx, v, saved.UID); return err }},
				call{"CloneVolume", func(ctx context.Context) error { _, err := d.CloneVolume(ctx, v, clone); return err }},
				call{"CloneVolumeSnapshot", func(ctx context.Context) error { _, err := d.CloneVolumeSnapshot(ctx, saved, clone2); return err }},
				call{"VolumeSnapshots", func(ctx context.Context) error { _, err := d.VolumeSnapshots(ctx); return err }},
				call{"RestoreVolume", func(ctx context.Context) error { return d.RestoreVolume(ctx, saved) }},
				call{"DeleteVolumeSnapshot", func(ctx context.Context) error { return d.DeleteVolumeSnapshot(ctx, saved) }})
		}
		calls = append(calls,
			call{"GrowVolume", func(ctx context.Context) error { return s.vols().GrowVolume(ctx, v, gb) }},
			call{"AttachVolume", func(ctx context.Context) error { return s.vols().AttachVolume(ctx, sp.Ref(), v) }},
			call{"DetachVolume", func(ctx context.Context) error { return s.vols().DetachVolume(ctx, sp.Ref(), v) }},
			call{"DeleteVolume", func(ctx context.Context) error {
				return s.vols().DeleteVolume(ctx, backend.VolumeRef{UID: fresh.UID})
			}})
		for _, c := range calls {
			if c.what == "CloneVolumeSnapshot" || c.what == "RestoreVolume" {
				_, err := d.SnapshotVolume(s.ctx(), v, saved.UID)
				s.ok("SnapshotVolume", err)
			}
			s.cutShort(c.what, after, func(ctx context.Context) error {
				err := c.call(ctx)
				if agentlab.CodeOf(err) == agentlab.CodeNotFound {
					s.Errorf("%s: cancelled is read as absent: %v", c.what, err)
				}
				return err
			})
			err := c.call(s.ctx())
			if c.what == "CloneVolumeSnapshot" && agentlab.CodeOf(err) == agentlab.CodeUnsupported {
				continue
			}
			s.ok(c.what+" to the end", err)
		}
		s.wantVolume(v, gb, "")
		s.wantNoVolume(backend.VolumeRef{UID: fresh.UID})
	}
}
