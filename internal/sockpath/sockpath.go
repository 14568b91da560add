// Package sockpath opens unix sockets at paths of any length.
//
// The kernel takes at most 107 bytes as the name of a unix socket, and a
// sandbox's directory is easily deeper. A longer path is reached through an
// open handle of its directory, /proc/self/fd/N/NAME, so only the last
// element is bound by that limit (by about 85 bytes).
package sockpath

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lock"
)

// maxName is the longest socket name the kernel takes (sun_path less its NUL).
const maxName = 107

// Listen makes the socket at path with the given permissions, which hold from
// the first moment it can be seen. Its directory must exist.
//
// A socket that is already there is replaced only when it is proven dead
// (connecting to it is refused) and belongs to our user. A live one is code
// exists; anything that is no socket, or another user's, is code denied.
// Concurrent calls for one directory are serialised by a lock on it.
//
// Closing the listener removes the socket if it is still the same file.
func Listen(path string, mode fs.FileMode) (net.Listener, error) {
	return listen(path, mode, false)
}

// Takeover is Listen, but replaces a live socket of our user too: from then
// on, new connections arrive here and the former listener gets none.
func Takeover(path string, mode fs.FileMode) (net.Listener, error) {
	return listen(path, mode, true)
}

func listen(path string, mode fs.FileMode, takeover bool) (_ net.Listener, err error) {
	dir, base := filepath.Split(path)
	d, err := os.Open(filepath.Clean(dir + "."))
	if err != nil {
		return nil, fault(path, err)
	}
	defer func() { _ = d.Close() }() // gives the lock back as well
	if err := lockDir(d); err != nil {
		return nil, fault(path, err)
	}
	if err := checkOld(path, takeover); err != nil {
		return nil, err
	}

	// Bound under a name of its own, then renamed into place: nobody ever
	// sees a socket with other permissions or one that does not listen yet.
	tmp := "." + rand.Text()[:10]
	name := fmt.Sprintf("/proc/self/fd/%d/", d.Fd())
	if len(name)+len(base) > maxName {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "the socket name %q is too long", base)
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: name + tmp, Net: "unix"})
	if err != nil {
		return nil, fault(path, err)
	}
	ln.SetUnlinkOnClose(false) // its name is only right while d is open
	tmpPath := filepath.Join(dir, tmp)
	defer func() {
		if err != nil {
			_ = ln.Close()
			_ = os.Remove(tmpPath)
		}
	}()
	if err := os.Chmod(tmpPath, mode.Perm()); err != nil {
		return nil, fault(path, err)
	}
	st, err := os.Lstat(tmpPath)
	if err != nil {
		return nil, fault(path, err)
	}
	if err := os.Rename(tmpPath, path); err != nil {
		return nil, fault(path, err)
	}
	return &listener{UnixListener: ln, path: path, stat: st}, nil
}

// lockDir waits at most 10 s: whoever holds the lock is inside listen.
func lockDir(d *os.File) error {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		if ok, err := lock.TryFile(d); ok || err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return unix.EWOULDBLOCK
		}
	}
}

// checkOld decides whether what is at path may be replaced.
func checkOld(path string, takeover bool) error {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fault(path, err)
	}
	if st.Mode().Type() != fs.ModeSocket {
		return agentlab.Errorf(agentlab.CodeDenied, "%s exists and is no socket", path).WithHint("move it away")
	}
	var raw unix.Stat_t
	if err := unix.Lstat(path, &raw); err != nil {
		return fault(path, err)
	}
	if int(raw.Uid) != os.Geteuid() {
		return agentlab.Errorf(agentlab.CodeDenied, "%s belongs to user %d", path, raw.Uid).WithHint("set another path, or ask that user to remove it")
	}
	if takeover {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	c, err := Dial(ctx, path)
	switch {
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		return nil
	case err == nil:
		_ = c.Close()
		return agentlab.Errorf(agentlab.CodeExists, "another process listens on %s", path)
	}
	return agentlab.Errorf(agentlab.CodeExists, "%s is in use, as far as can be told: %w", path, err)
}

// Dial connects to the socket at path. A missing or dead socket is code
// unavailable; the system's error stays in the chain.
func Dial(ctx context.Context, path string) (net.Conn, error) {
	name := path
	if len(path) > maxName {
		d, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, fault(path, err)
		}
		defer func() { _ = unix.Close(d) }()
		name = fmt.Sprintf("/proc/self/fd/%d/%s", d, filepath.Base(path))
		if len(name) > maxName {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "the socket name %q is too long", filepath.Base(path))
		}
	}
	var nd net.Dialer
	c, err := nd.DialContext(ctx, "unix", name)
	if err != nil {
		return nil, fault(path, err)
	}
	return c, nil
}

// fault names the path that was asked for instead of the one under /proc.
func fault(path string, err error) error {
	code := agentlab.CodeInternal
	var why error
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ECONNREFUSED), errors.Is(err, context.Canceled), errors.Is(err, os.ErrDeadlineExceeded):
		code = agentlab.CodeUnavailable
	case errors.Is(err, fs.ErrPermission):
		code = agentlab.CodeDenied
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		code = agentlab.CodeNoSpace
	}
	why = err
	if errno := unix.Errno(0); errors.As(err, &errno) {
		why = errno
	}
	return &agentlab.Error{Code: code, Message: "socket " + path, Err: why}
}

// Peer is the process at the other end of a unix socket.
type Peer struct {
	PID      int32
	UID, GID uint32
}

// PeerOf asks the kernel who is at the other end of a unix socket.
func PeerOf(c net.Conn) (Peer, error) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return Peer{}, errors.New("not a socket")
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return Peer{}, err
	}
	var cred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(err, credErr); err != nil {
		return Peer{}, err
	}
	return Peer{PID: cred.Pid, UID: cred.Uid, GID: cred.Gid}, nil
}

// listener removes its own socket, and no successor's, when it is closed.
type listener struct {
	*net.UnixListener
	path string
	stat fs.FileInfo
	once sync.Once
	err  error
}

// Addr returns the address with the path that was asked for.
func (l *listener) Addr() net.Addr { return &net.UnixAddr{Name: l.path, Net: "unix"} }

func (l *listener) Close() error {
	l.once.Do(func() {
		if st, err := os.Lstat(l.path); err == nil && os.SameFile(st, l.stat) {
			_ = os.Remove(l.path)
		}
		l.err = l.UnixListener.Close()
	})
	return l.err
}
