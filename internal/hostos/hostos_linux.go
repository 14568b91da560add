package hostos

import (
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// BootID identifies the run of the host's kernel; "" means that it is not known.
func BootID() string {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b))
}

// SinceBoot returns the time of a clock that cannot be set and that also runs while the
// host is suspended.
func SinceBoot() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) // cannot fail: Linux has it since 2.6.39
	return time.Duration(ts.Nano())
}

// EndWithParent makes the kernel kill a process when the thread that starts it ends. The
// caller locks that thread.
func EndWithParent(attr *syscall.SysProcAttr) error {
	attr.Pdeathsig = syscall.SIGKILL
	return nil
}
