//go:build linux

package guestd

import (
	"context"
	"net/http"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// The controller freezes the file system of the workspace while it saves the volume.
// It may be killed before it thaws it, so each freeze ends by itself after a time, and
// a new server ends one that the server before it has left.

// ioctls of file systems.
const (
	ioctlFreeze = 0xc0045877 // FIFREEZE, _IOWR('X', 119, int)
	ioctlThaw   = 0xc0045878 // FITHAW, _IOWR('X', 120, int)
)

// freeze is a file system that does not change until it is thawed.
type freeze struct {
	dir *os.File    // its root directory
	end *time.Timer // thaws it
}

func (s *Server) handleFreeze(w http.ResponseWriter, r *http.Request) {
	var req guestapi.FreezeRequest
	if !decode(w, r, &req) {
		return
	}
	if req.Seconds < 1 || req.Seconds > guestapi.MaxFreezeSeconds {
		fail(w, agentlab.Errorf(agentlab.CodeInvalid, "%d seconds is not between 1 and %d", req.Seconds, guestapi.MaxFreezeSeconds))
		return
	}
	s.workMu.Lock()
	defer s.workMu.Unlock()
	s.thaw()
	v, err := lookVolume("/sys/block")
	if err == nil {
		err = s.freeze(r.Context(), v, time.Duration(req.Seconds)*time.Second)
	}
	if err != nil {
		s.log.Warn("the workspace was not frozen", "err", err)
		fail(w, err)
		return
	}
	reply(w, struct{}{})
}

func (s *Server) handleThaw(w http.ResponseWriter, _ *http.Request) {
	s.workMu.Lock()
	defer s.workMu.Unlock()
	reply(w, guestapi.Thawed{Held: s.thaw()})
}

// freeze freezes the file system of a volume that is mounted, for at most limit. The
// caller has locked workMu. If ctx ends it is thawed: the client is gone.
func (s *Server) freeze(ctx context.Context, v volume, limit time.Duration) error {
	dir, err := v.openMounted(s.path(guestapi.WorkspaceDir))
	if err != nil {
		return err
	}
	// Most is written before processes must wait. This can take longer than a client waits.
	err = unix.Syncfs(int(dir.Fd()))
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = dir.Close()
		return agentlab.Errorf(agentlab.CodeInternal, "the workspace cannot be written: %w", err)
	}
	// The timer begins first, and waits for workMu if it ends during the ioctl.
	z := &freeze{dir: dir}
	z.end = time.AfterFunc(limit, func() {
		s.workMu.Lock()
		defer s.workMu.Unlock()
		if s.frozen == z {
			s.log.Warn("the freeze of the workspace ends after its time limit")
			s.thaw()
		}
	})
	if err := unix.IoctlSetInt(int(dir.Fd()), ioctlFreeze, 0); err != nil {
		z.end.Stop()
		_ = dir.Close()
		return agentlab.Errorf(agentlab.CodeConflict, "the file system of the workspace cannot be frozen: %w", err)
	}
	s.frozen = z
	if err := ctx.Err(); err != nil {
		s.thaw()
		return err
	}
	return nil
}

// thaw ends a freeze, and reports whether there was one until now. The caller has
// locked workMu.
func (s *Server) thaw() (held bool) {
	z := s.frozen
	if z == nil {
		return false
	}
	s.frozen = nil
	z.end.Stop()
	err := unix.IoctlSetInt(int(z.dir.Fd()), ioctlThaw, 0)
	if err != nil {
		s.log.Warn("the workspace was no longer frozen", "err", err)
	}
	_ = z.dir.Close()
	return err == nil
}

// thawLeft ends the freeze of a server that was killed.
func (s *Server) thawLeft() {
	s.workMu.Lock()
	defer s.workMu.Unlock()
	v, err := lookVolume("/sys/block")
	if err != nil || s.frozen != nil {
		return
	}
	dir, err := v.openMounted(s.path(guestapi.WorkspaceDir))
	if err != nil {
		return
	}
	defer dir.Close()
	if unix.IoctlSetInt(int(dir.Fd()), ioctlThaw, 0) == nil {
		s.log.Warn("the workspace is thawed, which an earlier server has frozen")
	}
}

// openMounted opens the directory at which the volume is mounted. The result is a
// directory of this volume, whatever else is mounted there at the same time.
func (v volume) openMounted(path string) (*os.File, error) {
	notMounted := agentlab.Errorf(agentlab.CodeConflict, "no workspace is mounted at %s", path)
	if v.dev == "" {
		return nil, notMounted
	}
	var disk, there unix.Stat_t
	if err := unix.Stat(v.dev, &disk); err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "the workspace's disk: %w", err)
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, notMounted
	}
	dir := os.NewFile(uintptr(fd), path)
	if err := unix.Fstat(fd, &there); err != nil || there.Dev != disk.Rdev {
		_ = dir.Close()
		return nil, notMounted
	}
	return dir, nil
}
