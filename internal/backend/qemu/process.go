package qemu

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// startUnprivileged starts a process from a thread that lives as long as the
// process: the kernel sends the death signal when the thread that forked ends.
// ended is closed when the process has ended and was waited for. filter is nil
// for a process that maps no saved memory. In the background the process gets the
// least CPU time.
func startUnprivileged(cmd *exec.Cmd, filter *holeFilter, background bool) (ended <-chan struct{}, err error) {
	started, done := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := dropPrivileges()
		if err == nil && background {
			err = os.NewSyscallError("setpriority", unix.Setpriority(unix.PRIO_PROCESS, 0, 19)) // of this thread
		}
		if err == nil && filter != nil {
			if err = filter.install(); err == nil {
				go filter.serve()
			}
		}
		if err == nil {
			err = cmd.Start()
		}
		started <- err
		if err == nil {
			_ = cmd.Wait()
			close(done)
		}
	}()
	return done, <-started
}

// noCore disables core files of a process: its memory contains the guest's
// secrets.
func noCore(pid int) {
	_ = unix.Prlimit(pid, unix.RLIMIT_CORE, &unix.Rlimit{}, nil)
}

// dropPrivileges makes processes that this thread starts run without any
// capability, also as root, and without a way to get one. The thread must not be
// used for anything else afterwards.
func dropPrivileges() error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return os.NewSyscallError("no_new_privs", err)
	}
	for c := uintptr(0); c <= unix.CAP_LAST_CAP; c++ {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		// An older kernel does not know the last ones. A process that may not
		// drop them is not root, or is root in a container that limits it.
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EPERM) {
			return os.NewSyscallError("capbset_drop", err)
		}
	}
	return nil
}

// oomKills returns how many processes this host killed for lack of memory.
func oomKills() uint64 {
	b, _ := os.ReadFile("/proc/vmstat")
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "oom_kill "); ok {
			n, _ := strconv.ParseUint(strings.TrimSpace(v), 10, 64)
			return n
		}
	}
	return 0
}

// signalName returns the name of a signal, e.g. "SIGKILL".
func signalName(s syscall.Signal) string {
	if n := unix.SignalName(s); n != "" {
		return n
	}
	return s.String()
}
