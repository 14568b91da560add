package fakenet

import "golang.org/x/sys/unix"

// sockets returns two connected sockets.
func sockets(kind int) ([2]int, error) {
	return unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
}
