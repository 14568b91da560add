// Package lock has advisory file locks (flock(2)) between processes, which the
// kernel releases when their holder dies, and locks within one process whose
// wait ends with a context (Mutex, Keyed).
//
// A lock file is never removed: removing it would let two processes hold "the"
// lock on two different files of one name. Its first line is the process ID of
// the holder, and its second line, if any, what the holder noted (Lock.Note).
// Both are hints: only Try shows whether the lock is held.
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

// Try takes the lock at path, which is created with mode 0600 if missing; its
// directory must exist. If another process, or another Lock of this process,
// holds it, Try fails at once with code busy and the holder's process ID, if
// known.
func Try(path string) (*Lock, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		code := agentlab.CodeInternal
		if errors.Is(err, fs.ErrPermission) {
			code = agentlab.CodeDenied
		}
		return nil, &agentlab.Error{Code: code, Message: "cannot open the lock file", Err: err}
	}
	ok, err := TryFile(f)
	if ok {
		write(f, strconv.Itoa(os.Getpid())+"\n")
		return &Lock{f}, nil
	}
	defer func() { _ = f.Close() }()
	if err != nil {
		return nil, &agentlab.Error{Code: agentlab.CodeInternal, Message: "cannot lock " + path, Err: err}
	}
	return nil, agentlab.Errorf(agentlab.CodeBusy, "%s is locked by %s", path, holder(f))
}

// TryFile takes the lock on an open file, without waiting. It returns false if
// the lock is held through another open file, in this or another process. The
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
// error has code busy if it was held all the time, and wraps ctx's error. It
// polls, every 5 ms at first and 200 ms at most, because a blocked flock(2)
// cannot be cancelled.
func Acquire(ctx context.Context, path string) (*Lock, error) {
	wait := 5 * time.Millisecond
	for {
		l, err := Try(path)
		if err == nil || agentlab.CodeOf(err) != agentlab.CodeBusy {
			return l, err
		}
		select {
		case <-ctx.Done():
			return nil, agentlab.Errorf(agentlab.CodeBusy, "%s, and %w", err.Error(), ctx.Err())
		case <-time.After(wait):
			wait = min(2*wait, 200*time.Millisecond)
		}
	}
}

// Unlock releases the lock. It is not an error for the zero Lock or at a
// second call.
func (l *Lock) Unlock() error {
	if l == nil || l.f == nil {
		return nil
	}
	f := l.f
	l.f = nil
	err := f.Truncate(0) // while still locked, so that it does not delete the next holder's PID
	return errors.Join(err, f.Close())
}

// Note writes one line into the lock file, for processes that find the lock held.
func (l *Lock) Note(line string) {
	write(l.f, strconv.Itoa(os.Getpid())+"\n"+line+"\n")
}

// Holder returns the process ID in the lock file at path, 0 if there is none, and
// what the holder noted, "" if nothing. The process may have died since.
func Holder(path string) (pid int, note string) {
	f, err := os.Open(path)
	if err != nil {
		return 0, ""
	}
	defer func() { _ = f.Close() }()
	return read(f)
}

// write ignores errors: the lock also works without its text, for example on a
// full disk. It writes before it shortens the file, so that a reader always finds a holder.
func write(f *os.File, text string) {
	_, _ = f.WriteAt([]byte(text), 0)
	_ = f.Truncate(int64(len(text)))
}

// read returns no note that is incomplete: its writer may be in the middle of it.
func read(f *os.File) (pid int, note string) {
	buf := make([]byte, 8<<10) // a PID and a path
	n, _ := f.ReadAt(buf, 0)
	first, rest, _ := strings.Cut(string(buf[:n]), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(first))
	if err != nil || pid <= 0 {
		return 0, ""
	}
	if line, _, complete := strings.Cut(rest, "\n"); complete {
		note = line
	}
	return pid, note
}

func holder(f *os.File) string {
	if pid, _ := read(f); pid > 0 {
		return fmt.Sprintf("process %d", pid)
	}
	return "another process"
}
