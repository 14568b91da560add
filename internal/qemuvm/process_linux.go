package qemuvm

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// StartUnprivileged starts a process from a thread that lives as long as the
// process: the kernel sends the death signal when the thread that forked ends.
// ended is closed when the process has ended and was waited for. onThread is called
// on this thread after it has dropped its privileges; nil does nothing. In the
// background the process gets the least CPU time.
func StartUnprivileged(cmd *exec.Cmd, onThread func() error, background bool) (ended <-chan struct{}, err error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	started, done := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := dropPrivileges()
		if err == nil && background {
			err = os.NewSyscallError("setpriority", unix.Setpriority(unix.PRIO_PROCESS, 0, 19)) // of this thread
		}
		if err == nil && onThread != nil {
			err = onThread()
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

// NoCore disables core files of a process: its memory contains the guest's
// secrets.
func NoCore(pid int) {
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

// privatePair returns two connected stream sockets that no other child inherits.
func privatePair() ([2]int, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	return pair, os.NewSyscallError("socketpair", err)
}
