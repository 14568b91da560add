package backendtest

import (
	"fmt"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Files of the guests of these tests: one on the disk, one in memory.
const (
	savedFile  = "/var/tmp/saved"
	memoryFile = "/dev/shm/saved"
)

// snapshotsRunning tests snapshots of one running sandbox.
func (s *suite) snapshotsRunning() {
	if s.cfg.NoVM != "" {
		s.Skip("skipped: " + s.cfg.NoVM)
	}
	s.snapshotter()
	sp := s.create(1)
	ref := sp.Ref()
	s.ok("Start", s.d.Start(s.ctx(), ref))
	s.awaitControl(ref)
	s.identify(sp)
	boot := s.awaitControl(ref).BootID // the identity may have replaced it
	s.sub("Fork", func(s *suite) { s.fork(sp, boot) })
	s.sub("ForkKilled", func(s *suite) { s.forkKilled(ref) })
	s.sub("Suspended", func(s *suite) { s.snapshotSuspended(ref, boot) })
	s.sub("Repeated", func(s *suite) { s.snapshotRepeated(ref, boot) })
	s.sub("Restore", func(s *suite) { s.restore(ref, boot) })
	s.sub("CrashPoints", func(s *suite) {
		for _, p := range s.h.CrashPoints {
			if p.Method == MethodSaveSnapshot || p.Method == MethodRestoreSnapshot {
				s.sub(fmt.Sprintf("%s/%s", p.Method, p.Name), func(s *suite) { s.crashRunning(ref, boot, p) })
			}
		}
	})
	s.sub("Stopped", func(s *suite) { s.restoreStopped(ref) })
}

// identify gives the guest its identity.
func (s *suite) identify(sp backend.Spec) guestapi.Health {
	s.Helper()
	h, err := s.client(sp.Ref()).SetIdentity(s.ctx(), s.newIdentity(sp))
	s.ok("identity", err)
	if h.Identity != sp.UID {
		s.Fatalf("the guest is %q, want %q", h.Identity, sp.UID)
	}
	return h
}

// wantCopied checks a running sandbox, and whether its guest was started with a
// saved memory.
func (s *suite) wantCopied(ref backend.Ref, want bool) {
	s.Helper()
	in, err := s.d.Inspect(s.ctx(), ref)
	s.ok("Inspect", err)
	if in.Power != backend.PowerRunning || in.Copied != want {
		s.Errorf("it is %s (%s), Copied %t, want it running and %t", in.Power, in.Reason, in.Copied, want)
	}
}

// write writes text to a file on the guest's disk, and to one in its memory.
func (s *suite) write(ref backend.Ref, text string) {
	s.Helper()
	if out, code := s.exec(ref, "sh", "-c", fmt.Sprintf("echo %s > %s; echo %s > %s; sync", text, savedFile, text, memoryFile)); code != 0 {
		s.Fatalf("writing in the guest: exit code %d, %q", code, out)
	}
}

// wantFile checks the content of a file in the guest.
func (s *suite) wantFile(ref backend.Ref, path, want string) {
	s.Helper()
	if out, code := s.exec(ref, "cat", path); code != 0 || out != want+"\n" {
		s.Errorf("%s has %q (exit code %d), want %q", path, out, code, want)
	}
}

// wantContinues checks that a guest of an earlier boot answers.
func (s *suite) wantContinues(ref backend.Ref, boot string) {
	s.Helper()
	s.wantPower(ref, backend.PowerRunning)
	if h := s.awaitControl(ref); h.BootID != boot {
		s.Fatalf("boot %q answers, want %q", h.BootID, boot)
	}
}

// fork saves a running sandbox, which continues, and creates another one from the
// snapshot, which does not have what the first one wrote afterwards.
func (s *suite) fork(sp backend.Spec, boot string) {
	ref := sp.Ref()
	s.write(ref, "before")
	uptime := s.awaitControl(ref).Uptime
	snap := s.save(ref, true)
	s.wantContinues(ref, boot)
	s.write(ref, "after")

	child := s.from(2, snap)
	c := child.Ref()
	if !s.createFrom(child) {
		s.ok("DeleteSnapshot", s.saver().DeleteSnapshot(s.ctx(), snap))
		return
	}
	s.wantPower(c, backend.PowerStopped)
	s.ok("DeleteSnapshot", s.saver().DeleteSnapshot(s.ctx(), snap))
	s.ok("Create again", s.d.Create(s.ctx(), child))
	if s.h.Reopen != nil {
		s.reopen()
	}
	for range 2 {
		s.ok("Start", s.d.Start(s.ctx(), c))
		s.wantCopied(c, s.can().Forks)
	}
	switch h := s.awaitControl(c); {
	case !s.can().Forks:
		if h.BootID == boot || h.Identity != "" {
			s.Errorf("without the capability the guest of the snapshot continues: %+v", h)
		}
	case h.BootID != boot || h.Identity != sp.UID || h.Uptime < uptime:
		s.Errorf("the guest has boot %q, identity %q and uptime %s, want those of the snapshot: %q, %q and at least %s",
			h.BootID, h.Identity, h.Uptime, boot, sp.UID, uptime)
	default:
		s.wantFile(c, memoryFile, "before")
	}
	s.identify(child)
	s.wantFile(c, savedFile, "before")
	s.write(c, "child")
	s.wantContinues(ref, boot)
	s.wantFile(ref, savedFile, "after")
	s.wantFile(ref, memoryFile, "after")
	s.ok("Stop", s.d.Stop(s.ctx(), c, 0))
	s.wantPower(c, backend.PowerStopped)
	s.ok("Start after Stop", s.d.Start(s.ctx(), c))
	if h := s.awaitControl(c); h.BootID == boot || h.Identity != "" {
		s.Errorf("after a Stop it does not boot: %+v", h)
	}
	s.wantCopied(c, false)
	s.identify(child)
	s.wantFile(c, savedFile, "child")
	s.ok("Destroy", s.d.Destroy(s.ctx(), c))
	s.wantContinues(ref, boot)
}

// forkKilled kills the VM of a fork before the guest has its identity: the memory
// is lost, and the sandbox does not boot before a Stop.
func (s *suite) forkKilled(ref backend.Ref) {
	if s.h.KillVM == nil || !s.can().Forks {
		s.Skip("skipped: this harness cannot kill a VM, or this driver has no forks")
	}
	snap := s.save(ref, true)
	child := s.from(4, snap)
	c := child.Ref()
	s.createFrom(child)
	s.ok("DeleteSnapshot", s.saver().DeleteSnapshot(s.ctx(), snap))
	s.ok("Start", s.d.Start(s.ctx(), c))
	s.h.KillVM(s.T, c)
	s.eventually("the loss is seen", func() error {
		in, err := s.d.Inspect(s.ctx(), c)
		if err == nil && (in.Power != backend.PowerCrashed || !strings.Contains(in.Reason, "memory is lost")) {
			err = fmt.Errorf("it is %s (%s)", in.Power, in.Reason)
		}
		return err
	})
	for range 2 {
		err := s.d.Start(s.ctx(), c)
		s.wantCode("Start of one that has lost its memory", err, agentlab.CodeConflict)
		if agentlab.HintOf(err) == "" {
			s.Errorf("the error has no hint: %v", err)
		}
	}
	if sus := s.groups().Power; sus != nil {
		s.wantCode("Resume of one that has lost its memory", sus.Resume(s.ctx(), c), agentlab.CodeConflict)
	}
	s.ok("Stop", s.d.Stop(s.ctx(), c, 0))
	s.wantPower(c, backend.PowerStopped)
	s.ok("Destroy", s.d.Destroy(s.ctx(), c))
}

// snapshotSuspended saves a suspended sandbox, which stays suspended.
func (s *suite) snapshotSuspended(ref backend.Ref, boot string) {
	sus := s.groups().Power
	if sus == nil {
		s.Skip("skipped: this driver has no Power")
	}
	suspend := map[string]func() error{"Suspend": func() error { return sus.Suspend(s.ctx(), ref) }}
	if s.can().SuspendToDisk {
		suspend["SuspendToDisk"] = func() error { return sus.SuspendToDisk(s.ctx(), ref) }
	}
	for what, call := range suspend {
		s.write(ref, what)
		s.ok(what, call())
		snap := s.save(ref, true)
		s.wantPower(ref, backend.PowerSuspended)
		s.ok("Resume", sus.Resume(s.ctx(), ref))
		s.wantContinues(ref, boot)
		s.write(ref, "after")
		s.ok(what, call())
		s.ok("RestoreSnapshot of a suspended one", s.saver().RestoreSnapshot(s.ctx(), snap))
		s.continueRestored(ref, boot)
		s.wantFile(ref, savedFile, what)
		s.ok("DeleteSnapshot", s.saver().DeleteSnapshot(s.ctx(), snap))
		s.wantContinues(ref, boot)
	}
}

// snapshotRepeated saves a suspended sandbox several times, then suspends it to
// disk and saves it there: each snapshot and the sandbox continue its guest.
func (s *suite) snapshotRepeated(ref backend.Ref, boot string) {
	sus := s.groups().Power
	if sus == nil {
		s.Skip("skipped: this driver has no Power")
	}
	s.write(ref, "repeated")
	s.ok("Suspend", sus.Suspend(s.ctx(), ref))
	snaps := []backend.SnapshotRef{s.save(ref, true), s.save(ref, true), s.save(ref, true)}
	s.wantPower(ref, backend.PowerSuspended)
	if s.can().SuspendToDisk {
		s.ok("SuspendToDisk of a saved sandbox", sus.SuspendToDisk(s.ctx(), ref))
		s.wantPower(ref, backend.PowerSuspended)
		snaps = append(snaps, s.save(ref, true))
	}
	s.ok("Resume", sus.Resume(s.ctx(), ref))
	s.wantContinues(ref, boot)
	s.wantFile(ref, savedFile, "repeated")
	for i, snap := range slices.Backward(snaps) { // some backends restore only the newest
		if i > 0 { // the first is like that of any suspended sandbox
			s.write(ref, "after")
			s.ok("RestoreSnapshot", s.saver().RestoreSnapshot(s.ctx(), snap))
			s.continueRestored(ref, boot)
			s.wantFile(ref, savedFile, "repeated")
			s.wantFile(ref, memoryFile, "repeated")
		}
		s.ok("DeleteSnapshot", s.saver().DeleteSnapshot(s.ctx(), snap))
	}
	s.wantContinues(ref, boot)
}

// continueRestored continues a sandbox that was restored with its memory.
func (s *suite) continueRestored(ref backend.Ref, boot string) {
	s.Helper()
	in, err := s.d.Inspect(s.ctx(), ref)
	s.ok("Inspect", err)
	switch in.Power {
	case backend.PowerRunning:
	case backend.PowerSuspended:
		s.ok("Resume", s.groups().Power.Resume(s.ctx(), ref))
	default:
		s.Fatalf("after RestoreSnapshot it is %s (%s)", in.Power, in.Reason)
	}
	s.wantContinues(ref, boot)
}

// restore restores a sandbox while it runs and after it was stopped.
func (s *suite) restore(ref backend.Ref, boot string) {
	s.write(ref, "before")
	snap := s.save(ref, true)
	for _, stopped := range []bool{false, true} {
		s.write(ref, "after")
		if stopped {
			s.ok("Stop", s.d.Stop(s.ctx(), ref, 0))
		}
		for range 2 {
			s.ok("RestoreSnapshot", s.saver().RestoreSnapshot(s.ctx(), snap))
		}
		if s.h.Reopen != nil {
			s.reopen()
		}
		s.continueRestored(ref, boot)
		s.wantFile(ref, savedFile, "before")
		s.wantFile(ref, memoryFile, "before")
	}
	s.ok("DeleteSnapshot", s.saver().DeleteSnapshot(s.ctx(), snap))
	s.wantContinues(ref, boot)
}

// crashRunning simulates a crash while a running sandbox is saved or restored.
func (s *suite) crashRunning(ref backend.Ref, boot string, p CrashPoint) {
	s.write(ref, "before")
	snap := backend.SnapshotRef{UID: agentlab.NewUID(), Of: ref}
	save := func() error { _, err := s.saver().SaveSnapshot(s.ctx(), ref, snap.UID); return err }
	if p.Method == MethodRestoreSnapshot {
		s.ok("SaveSnapshot", save())
		s.write(ref, "after")
	}
	p.Arm(s.T)
	if p.Method == MethodSaveSnapshot {
		if err := save(); err == nil {
			s.Fatal("the crash point was not reached")
		}
		s.reopen()
		s.wantContinues(ref, boot)
		s.ok("SaveSnapshot again", save())
		s.wantContinues(ref, boot)
		s.write(ref, "after")
	} else {
		if err := s.saver().RestoreSnapshot(s.ctx(), snap); err == nil {
			s.Fatal("the crash point was not reached")
		}
		s.reopen()
		s.wantKnown(ref)
		if in, err := s.d.Inspect(s.ctx(), ref); err == nil && in.Power == backend.PowerRunning { // as before
			s.wantContinues(ref, boot)
			s.wantFile(ref, savedFile, "after")
		}
	}
	s.ok("RestoreSnapshot", s.saver().RestoreSnapshot(s.ctx(), snap))
	s.continueRestored(ref, boot)
	s.wantFile(ref, savedFile, "before")
	s.wantFile(ref, memoryFile, "before")
	s.ok("DeleteSnapshot", s.saver().DeleteSnapshot(s.ctx(), snap))
}

// restoreStopped restores the disk of a sandbox that was saved while it was
// stopped.
func (s *suite) restoreStopped(ref backend.Ref) {
	s.write(ref, "stopped")
	s.ok("Stop", s.d.Stop(s.ctx(), ref, 0))
	snap := s.save(ref, false)
	s.ok("Start", s.d.Start(s.ctx(), ref))
	s.awaitControl(ref)
	s.write(ref, "later")
	s.ok("RestoreSnapshot", s.saver().RestoreSnapshot(s.ctx(), snap))
	s.wantPower(ref, backend.PowerStopped)
	child := s.from(3, snap)
	restored := []backend.Ref{ref}
	if s.createFrom(child) {
		restored = append(restored, child.Ref())
	}
	for _, r := range restored {
		s.ok("Start", s.d.Start(s.ctx(), r))
		s.awaitControl(r)
		s.wantFile(r, savedFile, "stopped")
	}
	s.ok("Destroy while there is a snapshot", s.d.Destroy(s.ctx(), ref))
	s.wantAbsent(ref)
}
