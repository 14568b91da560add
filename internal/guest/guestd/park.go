//go:build linux

package guestd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// guestd and each runner share a pair of sockets, the gate. The runner reads requests
// of one byte from it: to remove what another runner has staged, which it answers, and
// to begin. It writes a byte when it has staged the secrets. At the end of file it
// ends, unless it has begun.
//
// A runner without a request is parked, and writes a byte when it waits. A template has
// a parked runner, because the start of a program takes a copy longer than all that the
// runner does.

// gateEnv is the variable with the file descriptor of a runner's gate.
const gateEnv = "AGENTLAB_RUNNER_GATE_FD"

// Bytes on the gate.
const (
	gateWipe   = 'w' // to the runner
	gateBegin  = 'b'
	gateParked = 'p' // from the runner
	gateWiped  = 'd'
	gateFailed = 'f' // to wipe everything
	gateStaged = 's'
)

// parkWait is how long a runner may take to park.
const parkWait = 30 * time.Second

// gate returns the two ends of a gate.
func gate() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "gate"), os.NewFile(uintptr(fds[1]), "gate"), nil
}

// request sends a byte to the runner.
func (p *runnerProcess) request(b byte) error {
	_, err := p.gate.Write([]byte{b})
	return err
}

// wait waits for a byte of the runner, up to limit unless that is 0.
func (p *runnerProcess) wait(want byte, limit time.Duration) error {
	var end time.Time
	if limit > 0 {
		end = time.Now().Add(limit)
	}
	_ = p.gate.SetReadDeadline(end)
	b := []byte{0}
	if _, err := p.gate.Read(b); err != nil {
		return err
	}
	if b[0] != want {
		return fmt.Errorf("the runner answers %q", b)
	}
	return nil
}

// kill ends a runner that has not begun. It waits for its end up to endWait: a process
// that is traced can stay.
func (p *runnerProcess) kill() {
	_ = p.cmd.Process.Kill()
	ended := waitAsync(p.cmd)
	select {
	case <-ended:
	case <-time.After(endWait):
	}
	p.close()
}

// parkRunner starts a runner that waits for the first identity.
func (s *Server) parkRunner(ctx context.Context) error {
	s.unparkRunner()
	p, err := s.launchRunner(ctx, 0)
	if err != nil {
		return err
	}
	if err := p.wait(gateParked, parkWait); err != nil {
		p.kill()
		return fmt.Errorf("the runner does not wait: %w", err)
	}
	s.setParked(p)
	return nil
}

func (s *Server) setParked(p *runnerProcess) (old *runnerProcess) {
	s.runner.mu.Lock()
	defer s.runner.mu.Unlock()
	old, s.runner.parked = s.runner.parked, p
	return old
}

// begunRunner returns a runner that has begun: the parked one, or a new one.
func (s *Server) begunRunner(ctx context.Context) (*runnerProcess, error) {
	if p := s.setParked(nil); p != nil {
		if !p.stale && p.request(gateBegin) == nil {
			return p, nil
		}
		p.kill()
	}
	return s.launchRunner(ctx, gateBegin)
}

// staleParked makes the parked runner useless. From its identity on, a user of the
// sandbox can stop the process, or change the groups and the environment that it has
// got already. It stays until the lock is needed, because its end takes longer.
func (s *Server) staleParked() {
	s.runner.mu.Lock()
	defer s.runner.mu.Unlock()
	if s.runner.parked != nil {
		s.runner.parked.stale = true
	}
}

// unparkRunner ends the parked runner, if there is one.
func (s *Server) unparkRunner() {
	if p := s.setParked(nil); p != nil {
		p.kill()
	}
}

// wipeSecrets removes what the runner of another identity has staged: a new runner, as
// the agent's user, removes what is in the home of this user. It is parked then.
func (s *Server) wipeSecrets() error {
	dir := s.path(secretsDir)
	if left, err := os.ReadDir(dir); len(left) == 0 && (err == nil || errors.Is(err, fs.ErrNotExist)) {
		return nil
	}
	a, err := s.account("")
	if err != nil {
		return err
	}
	if err := s.parkWiper(); err != nil {
		s.log.Warn("links to removed secrets may be left", "err", err)
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	return s.agentDir(secretsDir, a)
}

func (s *Server) parkWiper() error {
	s.unparkRunner()
	ctx, cancel := context.WithTimeout(s.ctx, endWait)
	defer cancel()
	p, err := s.launchRunner(ctx, gateWipe)
	if err != nil {
		return err
	}
	if err := p.wait(gateWiped, endWait); err != nil {
		p.kill()
		return err
	}
	s.setParked(p)
	return nil
}

// bootstrapped reports whether a runner has its answer to the token.
func (s *Server) bootstrapped() bool {
	_, err := os.Stat(s.path(filepath.Join(secretsDir, bootstrapDoc)))
	return err == nil
}

// awaitStaged waits until the runner that this server has started has staged the
// secrets, for at most StagedWait after its start, before a process of a starts.
// Users without secrets do not wait.
func (s *Server) awaitStaged(ctx context.Context, a account) {
	if a.name != s.cfg.User {
		return
	}
	s.runner.mu.Lock()
	staged, limit := s.runner.staged, time.Until(s.runner.began.Add(s.cfg.StagedWait))
	s.runner.mu.Unlock()
	if staged == nil || limit <= 0 {
		return
	}
	select {
	case <-staged:
	case <-time.After(limit):
	case <-ctx.Done():
	case <-s.ctx.Done():
	}
}

// AwaitGate waits in a runner until it may begin, and returns a function to call when
// the secrets are staged. It calls rehearse before it waits for the first request, and
// wipe if another runner's secrets have to be removed. It returns false if the runner
// is not needed. Without guestd it returns at once.
func AwaitGate(rehearse func(), wipe func() error) (staged func(), ok bool) {
	fd, ok := inheritedFD(gateEnv)
	if !ok {
		return func() {}, true
	}
	b := []byte{0}
	n, _, err := unix.Recvfrom(fd, b, unix.MSG_DONTWAIT)
	f := os.NewFile(uintptr(fd), "gate")
	answer := func(b byte) { _, _ = f.Write([]byte{b}) } // an error: guestd has ended
	if errors.Is(err, unix.EAGAIN) {
		rehearse()
		answer(gateParked)
		n, err = f.Read(b)
	}
	for err == nil && n == 1 && b[0] == gateWipe {
		if wipe() == nil {
			answer(gateWiped)
		} else {
			answer(gateFailed)
		}
		n, err = f.Read(b)
	}
	if err != nil || n != 1 || b[0] != gateBegin {
		return nil, false
	}
	return func() {
		answer(gateStaged)
		_ = f.Close()
	}, true
}
