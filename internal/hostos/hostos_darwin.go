package hostos

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// BootID identifies the run of the host's kernel; "" means that it is not known.
func BootID() string {
	id, _ := unix.Sysctl("kern.bootsessionuuid")
	return id
}

// SinceBoot returns the time of a clock that cannot be set and that also runs while the
// host is suspended.
func SinceBoot() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC_RAW, &ts) // cannot fail: macOS has it since 10.12
	return time.Duration(ts.Nano())
}

// EndWithParent makes the kernel kill a process when the thread that starts it ends.
// macOS has no such setting, so that the process could be left over: it returns an error
// with code unsupported.
func EndWithParent(*syscall.SysProcAttr) error {
	return Unsupported("a process cannot be bound to the one that starts it")
}
