package runner

import (
	"errors"

	"golang.org/x/sys/unix"
)

// lowPriority lowers the priority of this thread for the CPU and the disk. It is
// not the lowest: an agent that uses all CPUs would stop checkpoints.
func lowPriority() error {
	const nice, whoProcess, lowestBestEffort = 10, 1, 2<<13 | 7 // see ioprio_set(2)
	err := unix.Setpriority(unix.PRIO_PROCESS, 0, nice)
	if _, _, errno := unix.Syscall(unix.SYS_IOPRIO_SET, whoProcess, 0, lowestBestEffort); errno != 0 {
		err = errors.Join(err, errno)
	}
	return err
}

// isInMemory reports whether a directory is on a file system without a disk.
func isInMemory(dir string) (bool, error) {
	var fs unix.Statfs_t
	err := unix.Statfs(dir, &fs)
	return err == nil && (fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC), err
}

// exchange swaps two files or directories in one step.
func exchange(a, b string) error {
	return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
}
