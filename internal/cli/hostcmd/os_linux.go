package hostcmd

import "golang.org/x/sys/unix"

// openProcess returns a descriptor that can be read when the process has ended.
func openProcess(pid int) (int, error) { return unix.PidfdOpen(pid, 0) }

// inMemory reports whether a directory is on a file system that is never written to
// a disk, except to swap space.
func inMemory(dir string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(dir, &fs) == nil && fs.Type == unix.TMPFS_MAGIC
}
