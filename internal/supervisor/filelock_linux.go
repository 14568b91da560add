package supervisor

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// The locks are open file description locks. Like a lock of flock(2), such a
// lock is held while any process, children included, has the file open. Unlike
// that one, it can be tested without taking it, so a test never disturbs a
// start.

func ofdLock(typ int16) unix.Flock_t { return unix.Flock_t{Type: typ} }

// takeLock takes the lock of f, or reports false if another process holds it.
func takeLock(f *os.File) (bool, error) {
	lk := ofdLock(unix.F_WRLCK)
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lk)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return false, nil
	}
	return err == nil, err
}

// isLocked reports whether a process holds the lock of f.
func isLocked(f *os.File) (bool, error) {
	lk := ofdLock(unix.F_WRLCK)
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lk); err != nil {
		return false, err
	}
	return lk.Type != unix.F_UNLCK, nil
}
