package supervisor

import (
	"context"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
)

// A guest is paused while its host's disk is nearly full: the database needs
// space to end sandboxes, and a guest whose write fails loses data. QEMU itself
// pauses a guest only when no space is left (werror=enospc).

// A guest that fills the disk does not stop the others: each supervisor pauses
// its own guest, once the guest has used its share of the space that was left
// when the disk became nearly full. Supervisors do not know each other, so below
// half of that space all guests are paused, including those that do not write.

// spaceShares is how many guests may use up their shares before all are paused.
const spaceShares = 8

// diskUsage decides when a guest is paused, from the size of the guest's disk on
// the host.
type diskUsage struct {
	limit uint64 // free space, in bytes, below which guests that write are paused
	base  uint64 // size of the guest's disk when at least limit was free last
	known bool
}

// pauseAllThreshold returns the free space, in bytes, below which every guest is paused.
func (u *diskUsage) pauseAllThreshold() uint64 { return u.limit / 2 }

// pauseThreshold reports whether the guest must be paused, and the limit that applies.
// If the size could not be read (err), the guest counts as writing.
func (u *diskUsage) pauseThreshold(free, disk uint64, err error) (below uint64, due bool) {
	if err != nil {
		return u.limit, free < u.limit
	}
	if free >= u.limit || !u.known || disk < u.base {
		u.base, u.known = disk, true
	}
	switch {
	case free < u.pauseAllThreshold():
		return u.pauseAllThreshold(), true
	case free < u.limit && disk-u.base > (u.limit-u.pauseAllThreshold())/spaceShares:
		return u.limit, true
	}
	return 0, false
}

// occupied returns how many bytes files occupy on the host's disk.
func occupied(paths []string) (uint64, error) {
	if len(paths) == 0 {
		return 0, fs.ErrNotExist
	}
	var sum uint64
	for _, path := range paths {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return 0, err
		}
		sum += uint64(st.Blocks) * 512
	}
	return sum, nil
}

// resumeSpace is the free space on the host, in bytes, at which a guest that
// QEMU has paused continues.
const resumeSpace = 64 << 20

// fastestGuest is how much a guest may write in a second, in bytes, for the
// time between two checks of the disk.
const fastestGuest = 2 << 30

// The times between two checks of the disk.
const (
	lookFast = 100 * time.Millisecond
	lookSlow = 2 * time.Second
)

// resumeAbove returns the free space, in bytes, at which a paused guest
// continues. It is above the limit for a pause, so that a guest does not switch
// back and forth.
func (s *supervisor) resumeAbove() uint64 {
	return max(resumeSpace, s.cfg.PauseBelow+s.cfg.PauseBelow/2)
}

// nextLook returns a time in which no guest can reduce free to limit.
func nextLook(free, limit uint64) time.Duration {
	if free <= limit {
		return lookFast
	}
	left := min(free-limit, 2*fastestGuest) // more does not matter
	return min(max(time.Duration(left)*time.Second/fastestGuest, lookFast), lookSlow)
}

// watchSpace pauses the guest while the host's disk is nearly full.
func (s *supervisor) watchSpace() {
	t := time.NewTimer(0)
	defer t.Stop()
	u := diskUsage{limit: s.cfg.PauseBelow}
	for {
		select {
		case <-s.vm.Done():
			return
		case <-t.C:
		}
		t.Reset(s.checkSpace(&u))
	}
}

// checkSpace checks the disk once and returns when to check again.
func (s *supervisor) checkSpace(u *diskUsage) time.Duration {
	bytes, err := hostspace.FreeBytes(s.dir)
	if err != nil {
		return lookSlow // writers get the error
	}
	free := uint64(bytes)
	disk, err := occupied(s.vm.Disks())
	below, due := u.pauseThreshold(free, disk, err)
	s.mu.Lock()
	paused := s.paused != ""
	s.mu.Unlock()
	switch {
	case !paused && due:
		s.control(fmt.Sprintf("the host's disk has %d MiB free, less than %d", free>>20, below>>20))
	case paused && free >= s.resumeAbove():
		s.control("")
	case paused:
		s.notePaused()
	}
	return nextLook(free, s.cfg.PauseBelow)
}

// control stops the guest's CPUs and records why; with "" it continues them,
// unless the guest is suspended. The VM reports when they run. A failure is
// retried with the next check. It continues no VM that starts or ends: a
// guest that was saved for good must not run again.
func (s *supervisor) control(why string) {
	s.cpuMu.Lock()
	defer s.cpuMu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	act, name := s.vm.Continue, "continue"
	s.mu.Lock()
	phase, suspended := s.state.Phase, s.state.Suspended
	s.mu.Unlock()
	switch {
	case why == "" && phase != phaseRunning:
		return
	case why != "":
		act, name = s.vm.Pause, "pause"
		s.setPaused(why)
	case suspended:
		s.setPaused("")
		return
	}
	err := act(ctx)
	s.log.Info("disk space", "action", name, "why", why, "err", err)
	if err != nil && why != "" {
		s.setPaused("")
	}
}

// setPaused records why the guest's CPUs are stopped; "" means that they run.
func (s *supervisor) setPaused(why string) {
	s.mu.Lock()
	s.paused = why
	s.mu.Unlock()
	s.notePaused()
}

// notePaused writes the state of the guest's CPUs to state.json. On a full disk
// it may fail; the next check retries it.
func (s *supervisor) notePaused() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state.Paused == s.paused || s.state.Phase == "" {
		return
	}
	st := s.state
	st.Paused, st.Changed = s.paused, time.Now().UTC()
	if err := durable.ReplaceJSON(filepath.Join(s.dir, fileState), st, durable.None); err != nil {
		s.log.Warn("the pause was not recorded", "err", err)
		return
	}
	s.state = st
}
