package hostcmd

import (
	"errors"

	"golang.org/x/sys/unix"
)

// openProcess returns a descriptor that can be read when the process has ended.
func openProcess(pid int) (int, error) {
	kq, err := unix.Kqueue()
	if err != nil {
		return -1, err
	}
	var exit unix.Kevent_t
	unix.SetKevent(&exit, pid, unix.EVFILT_PROC, unix.EV_ADD)
	exit.Fflags = unix.NOTE_EXIT
	if _, err := unix.Kevent(kq, []unix.Kevent_t{exit}, nil, nil); err != nil {
		return -1, errors.Join(err, unix.Close(kq))
	}
	return kq, nil
}

// inMemory returns false: macOS has no such file system unless an administrator makes
// one.
func inMemory(string) bool { return false }
