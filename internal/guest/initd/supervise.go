//go:build linux

package initd

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/guest/guestd"
)

const (
	minPause = 100 * time.Millisecond
	maxPause = 5 * time.Second
	// settled is how long guestd must have run before the restart pause is
	// reset.
	settled = time.Minute
)

// Supervise starts the control server again whenever it ends. With adopt, it
// begins with the server whose pidfd is file descriptor 3. It does not return.
func Supervise(adopt bool) int {
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-950"), 0o600)
	if adopt { // once in each boot; growing a big disk takes longer than the start of a sandbox
		if _, err := guestd.Grow("/", 0, 0); err != nil {
			_, _ = fmt.Fprintf(guestd.Console{}, "the root file system does not fill its disk: %v\n", err)
		}
	}
	pause := minPause
	for {
		began := time.Now()
		var err error
		if adopt {
			adopt = false
			waitPidfd(3)
		} else {
			err = runGuestd()
		}
		if time.Since(began) > settled {
			pause = minPause
		}
		_, _ = fmt.Fprintf(guestd.Console{}, "guestd ended (%v), starting it again\n", err)
		time.Sleep(pause)
		pause = min(2*pause, maxPause)
	}
}

func runGuestd() error {
	cmd := &exec.Cmd{
		Path: "/proc/self/exe", Args: []string{"agent-runner", "guestd"},
		Stderr:      guestd.Console{}, // where a panic is printed
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	return cmd.Run()
}

// waitPidfd returns when the process of a pidfd has ended, and closes it.
func waitPidfd(fd int) {
	defer func() { _ = unix.Close(fd) }()
	unix.CloseOnExec(fd)
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
		if n > 0 || (err != nil && err != unix.EINTR) {
			return
		}
	}
}
