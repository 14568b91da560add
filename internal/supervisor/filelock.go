package supervisor

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The locks are open file description locks. Like a lock of flock(2), such a
// lock is held while any process, children included, has the file open. Unlike
// that one, it can be tested without taking it, so a test never disturbs a
// start.

func ofdLock(typ int16) unix.Flock_t { return unix.Flock_t{Type: typ} }

// openLock opens a lock file. The file is not removed before its sandbox.
func openLock(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
}

// takeLock takes the lock of f, or reports false if another process holds it.
func takeLock(f *os.File) (bool, error) {
	lk := ofdLock(unix.F_WRLCK)
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lk)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return false, nil
	}
	return err == nil, err
}

// lockHeld reports whether a process holds the lock at path.
func lockHeld(path string) (bool, error) {
	f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NOFOLLOW, 0)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	lk := ofdLock(unix.F_WRLCK)
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lk); err != nil {
		return false, err
	}
	return lk.Type != unix.F_UNLCK, nil
}

// waitFree waits until the lock at path is free.
func waitFree(ctx context.Context, path string) error {
	return poll(ctx, func() (bool, error) {
		held, err := lockHeld(path)
		return !held, err
	})
}

// poll calls done, at once and then every few milliseconds, until it reports
// true or fails or ctx ends.
func poll(ctx context.Context, done func() (bool, error)) error {
	tick := time.NewTimer(0)
	defer tick.Stop()
	for wait := time.Millisecond; ; wait = min(2*wait, 20*time.Millisecond) {
		ok, err := done()
		if ok || err != nil {
			return err
		}
		tick.Reset(wait)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}
