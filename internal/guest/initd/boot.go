//go:build linux

package initd

import (
	"fmt"
	"os"
	"strconv"
	"strings"
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
	// After the identity, the distribution starts when the guest has been idle for
	// idleWindow, at the latest after settleLimit: the runner, the first command and the
	// agent start before it. An emulated guest, whose CPUs share one thread of the host,
	// takes seconds for both together.
	idleWindow  = 150 * time.Millisecond
	settleLimit = 3 * time.Second
)

// awaitIdle returns when less than an eighth of the time of the guest's CPUs was used
// during window, or after limit. Without times of the CPUs it returns at once.
func awaitIdle(window, limit time.Duration, times func() (busy, all int)) {
	busy, all := times()
	for end := time.Now().Add(limit); all > 0 && time.Now().Before(end); {
		time.Sleep(window)
		nowBusy, nowAll := times()
		if 8*(nowBusy-busy) < nowAll-all {
			return
		}
		busy, all = nowBusy, nowAll
	}
}

// cpuTimes returns the time that the guest's CPUs have been busy, and all their time, in
// ticks. All is 0 if they cannot be read.
func cpuTimes() (busy, all int) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0
	}
	return parseCPUTimes(string(text))
}

func parseCPUTimes(stat string) (busy, all int) {
	line, _, _ := strings.Cut(stat, "\n")
	fields := strings.Fields(line)
	if len(fields) < 6 || fields[0] != "cpu" {
		return 0, 0
	}
	const idle, iowait = 4, 5 // user, nice and system come before; see proc_stat(5)
	for i, f := range fields[1:] {
		n, err := strconv.Atoi(f)
		if err != nil {
			return 0, 0
		}
		all += n
		if i+1 != idle && i+1 != iowait {
			busy += n
		}
	}
	return busy, all
}

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
