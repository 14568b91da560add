// Package lock takes advisory file locks (flock(2)) that hold between
// processes and end by themselves when their holder dies; and, within one
// process, locks that are waited for only as long as a context lasts (Mutex,
// Keyed).
//
// A lock file is never removed: removing it would let two processes hold
// "the" lock on two different files of one name. It holds the process id of
// the holder, for messages only; what counts is the lock.
package lock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
)

// Lock is a held file lock.
type Lock struct{ f *os.File }

// Try takes the lock at path, which is made with mode 0600 when missing; its
// directory must exist. Held by another process, or by this one through
// another Lock, it fails at once with code busy and names the holder's
// process id when it is known.
func Try(path string) (*Lock, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600) //nolint:gosec // the path is our caller's. Go adds O_CLOEXEC: children never inherit the lock
	if err != nil {
		code := agentlab.CodeInternal
		if errors.Is(err, fs.ErrPermission) {
			code = agentlab.CodeDenied
		}
		return nil, &agentlab.Error{Code: code, Message: "cannot open the lock file", Err: err}
	}
	ok, err := TryFile(f)
	if ok {
		note(f, os.Getpid())
		return &Lock{f}, nil
	}
	defer func() { _ = f.Close() }()
	if err != nil {
		return nil, &agentlab.Error{Code: agentlab.CodeInternal, Message: "cannot lock " + path, Err: err}
	}
	return nil, agentlab.Errorf(agentlab.CodeBusy, "%s is locked by %s", path, holder(f))
}

// TryFile takes the lock on an open file, without waiting. It reports false when
// the lock is held through another open file, here or in another process. The
// lock is held until f is closed here and in every process that inherited it.
func TryFile(f *os.File) (bool, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return false, err
	}
	var locked error
	err = raw.Control(func(fd uintptr) {
		for {
			if locked = unix.Flock(int(fd), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(locked, unix.EINTR) {
				return
			}
		}
	})
	if err == nil && !errors.Is(locked, unix.EWOULDBLOCK) {
		err = locked
	}
	return err == nil && locked == nil, err
}

// Acquire takes the lock like Try, but waits for it until ctx ends; then the
// error has code busy when it was held all the time, and wraps ctx's error.
// Waiting is by polling, 5 ms at first and 200 ms at most, because a blocked
// flock(2) cannot be cancelled.
func Acquire(ctx context.Context, path string) (*Lock, error) {
	wait := 5 * time.Millisecond
	for {
		l, err := Try(path)
		if err == nil || agentlab.CodeOf(err) != agentlab.CodeBusy {
			return l, err
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil, agentlab.Errorf(agentlab.CodeBusy, "%s, and %w", err.Error(), ctx.Err())
		case <-timer.C:
			wait = min(2*wait, 200*time.Millisecond)
		}
	}
}

// Unlock gives the lock back. The zero Lock and a second call are no error.
func (l *Lock) Unlock() error {
	if l == nil || l.f == nil {
		return nil
	}
	f := l.f
	l.f = nil
	err := f.Truncate(0) // while still locked, so that the next holder's note survives
	return errors.Join(err, f.Close())
}

// Holder returns the process id noted in the lock file at path, 0 when there
// is none. It is a hint for people: only Try tells whether the lock is held.
func Holder(path string) int {
	f, err := os.Open(path)
	if err != nil {
		return 0
	}
	defer func() { _ = f.Close() }()
	return readNote(f)
}

// note ignores errors: on a full disk the lock is worth as much without it.
func note(f *os.File, pid int) {
	_ = f.Truncate(0)
	_, _ = f.WriteAt([]byte(strconv.Itoa(pid)+"\n"), 0)
}

func readNote(f *os.File) int {
	buf := make([]byte, 32)
	n, _ := f.ReadAt(buf, 0)
	pid, err := strconv.Atoi(strings.TrimSpace(string(buf[:n])))
	if err != nil || pid <= 0 {
		return 0
	}
	return pid
}

func holder(f *os.File) string {
	if pid := readNote(f); pid > 0 {
		return fmt.Sprintf("process %d", pid)
	}
	return "another process"
}
