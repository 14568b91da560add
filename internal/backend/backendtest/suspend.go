package backendtest

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// suspend suspends and resumes the running sandbox: the same boot answers
// again, even if the driver's process ended in between.
func (s *suite) suspend(ref backend.Ref, boot string) {
	sus := s.groups().Power
	if sus == nil {
		s.Skip("skipped: this driver has no Power")
	}
	for range 2 {
		s.ok("Suspend", sus.Suspend(s.ctx(), ref))
		s.wantPower(ref, backend.PowerSuspended)
	}
	if in := s.listed(ref); in == nil || in.Power != backend.PowerSuspended {
		s.Errorf("List has %+v", in)
	}
	if _, err := s.client(ref).Health(s.ctx()); err == nil {
		s.Error("a suspended guest answers")
	}
	s.wantCode("Start of a suspended sandbox", s.d.Start(s.ctx(), ref), agentlab.CodeConflict)
	if s.h.Reopen != nil {
		s.reopen()
		s.wantPower(ref, backend.PowerSuspended)
		sus = s.groups().Power
	}
	for range 2 {
		s.ok("Resume", sus.Resume(s.ctx(), ref))
		s.wantPower(ref, backend.PowerRunning)
	}
	if h := s.awaitControl(ref); h.BootID != boot {
		s.Errorf("boot %q answers after Resume, want %q", h.BootID, boot)
	}
}

// suspendToDisk suspends the sandbox to disk, once while it runs and once while
// it is suspended: the same boot answers again, even if the driver's process
// ended in between.
func (s *suite) suspendToDisk(ref backend.Ref, boot string) {
	sus := s.groups().Power
	if !s.can().SuspendToDisk {
		s.Skip("skipped: this driver cannot suspend to disk")
	}
	for _, paused := range []bool{false, true} {
		if paused {
			s.ok("Suspend", sus.Suspend(s.ctx(), ref))
		}
		for range 2 {
			s.ok("SuspendToDisk", sus.SuspendToDisk(s.ctx(), ref))
			s.wantPower(ref, backend.PowerSuspended)
		}
		s.ok("Suspend of a sandbox that is on disk", sus.Suspend(s.ctx(), ref))
		s.wantCode("Start of a suspended sandbox", s.d.Start(s.ctx(), ref), agentlab.CodeConflict)
		if s.h.Reopen != nil {
			s.reopen()
			s.wantPower(ref, backend.PowerSuspended)
			sus = s.groups().Power
		}
		for after := 10 * time.Millisecond; after < 200*time.Millisecond; after *= 3 {
			s.cutShort("Resume", after, func(ctx context.Context) error { return sus.Resume(ctx, ref) })
		}
		for range 2 {
			s.ok("Resume", sus.Resume(s.ctx(), ref))
			s.wantPower(ref, backend.PowerRunning)
		}
		if h := s.awaitControl(ref); h.BootID != boot {
			s.Errorf("boot %q answers after Resume, want %q", h.BootID, boot)
		}
	}
}

// suspendStopped tests that a stopped sandbox can be neither suspended nor
// resumed.
func (s *suite) suspendStopped(ref backend.Ref) {
	if sus := s.groups().Power; sus != nil {
		s.wantCode("Suspend of a stopped sandbox", sus.Suspend(s.ctx(), ref), agentlab.CodeConflict)
		s.wantCode("Resume of a stopped sandbox", sus.Resume(s.ctx(), ref), agentlab.CodeConflict)
		gone := backend.Ref{UID: agentlab.NewUID()}
		s.wantCode("Suspend of no sandbox", sus.Suspend(s.ctx(), gone), agentlab.CodeNotFound)
		s.wantCode("Resume of no sandbox", sus.Resume(s.ctx(), gone), agentlab.CodeNotFound)
		if s.can().SuspendToDisk {
			s.wantCode("SuspendToDisk of a stopped sandbox", sus.SuspendToDisk(s.ctx(), ref), agentlab.CodeConflict)
			s.wantCode("SuspendToDisk of no sandbox", sus.SuspendToDisk(s.ctx(), gone), agentlab.CodeNotFound)
		}
	}
}
