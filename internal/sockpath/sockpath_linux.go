package sockpath

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// maxName is the maximum length of a socket name in the kernel (sun_path
// without its NUL).
const maxName = 107

// dirName returns a short name of an open directory, with the final slash.
func dirName(d *os.File) string { return fmt.Sprintf("/proc/self/fd/%d/", d.Fd()) }

// shorten returns a short name for path. It is valid until release is called.
func shorten(path string) (name string, release func(), err error) {
	d, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", d, filepath.Base(path)), func() { _ = unix.Close(d) }, nil
}

func peerOf(fd int) (Peer, error) {
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return Peer{}, err
	}
	return Peer{PID: cred.Pid, UID: cred.Uid, GID: cred.Gid}, nil
}
