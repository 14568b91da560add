package qemu

import "golang.org/x/sys/unix"

// noHugePages disables huge pages for this process and those that it starts.
func noHugePages() { _ = unix.Prctl(unix.PR_SET_THP_DISABLE, 1, 0, 0, 0) }
