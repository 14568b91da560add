//go:build linux

package guestd

import (
	"context"
	"os"
	"os/exec"
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
	parked *runnerProcess     // for the first identity of a template's copy; may be nil
	cancel context.CancelFunc // ends the loop, and not the runner; nil: there is no loop
	began  time.Time          // when the loop began
	staged chan struct{}      // closed when the runner has staged the secrets, or the loop has ended
	done   chan struct{}      // closed when the loop has ended
}

// resumeRunner supervises the runner again if an earlier guestd of this boot
// has started it and it has not ended.
func (s *Server) resumeRunner() {
	if _, err := os.Stat(s.path(bootstrapFile)); err == nil {
		s.startRunner(s.bootstrapped())
	}
}

// startRunner runs the runner until it has succeeded once in this boot. isStaged means
// that an earlier one has staged the secrets.
func (s *Server) startRunner(isStaged bool) {
	if _, err := os.Stat(s.path(runnerDone)); err == nil {
		return
	}
	s.runner.mu.Lock()
	defer s.runner.mu.Unlock()
	if s.runner.cancel != nil || s.ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithCancel(s.ctx)
	done, ready := make(chan struct{}), make(chan struct{})
	s.runner.cancel, s.runner.done, s.runner.staged, s.runner.began = cancel, done, ready, time.Now()
	staged := sync.OnceFunc(func() { close(ready) })
	if isStaged {
		staged()
	}
	s.wg.Go(func() {
		s.runnerLoop(ctx, staged)
		staged()
		cancel()
		s.runner.mu.Lock()
		s.runner.cancel = nil
		s.runner.mu.Unlock()
		close(done)
	})
}

// runnerLoop starts the runner again, with growing pauses, until it exits 0.
func (s *Server) runnerLoop(ctx context.Context, staged func()) {
	pause := s.cfg.Backoff
	for {
		began := time.Now()
		err := s.runRunner(ctx, staged)
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
func (s *Server) runRunner(ctx context.Context, staged func()) error {
	p, err := s.begunRunner(ctx)
	if err != nil {
		return err
	}
	defer p.close()
	go func() {
		if p.wait(gateStaged, 0) == nil {
			staged()
		}
	}()
	done := make(chan error, 1)
	go func() { done <- p.cmd.Wait() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// runnerProcess is a process of the runner.
type runnerProcess struct {
	cmd  *exec.Cmd
	lock *os.File // held until both processes have closed it
	gate *os.File

	stale bool // guarded by runnerState.mu
}

func (p *runnerProcess) close() {
	_ = p.lock.Close()
	_ = p.gate.Close()
}

// launchRunner starts the runner's process with a first request, or parked if that is 0.
func (s *Server) launchRunner(ctx context.Context, request byte) (*runnerProcess, error) {
	a, err := s.account("")
	if err != nil {
		return nil, err
	}
	lock, err := s.agentFile(runnerLock, os.O_RDWR, a)
	if err != nil {
		return nil, err
	}
	p := &runnerProcess{lock: lock}
	if err := s.startRunnerProcess(ctx, p, a, request); err != nil {
		p.close()
		return nil, err
	}
	if err := s.writeFile(runnerPIDFile, []byte(strconv.Itoa(p.cmd.Process.Pid)+"\n"), 0o644, 0, 0); err != nil {
		s.log.Error("the runner's process is not noted", "err", err)
	}
	return p, nil
}

func (s *Server) startRunnerProcess(ctx context.Context, p *runnerProcess, a account, request byte) error {
	if err := waitLock(ctx, p.lock); err != nil {
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
	var theirs *os.File
	if p.gate, theirs, err = gate(); err != nil {
		return err
	}
	defer func() { _ = theirs.Close() }()
	if request != 0 { // before the process could find the gate empty
		if err := p.request(request); err != nil {
			return err
		}
	}
	if p.cmd, err = s.command(guestapi.ExecRequest{Command: s.cfg.Runner, Env: map[string]string{lockEnv: "3", gateEnv: "4"}}, a); err != nil {
		return err
	}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.ExtraFiles = []*os.File{p.lock, theirs}
	return s.startCmd(p.cmd)
}

// agentFile opens a file of the server that belongs to the agent's user. Its
// directory is root's, so that the user cannot replace the file.
func (s *Server) agentFile(name string, flags int, a account) (*os.File, error) {
	name = s.path(name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
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
	if _, ok := inheritedFD(lockEnv); ok {
		return true
	}
	var err error
	if heldLock, err = os.OpenFile(runnerLock, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600); err != nil {
		return true
	}
	ok, err := lock.TryFile(heldLock)
	return ok || err != nil
}

// inheritedFD returns the file descriptor that a variable names, which is for the calling
// process only: programs that it starts get neither.
func inheritedFD(name string) (fd int, ok bool) {
	fd, err := strconv.Atoi(os.Getenv(name))
	if err != nil || fd <= 2 {
		return 0, false
	}
	unix.CloseOnExec(fd)
	_ = os.Unsetenv(name)
	return fd, true
}

// heldLock keeps the file of LockRunner open until the process ends.
var heldLock *os.File
