//go:build !linux

package hostspace

import (
	"os"

	"golang.org/x/sys/unix"
)

// fallocate returns EOPNOTSUPP: the caller writes the file instead.
func fallocate(*os.File, int64) error { return unix.EOPNOTSUPP }
