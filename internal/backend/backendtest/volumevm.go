package backendtest

import (
	"fmt"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// volumeScript is the default of VolumeHarness.VolumeCommand. It reads the first and
// the last sector past the caches of the guest.
const volumeScript = `
for d in /sys/block/*; do
  [ "$(cat $d/serial 2>/dev/null)" = ` + backend.VolumeSerial + ` ] && [ "$(cat $d/size)" != 0 ] && n=${d##*/}
done
[ -n "$n" ] || exit 3
case $1 in
write) printf %s "$2" | dd of=/dev/$n bs=512 conv=sync,fsync 2>/dev/null ;;
size)  echo $(($(cat /sys/block/$n/size) * 512)) ;;
read)  for at in 0 $(($(cat /sys/block/$n/size) - 1)); do
         dd if=/dev/$n bs=512 skip=$at count=1 iflag=direct 2>/dev/null | tr -d '\0'
       done ;;
esac`

// volumeCommand runs a command of VolumeHarness.VolumeCommand in a guest.
func (s *suite) volumeCommand(ref backend.Ref, args ...string) (string, int) {
	s.Helper()
	argv := append([]string{"sh", "-c", volumeScript, "volume"}, args...)
	if s.h.VolumeCommand != nil {
		argv = s.h.VolumeCommand(args...)
	}
	out, code := s.execAs(ref, "root", argv...)
	return strings.TrimSpace(out), code
}

func (s *suite) writeVolume(ref backend.Ref, text string) {
	s.Helper()
	if out, code := s.volumeCommand(ref, "write", text); code != 0 {
		s.Fatalf("writing to the volume: exit code %d, %q", code, out)
	}
	s.wantContent(ref, text)
}

// wantContent checks what the guest reads from its volume.
func (s *suite) wantContent(ref backend.Ref, want string) {
	s.Helper()
	if out, code := s.volumeCommand(ref, "read"); code != 0 || out != want {
		s.Fatalf("the volume has %q (exit code %d), want %q", out, code, want)
	}
}

// wantDisk waits until the guest has a volume of gb GiB; with 0, none.
func (s *suite) wantDisk(ref backend.Ref, gb int) {
	s.Helper()
	s.eventually(fmt.Sprintf("the guest has a volume of %d GiB", gb), func() error {
		out, code := s.volumeCommand(ref, "size")
		if gb == 0 && code == 3 || gb > 0 && code == 0 && out == fmt.Sprint(int64(gb)<<30) {
			return nil
		}
		return fmt.Errorf("exit code %d, size %q", code, out)
	})
}

// hotplug reports whether volumes are attached to running sandboxes.
func (s *suite) hotplug() bool { return s.can().VolumeHotplug }

// halted calls fn while the sandbox is stopped, if the driver has no hotplug.
func (s *suite) halted(ref backend.Ref, fn func()) {
	s.Helper()
	if s.hotplug() {
		fn()
		return
	}
	s.ok("Stop", s.d.Stop(s.ctx(), ref, 0))
	fn()
	s.ok("Start", s.d.Start(s.ctx(), ref))
	s.awaitControl(ref)
}

// plug attaches a volume of gb GiB to a running sandbox, and unplug detaches it.
func (s *suite) plug(ref backend.Ref, v backend.VolumeRef, gb int) {
	s.Helper()
	s.halted(ref, func() { s.ok("AttachVolume", s.vols().AttachVolume(s.ctx(), ref, v)) })
	s.wantVolume(v, gb, ref.UID)
	s.wantDisk(ref, gb)
}

func (s *suite) unplug(ref backend.Ref, v backend.VolumeRef) {
	s.Helper()
	s.halted(ref, func() { s.ok("DetachVolume", s.vols().DetachVolume(s.ctx(), ref, v)) })
	s.wantDisk(ref, 0)
}

// contentIs checks what is in a volume that is not attached.
func (s *suite) contentIs(ref backend.Ref, v backend.VolumeRef, gb int, want string) {
	s.Helper()
	s.plug(ref, v, gb)
	s.wantContent(ref, want)
	s.unplug(ref, v)
}

// volumesRunning tests what is in volumes, with running sandboxes.
func (s *suite) volumesRunning() {
	if s.cfg.NoVM != "" {
		s.Skip("skipped: " + s.cfg.NoVM)
	}
	s.keeper()
	one := s.create(1)
	ref, v := one.Ref(), s.volume(1)
	s.ok("Start", s.d.Start(s.ctx(), ref))
	s.awaitControl(ref)
	s.identify(one)
	s.wantDisk(ref, 0)
	s.sub("Attach", func(s *suite) { s.volumeHotplug(one, v) })
	s.sub("Snapshot", func(s *suite) { s.volumeContent(ref, v) })
	s.sub("Grow", func(s *suite) { s.volumeGrown(ref) })
	s.sub("CrashPoints", func(s *suite) {
		for _, p := range s.h.CrashPoints {
			switch p.Method {
			case MethodAttachVolume, MethodDetachVolume, MethodGrowVolume, MethodSnapshotVolume, MethodRestoreVolume, MethodCloneVolume:
			default:
				continue // volumeCrash
			}
			if p.Method == MethodAttachVolume || p.Method == MethodDetachVolume || s.hotplug() {
				s.sub(fmt.Sprintf("%s/%s", p.Method, p.Name), func(s *suite) { s.volumeCrashRunning(ref, p) })
			}
		}
	})
	s.sub("Suspend", func(s *suite) { s.volumeSuspended(ref, v) })
	s.sub("Killed", func(s *suite) { s.volumeKilled(ref, v) })
	s.sub("Destroy", func(s *suite) { s.volumeMoved(ref, v) })
}

// volumeHotplug attaches a volume to a running sandbox, and detaches it.
func (s *suite) volumeHotplug(sp backend.Spec, v backend.VolumeRef) {
	ref := sp.Ref()
	if !s.hotplug() {
		s.conflict("AttachVolume to a running sandbox", s.vols().AttachVolume(s.ctx(), ref, v))
		s.wantVolume(v, 1, "")
	}
	s.plug(ref, v, 1)
	s.wantContent(ref, "")
	s.ok("AttachVolume again", s.vols().AttachVolume(s.ctx(), ref, v))
	s.wantDisk(ref, 1)
	s.writeVolume(ref, "first")
	s.attachedIsKept(sp, v)
	other := s.volume(1)
	s.conflict("AttachVolume of a second one", s.vols().AttachVolume(s.ctx(), ref, other))
	s.ok("DetachVolume of another volume", s.vols().DetachVolume(s.ctx(), ref, other))
	s.wantContent(ref, "first")
	if s.h.Reopen != nil {
		s.reopen()
	}
	if !s.hotplug() {
		s.conflict("DetachVolume from a running sandbox", s.vols().DetachVolume(s.ctx(), ref, v))
		s.wantContent(ref, "first")
	}
	s.unplug(ref, v)
	s.ok("DetachVolume again", s.vols().DetachVolume(s.ctx(), ref, v))
	s.contentIs(ref, other, 1, "")
	s.contentIs(ref, v, 1, "first")
}

// volumeContent tests what is in a volume after it was saved, restored and cloned.
func (s *suite) volumeContent(ref backend.Ref, v backend.VolumeRef) {
	d, ok := s.snaps()
	if !ok {
		s.Skip("skipped: the storage has no snapshots")
	}
	s.plug(ref, v, 1)
	s.writeVolume(ref, "saved")
	var snap backend.VolumeSnapshotRef
	if s.can().AttachedVolumeSnapshots {
		snap = s.saveVolume(v, 1)
		s.wantContent(ref, "saved")
	} else {
		s.unplug(ref, v)
		snap = s.saveVolume(v, 1)
		s.plug(ref, v, 1)
	}
	s.writeVolume(ref, "later")
	old := backend.VolumeRef{UID: agentlab.NewUID()}
	_, err := d.CloneVolumeSnapshot(s.ctx(), snap, old.UID)
	hasOld := err == nil
	if !hasOld {
		s.wantCode("CloneVolumeSnapshot", err, agentlab.CodeUnsupported)
	}
	s.unplug(ref, v)
	clone := backend.VolumeRef{UID: agentlab.NewUID()}
	_, err = d.CloneVolume(s.ctx(), v, clone.UID)
	s.ok("CloneVolume", err)
	s.contentIs(ref, v, 1, "later")
	if hasOld {
		s.plug(ref, old, 1)
		s.wantContent(ref, "saved")
		s.writeVolume(ref, "old")
		s.unplug(ref, old)
	}
	s.plug(ref, clone, 1)
	s.wantContent(ref, "later")
	s.writeVolume(ref, "clone")
	s.unplug(ref, clone)
	for range 2 {
		s.ok("RestoreVolume", d.RestoreVolume(s.ctx(), snap))
		s.plug(ref, v, 1)
		s.wantContent(ref, "saved")
		s.writeVolume(ref, "again")
		s.unplug(ref, v)
	}
	s.ok("DeleteVolumeSnapshot", d.DeleteVolumeSnapshot(s.ctx(), snap))
	s.contentIs(ref, v, 1, "again")
	if hasOld {
		s.contentIs(ref, old, 1, "old")
	}
	s.contentIs(ref, clone, 1, "clone")
}

// volumeGrown tests what is in a volume that has grown.
func (s *suite) volumeGrown(ref backend.Ref) {
	v := s.volume(1)
	s.plug(ref, v, 1)
	s.writeVolume(ref, "small")
	s.unplug(ref, v)
	s.ok("GrowVolume", s.vols().GrowVolume(s.ctx(), v, 3))
	s.contentIs(ref, v, 3, "small")
	if d, ok := s.snaps(); ok {
		snap := s.saveVolume(v, 3)
		s.ok("GrowVolume", s.vols().GrowVolume(s.ctx(), v, 5))
		s.plug(ref, v, 5)
		s.writeVolume(ref, "large")
		s.unplug(ref, v)
		s.ok("RestoreVolume", d.RestoreVolume(s.ctx(), snap))
		s.contentIs(ref, v, 3, "small")
	}
}

// volumeCrashRunning simulates a crash in a method, and checks what is in the volume
// before and after the method was called again.
func (s *suite) volumeCrashRunning(ref backend.Ref, p CrashPoint) {
	v := s.volume(1)
	snap, fresh := backend.VolumeSnapshotRef{UID: agentlab.NewUID(), Of: v}, backend.VolumeRef{UID: agentlab.NewUID()}
	calls := s.volumeCalls(ref, v, snap, fresh.UID)
	call := calls[p.Method]
	if call == nil {
		s.Skip("skipped: the storage has no snapshots")
	}
	want, gb := s.volumeBefore(ref, v, p.Method, calls[MethodSnapshotVolume]), 1
	if !s.hotplug() {
		s.ok("Stop", s.d.Stop(s.ctx(), ref, 0))
	}
	p.Arm(s.T)
	if err := call(); err == nil {
		s.Fatal("the crash point was not reached")
	}
	s.reopen()
	calls = s.volumeCalls(ref, v, snap, fresh.UID)
	call = calls[p.Method]
	l := s.volumeListed(v)
	if l == nil {
		s.Fatal("the volume is lost")
	}
	switch p.Method {
	case MethodAttachVolume, MethodDetachVolume:
		s.wantDiskAfter(ref, v, p.Method, call)
		return
	case MethodRestoreVolume:
		if !l.Partial {
			s.plug(ref, v, 1)
			if out, code := s.volumeCommand(ref, "read"); code != 0 || out != "saved" && out != "later" {
				s.Errorf("the volume has %q, want what it had or what the snapshot has", out)
			}
			s.unplug(ref, v)
		}
		want = "saved"
	default:
		gb = l.SizeGB
		s.contentIs(ref, v, gb, want)
	}
	s.ok(string(p.Method)+" again", call())
	if p.Method == MethodGrowVolume {
		gb = 2
	}
	s.contentIs(ref, v, gb, want)
	switch p.Method {
	case MethodCloneVolume:
		s.contentIs(ref, fresh, 1, "saved")
	case MethodSnapshotVolume:
		s.plug(ref, v, 1)
		s.writeVolume(ref, "more")
		s.unplug(ref, v)
		s.ok("RestoreVolume", calls[MethodRestoreVolume]())
		s.contentIs(ref, v, 1, "saved")
	default:
	}
}

// volumeBefore writes to a volume what it has before a call of method, which it
// returns. Only before DetachVolume the volume is attached then.
func (s *suite) volumeBefore(ref backend.Ref, v backend.VolumeRef, method Method, save func() error) string {
	s.Helper()
	s.plug(ref, v, 1)
	s.writeVolume(ref, "saved")
	if method == MethodDetachVolume {
		return "saved"
	}
	s.unplug(ref, v)
	if method != MethodRestoreVolume {
		return "saved"
	}
	s.ok("SnapshotVolume", save())
	s.plug(ref, v, 1)
	s.writeVolume(ref, "later")
	s.unplug(ref, v)
	return "later"
}

// wantDiskAfter completes an interrupted AttachVolume or DetachVolume.
func (s *suite) wantDiskAfter(ref backend.Ref, v backend.VolumeRef, method Method, call func() error) {
	s.Helper()
	s.ok(string(method)+" again", call())
	if !s.hotplug() {
		s.ok("Start", s.d.Start(s.ctx(), ref))
		s.awaitControl(ref)
	}
	if method == MethodAttachVolume {
		s.wantVolume(v, 1, ref.UID)
		s.wantDisk(ref, 1)
		s.wantContent(ref, "saved")
		s.unplug(ref, v)
		return
	}
	s.wantVolume(v, 1, "")
	s.wantDisk(ref, 0)
	s.contentIs(ref, v, 1, "saved")
}

// volumeSuspended suspends a sandbox with a volume.
func (s *suite) volumeSuspended(ref backend.Ref, v backend.VolumeRef) {
	sus := s.groups().Power
	if sus == nil {
		s.Skip("skipped: this driver has no Power")
	}
	other := s.volume(1)
	suspend := map[string]func() error{"Suspend": func() error { return sus.Suspend(s.ctx(), ref) }}
	if s.can().SuspendToDisk {
		suspend["SuspendToDisk"] = func() error { return sus.SuspendToDisk(s.ctx(), ref) }
	}
	for what, call := range suspend {
		s.ok(what, call())
		s.conflict("AttachVolume to a suspended sandbox", s.vols().AttachVolume(s.ctx(), ref, other))
		s.ok("Resume", sus.Resume(s.ctx(), ref))
		s.awaitControl(ref)
		s.wantDisk(ref, 0)
		s.plug(ref, v, 1)
		boot := s.awaitControl(ref).BootID
		s.writeVolume(ref, what)
		s.ok(what, call())
		s.conflict("DetachVolume from a suspended sandbox", s.vols().DetachVolume(s.ctx(), ref, v))
		s.wantVolume(v, 1, ref.UID)
		if d, ok := s.snaps(); ok && s.can().AttachedVolumeSnapshots {
			s.ok("DeleteVolumeSnapshot", d.DeleteVolumeSnapshot(s.ctx(), s.saveVolume(v, 1)))
		}
		s.ok("Resume", sus.Resume(s.ctx(), ref))
		s.wantContinues(ref, boot)
		s.wantVolume(v, 1, ref.UID)
		s.wantContent(ref, what)
		s.writeVolume(ref, what+" resumed")
		s.unplug(ref, v)
		s.contentIs(ref, v, 1, what+" resumed")
	}
}

// volumeKilled kills the VM of a sandbox with a volume, and starts it again.
func (s *suite) volumeKilled(ref backend.Ref, v backend.VolumeRef) {
	s.plug(ref, v, 1)
	s.writeVolume(ref, "killed")
	if s.h.KillVM != nil {
		s.h.KillVM(s.T, ref)
		s.eventually("it is crashed", func() error {
			in, err := s.d.Inspect(s.ctx(), ref)
			if err == nil && in.Power != backend.PowerCrashed {
				err = fmt.Errorf("it is %s", in.Power)
			}
			return err
		})
	} else {
		s.ok("Stop", s.d.Stop(s.ctx(), ref, 0))
	}
	s.wantVolume(v, 1, ref.UID)
	s.ok("Start", s.d.Start(s.ctx(), ref))
	s.awaitControl(ref)
	s.wantDisk(ref, 1)
	s.wantContent(ref, "killed")
}

// volumeMoved destroys a running sandbox with its volume attached. Another one gets
// the volume before its first start.
func (s *suite) volumeMoved(ref backend.Ref, v backend.VolumeRef) {
	s.writeVolume(ref, "moved")
	s.ok("Destroy", s.d.Destroy(s.ctx(), ref))
	s.wantVolume(v, 1, "")
	next := s.create(2).Ref()
	s.ok("AttachVolume", s.vols().AttachVolume(s.ctx(), next, v))
	s.ok("Start", s.d.Start(s.ctx(), next))
	s.awaitControl(next)
	s.wantDisk(next, 1)
	s.wantContent(next, "moved")
	s.writeVolume(next, "next")
	s.ok("Stop", s.d.Stop(s.ctx(), next, 0))
	s.ok("DetachVolume", s.vols().DetachVolume(s.ctx(), next, v))
	s.ok("Start", s.d.Start(s.ctx(), next))
	s.awaitControl(next)
	s.wantDisk(next, 0)
	s.contentIs(next, v, 1, "next")
}
