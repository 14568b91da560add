package e2e

import "golang.org/x/sys/unix"

// threadID returns the number of the calling thread.
func threadID() int { return unix.Gettid() }

// newNetwork gives the calling thread a network namespace of its own.
func newNetwork() {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		panic(err) // what follows would be done to the host's network
	}
}
