package qemu

import (
	"os"

	"golang.org/x/sys/unix"
)

// lockAsSupervisor takes the lock of a sandbox as its supervisor does.
func lockAsSupervisor(f *os.File) error {
	return unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
}
