package sockpath

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// maxName is the maximum length of a socket name in the kernel (sun_path
// without its NUL).
const maxName = 103

// dirName returns the name of an open directory, with the final slash.
func dirName(d *os.File) string { return filepath.Clean(d.Name()) + "/" }

// shorten returns path: macOS has no short names for it.
func shorten(path string) (name string, release func(), err error) { return path, func() {}, nil }

func peerOf(fd int) (Peer, error) {
	cred, err := unix.GetsockoptXucred(fd, unix.SOL_LOCAL, unix.LOCAL_PEERCRED)
	if err != nil {
		return Peer{}, err
	}
	if cred.Ngroups < 1 {
		return Peer{}, errors.New("the kernel reports no group")
	}
	pid, err := unix.GetsockoptInt(fd, unix.SOL_LOCAL, unix.LOCAL_PEERPID)
	if err != nil {
		return Peer{}, err
	}
	return Peer{PID: int32(pid), UID: cred.Uid, GID: cred.Groups[0]}, nil //nolint:gosec // a pid of macOS is an int32
}
