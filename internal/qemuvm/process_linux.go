package qemuvm

import "golang.org/x/sys/unix"

// NoCore disables core files of a process: its memory contains the guest's
// secrets.
func NoCore(pid int) {
	_ = unix.Prlimit(pid, unix.RLIMIT_CORE, &unix.Rlimit{}, nil)
}
