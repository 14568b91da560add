package hostspace

import (
	"os"

	"golang.org/x/sys/unix"
)

// fallocate allocates the blocks of a file.
func fallocate(f *os.File, size int64) error {
	return unix.Fallocate(int(f.Fd()), 0, 0, size)
}
