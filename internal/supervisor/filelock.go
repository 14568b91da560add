package supervisor

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"
)

// openLock opens a lock file. The file is not removed before its sandbox.
func openLock(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
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
	return isLocked(f)
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
