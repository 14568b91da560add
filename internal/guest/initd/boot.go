//go:build linux

package initd

import (
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// answerWait is how long PID 1 waits for the control server's first
	// answer, identityWait for its first identity. With a controller that
	// waits for the guest, both take only a fraction of it; without one, as
	// in the creation of a template, the boot is delayed by this time.
	answerWait   = 500 * time.Millisecond
	identityWait = 1500 * time.Millisecond
	// settle is how long after the identity the distribution starts. The
	// runner and the agent start in this time. An emulated guest, whose CPUs
	// share one thread of the host, needs about half of it for them.
	settle = 600 * time.Millisecond
)

// earlyGuestd is the control server that is started before anything else, so that it
// starts in parallel while PID 1 finds the root disk. See guestd.boot for its
// side.
type earlyGuestd struct {
	pidfd int
	sock  int
}

// startEarlyGuestd starts the control server from the same file as this process: its
// pages, and an emulator's translations of them, are already cached.
func startEarlyGuestd() (*earlyGuestd, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(pair[1]) }()
	pid, err := syscall.ForkExec("/proc/self/exe", []string{"agent-runner", "guestd", "--boot"}, &syscall.ProcAttr{
		Dir: "/", Env: environment, Files: []uintptr{0, 1, 2, uintptr(pair[1])},
		Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return nil, err
	}
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, err
	}
	return &earlyGuestd{pidfd: pidfd, sock: pair[0]}, nil
}

// release makes the server use the current root.
func (e *earlyGuestd) release() error {
	_, err := unix.Write(e.sock, []byte{'r'})
	return err
}

// wait returns when the server reports its next step or ends, or after limit.
func (e *earlyGuestd) wait(limit time.Duration) {
	tv := unix.NsecToTimeval(limit.Nanoseconds())
	if unix.SetsockoptTimeval(e.sock, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv) != nil {
		return
	}
	for {
		if _, err := unix.Read(e.sock, make([]byte, 1)); err != unix.EINTR {
			return
		}
	}
}

// leaveSupervisor starts the supervisor of the server e. It has its own
// session and no console, so that a later getty cannot send it SIGHUP.
func (e *earlyGuestd) leaveSupervisor() error {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(null) }()
	n := uintptr(null)
	_, err = syscall.ForkExec("/proc/self/exe", []string{"agent-runner", "supervise", "--adopt"}, &syscall.ProcAttr{
		Dir: "/", Env: environment, Files: []uintptr{n, n, n, uintptr(e.pidfd)},
		Sys: &syscall.SysProcAttr{Setsid: true},
	})
	return err
}

// environment is that of the control server and its supervisor. They have no long
// loops, so that the runtime need not interrupt them: its signals are slow under
// emulation.
var environment = []string{
	"HOME=/root", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "GODEBUG=asyncpreemptoff=1",
}

// bootMarks records the time of each step, in milliseconds since the start of the
// kernel.
type bootMarks struct{ text []byte }

func (m *bootMarks) add(step string) {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	m.text = fmt.Appendf(m.text, " %s=%d", step, ts.Nano()/1e6)
}

// log writes the marks to the kernel's log, which dmesg shows.
func (m *bootMarks) log() {
	if f, err := os.OpenFile("/dev/kmsg", os.O_WRONLY, 0); err == nil {
		_, _ = fmt.Fprintf(f, "<6>agent-runner: boot ms:%s\n", m.text)
		_ = f.Close()
	}
}
