//go:build linux

package guestd

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/lock"
)

const (
	maxBackoff   = 30 * time.Second
	maxRunnerLog = 1 << 20 // bytes, per start of the runner
)

// lockEnv is the variable with the file descriptor of the runner's lock.
const lockEnv = "AGENTLAB_RUNNER_LOCK_FD"

// ExitLocked is the exit code of a runner that found another one running.
const ExitLocked = 75

// runnerState ensures that only one loop supervises the runner.
type runnerState struct {
	mu     sync.Mutex
	cancel context.CancelFunc // ends the loop, and not the runner; nil: there is no loop
	done   chan struct{}      // closed when the loop has ended
}

// resumeRunner supervises the runner again if an earlier guestd of this boot
// has started it and it has not ended.
func (s *Server) resumeRunner() {
	if _, err := os.Stat(s.path(bootstrapFile)); err == nil {
		s.startRunner()
	}
}

// startRunner runs the runner until it has succeeded once in this boot.
func (s *Server) startRunner() {
	if _, err := os.Stat(s.path(runnerDone)); err == nil {
		return
	}
	s.runner.mu.Lock()
	defer s.runner.mu.Unlock()
	if s.runner.cancel != nil || s.ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithCancel(s.ctx)
	done := make(chan struct{})
	s.runner.cancel, s.runner.done = cancel, done
	s.wg.Go(func() {
		s.runnerLoop(ctx)
		cancel()
		s.runner.mu.Lock()
		s.runner.cancel = nil
		s.runner.mu.Unlock()
		close(done)
	})
}

// runnerLoop starts the runner again, with growing pauses, until it exits 0.
func (s *Server) runnerLoop(ctx context.Context) {
	pause := s.cfg.Backoff
	for {
		began := time.Now()
		err := s.runRunner(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			if err := s.writeFile(runnerDone, nil, 0o644, 0, 0); err != nil {
				s.log.Error("the runner's end is not noted", "err", err)
			}
			return
		}
		s.log.Warn("the runner ended", "err", err, "next", pause)
		if time.Since(began) > 2*maxBackoff {
			pause = s.cfg.Backoff
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
		pause = min(2*pause, maxBackoff)
	}
}

// runRunner runs the runner once, as the agent's user. When ctx ends, the runner
// continues, and the next guestd waits for it by its lock.
func (s *Server) runRunner(ctx context.Context) error {
	a, err := s.account("")
	if err != nil {
		return err
	}
	lock, err := s.agentFile(runnerLock, os.O_RDWR, a)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	if err := waitLock(ctx, lock); err != nil {
		return err
	}
	log, err := s.agentFile(runnerLog, os.O_WRONLY|os.O_APPEND, a)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	if fi, err := log.Stat(); err == nil && fi.Size() > maxRunnerLog {
		_ = log.Truncate(0)
	}
	if err := s.agentDir(secretsDir, a); err != nil {
		return err
	}
	cmd, err := s.command(guestapi.ExecRequest{Command: s.cfg.Runner, Env: map[string]string{lockEnv: "3"}}, a)
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{lock} // the lock is held until both processes have closed it
	if err := s.startCmd(cmd); err != nil {
		return err
	}
	if err := s.writeFile(runnerPIDFile, []byte(strconv.Itoa(cmd.Process.Pid)+"\n"), 0o644, 0, 0); err != nil {
		s.log.Error("the runner's process is not noted", "err", err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// agentFile opens a file of the server that belongs to the agent's user. Its
// directory is root's, so that the user cannot replace the file.
func (s *Server) agentFile(name string, flags int, a account) (*os.File, error) {
	name = s.path(name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil { //nolint:gosec // all users may read it
		return nil, err
	}
	f, err := os.OpenFile(name, flags|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if os.Geteuid() == 0 {
		if err := f.Chown(int(a.uid), int(a.gid)); err != nil {
			_ = f.Close()
			return nil, err
		}
	}
	return f, nil
}

// agentDir makes a directory that only the agent's user can use.
func (s *Server) agentDir(name string, a account) error {
	name = s.path(name)
	if err := os.MkdirAll(name, 0o700); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return nil
	}
	return os.Lchown(name, int(a.uid), int(a.gid))
}

// waitLock takes the lock on f as soon as it is free.
func waitLock(ctx context.Context, f *os.File) error {
	t := time.NewTicker(200 * time.Millisecond)
	defer t.Stop()
	for {
		if ok, err := lock.TryFile(f); ok || err != nil {
			return err
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// LockRunner makes the calling process the only runner of this guest until it
// ends; its children do not hold the lock. It returns false if another runner
// is alive. A runner that guestd started already has the lock; without guestd,
// the lock is taken if its file can be created.
func LockRunner() bool {
	if fd, err := strconv.Atoi(os.Getenv(lockEnv)); err == nil && fd > 2 {
		unix.CloseOnExec(fd)
		_ = os.Unsetenv(lockEnv)
		return true
	}
	var err error
	if heldLock, err = os.OpenFile(runnerLock, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600); err != nil {
		return true
	}
	ok, err := lock.TryFile(heldLock)
	return ok || err != nil
}

// heldLock keeps the file of LockRunner open until the process ends.
var heldLock *os.File
