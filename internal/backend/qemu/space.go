package qemu

import (
	"context"
	"fmt"
	"path/filepath"
	"time"
)

// A guest is paused while its host's disk is nearly full: the database needs
// room to end sandboxes, and a guest whose write fails loses data. QEMU itself
// pauses one only when nothing is free at all (werror=enospc).

// resumeSpace is what must be free on the host, in bytes, before a guest goes
// on that QEMU paused.
const resumeSpace = 64 << 20

// fastestGuest is how much a guest may write in a second, in bytes, for the
// time between two looks at the disk.
const fastestGuest = 2 << 30

// The times between two looks at the disk.
const (
	lookFast = 100 * time.Millisecond
	lookSlow = 2 * time.Second
)

// resumeAbove returns the free space, in bytes, at which a paused guest goes
// on: more than where it is paused, so that it does not stutter.
func (s *shim) resumeAbove() uint64 { return max(resumeSpace, s.cfg.PauseBelow+s.cfg.PauseBelow/2) }

// nextLook returns how long no guest can bring free down to limit.
func nextLook(free, limit uint64) time.Duration {
	if free <= limit {
		return lookFast
	}
	left := min(free-limit, 2*fastestGuest)                                           // more does not matter
	return min(max(time.Duration(left)*time.Second/fastestGuest, lookFast), lookSlow) //nolint:gosec // bounded above
}

// watchSpace pauses the guest while the host's disk is nearly full.
func (s *shim) watchSpace() {
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-s.vm.done:
			return
		case <-t.C:
		}
		t.Reset(s.checkSpace())
	}
}

// checkSpace looks at the disk once and returns when to look again.
func (s *shim) checkSpace() time.Duration {
	free, err := freeBytes(s.dir)
	if err != nil {
		return lookSlow // what writes to it finds out what is wrong
	}
	s.mu.Lock()
	paused, q := s.paused != "", s.qmp
	s.mu.Unlock()
	switch {
	case q == nil:
	case !paused && free < s.cfg.PauseBelow:
		s.control(q, "stop", free)
	case paused && free >= s.resumeAbove():
		s.control(q, "cont", free)
	case paused:
		s.notePaused()
	}
	return nextLook(free, s.cfg.PauseBelow)
}

// control stops the guest's CPUs or lets them go on. QEMU reports with events
// that they do; what fails is tried again with the next look.
func (s *shim) control(q *qmp, command string, free uint64) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if command == "stop" {
		s.setPaused(fmt.Sprintf("the host's disk has %d MiB free, less than %d", free>>20, s.cfg.PauseBelow>>20))
	}
	err := q.execute(ctx, command, nil, nil)
	s.log.Info("disk space", "command", command, "free_mib", free>>20, "err", err)
	if err != nil && command == "stop" {
		s.setPaused("")
	}
}

// setPaused notes why the guest's CPUs are stopped; "" means that they run.
func (s *shim) setPaused(why string) {
	s.mu.Lock()
	s.paused = why
	s.mu.Unlock()
	s.notePaused()
}

// notePaused brings state.json up to what is known of the guest's CPUs. On a
// full disk it may fail, and is tried again with the next look.
func (s *shim) notePaused() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state.Paused == s.paused || s.state.Phase == "" {
		return
	}
	st := s.state
	st.Paused, st.Changed = s.paused, time.Now().UTC()
	if err := noteJSON(filepath.Join(s.dir, fileState), st); err != nil {
		s.log.Warn("the pause was not noted", "err", err)
		return
	}
	s.state = st
}
