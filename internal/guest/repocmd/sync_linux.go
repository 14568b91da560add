package repocmd

import (
	"os"

	"golang.org/x/sys/unix"
)

// syncFS writes the file system of a directory to its disk.
func syncFS(dir *os.File) error {
	return unix.Syncfs(int(dir.Fd())) //nolint:gosec // a file descriptor fits an int
}
