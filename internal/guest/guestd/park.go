//go:build linux

package guestd

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// guestd and each runner share a pair of sockets, the gate. The runner begins when it
// has read a byte from it, and writes one when it has staged the secrets.
//
// A template has a parked runner, which has not got its byte: the start of a program
// takes a copy longer than all that the runner does. It writes a byte when it waits,
// and ends if end of file comes instead of its byte.

// gateEnv is the variable with the file descriptor of a runner's gate.
const gateEnv = "AGENTLAB_RUNNER_GATE_FD"

const (
	// parkWait is how long a runner may take to park.
	parkWait = 30 * time.Second
	// stagedWait is how long commands and terminals wait for the secrets after the
	// start of the runner. They then start without.
	stagedWait = 10 * time.Second
)

// gate returns the two ends of a gate.
func gate() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "gate"), os.NewFile(uintptr(fds[1]), "gate"), nil //nolint:gosec // not negative
}

// release lets the runner begin.
func (p *runnerProcess) release() error {
	_, err := p.gate.Write([]byte{1})
	return err
}

// wait waits for the next byte of the runner.
func (p *runnerProcess) wait() error {
	_, err := p.gate.Read(make([]byte, 1))
	return err
}

// kill ends a runner that has not begun.
func (p *runnerProcess) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	p.close()
}

// parkRunner starts a runner that waits for the first identity.
func (s *Server) parkRunner(ctx context.Context) error {
	s.unparkRunner()
	p, err := s.launchRunner(ctx)
	if err != nil {
		return err
	}
	_ = p.gate.SetReadDeadline(time.Now().Add(parkWait))
	if err := p.wait(); err != nil {
		p.kill()
		return fmt.Errorf("the runner does not wait: %w", err)
	}
	_ = p.gate.SetReadDeadline(time.Time{})
	s.runner.mu.Lock()
	defer s.runner.mu.Unlock()
	s.runner.parked = p
	return nil
}

// parkedRunner returns the parked runner after it has begun, nil if there is none.
func (s *Server) parkedRunner() *runnerProcess {
	s.runner.mu.Lock()
	p := s.runner.parked
	s.runner.parked = nil
	s.runner.mu.Unlock()
	if p != nil && p.release() != nil { // it has ended
		p.kill()
		return nil
	}
	return p
}

// unparkRunner ends the parked runner, if there is one.
func (s *Server) unparkRunner() {
	s.runner.mu.Lock()
	p := s.runner.parked
	s.runner.parked = nil
	s.runner.mu.Unlock()
	if p != nil {
		p.kill()
	}
}

// awaitStaged waits until the runner that this server has started has staged the
// secrets, for at most stagedWait after its start, before a process of a starts.
// Users without secrets do not wait.
func (s *Server) awaitStaged(ctx context.Context, a account) {
	if a.name != s.cfg.User {
		return
	}
	s.runner.mu.Lock()
	staged, limit := s.runner.staged, time.Until(s.runner.began.Add(stagedWait))
	s.runner.mu.Unlock()
	if staged == nil || limit <= 0 {
		return
	}
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-staged:
	case <-t.C:
	case <-ctx.Done():
	case <-s.ctx.Done():
	}
}

// AwaitGate waits in a runner until it may begin, and returns a function to call when
// the secrets are staged. If the runner has to wait, it calls ready before. It returns
// false if the runner is not needed. Without guestd it returns at once.
func AwaitGate(ready func()) (staged func(), ok bool) {
	fd, err := strconv.Atoi(os.Getenv(gateEnv))
	if err != nil || fd <= 2 {
		return func() {}, true
	}
	unix.CloseOnExec(fd)
	_ = os.Unsetenv(gateEnv)
	b := []byte{1}
	n, _, err := unix.Recvfrom(fd, b, unix.MSG_DONTWAIT)
	f := os.NewFile(uintptr(fd), "gate")
	if err == unix.EAGAIN { //nolint:errorlint // an errno
		ready()
		if _, err = f.Write(b); err == nil {
			n, err = f.Read(b)
		}
	}
	if err != nil || n != 1 {
		return nil, false
	}
	return func() {
		_, _ = f.Write(b) // an error: guestd has ended
		_ = f.Close()
	}, true
}
