package agentcmd

import (
	"errors"

	"golang.org/x/sys/unix"
)

// becomeReaper makes this process the parent of its orphaned descendants.
func becomeReaper() error { return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }

// awaitExit waits until a child has ended, and leaves it for Wait.
func awaitExit(pid int) {
	var info unix.Siginfo
	for errors.Is(unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
	}
}
