// Package sockpath opens unix sockets at paths of any length.
//
// The kernel limits the name of a unix socket to 107 bytes, and the path of a
// sandbox's directory may be longer. On Linux a longer path is accessed through an
// open descriptor of its directory, /proc/self/fd/N/NAME, so the limit (then about
// 85 bytes) applies only to the last element. Elsewhere a path that is longer than
// the limit is an error.
package sockpath

import (
	"context"
	"crypto/rand"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/lock"
)

// Listen creates the socket at path with the given permissions, which it has
// from the moment when it is visible. Its directory must exist.
//
// An existing socket is replaced only if it is proven to be dead (connecting
// to it is refused) and belongs to the current user. The error has code exists
// for a live one, and denied for anything that is not a socket or belongs to
// another user. A lock on the directory serialises concurrent calls.
//
// Closing the listener removes the socket if it is still the same file.
func Listen(path string, mode fs.FileMode) (net.Listener, error) {
	return listen(path, mode, false)
}

// Takeover is Listen that also replaces a live socket of the current user:
// from then on new connections arrive here, and the old listener gets none.
func Takeover(path string, mode fs.FileMode) (net.Listener, error) {
	return listen(path, mode, true)
}

func listen(path string, mode fs.FileMode, takeover bool) (_ net.Listener, err error) {
	dir, base := filepath.Split(path)
	d, err := os.Open(filepath.Clean(dir + "."))
	if err != nil {
		return nil, fault(path, err)
	}
	defer func() { _ = d.Close() }() // also releases the lock
	if err := lockDir(d); err != nil {
		return nil, fault(path, err)
	}
	if err := checkExisting(path, takeover); err != nil {
		return nil, err
	}

	// Bound under a temporary name, then renamed, so that no process finds
	// a socket with other permissions or one that does not listen yet.
	tmp := "." + rand.Text()[:10]
	name := dirName(d)
	if len(name)+max(len(base), len(tmp)) > maxName {
		return nil, tooLong(base)
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: name + tmp, Net: "unix"})
	if err != nil {
		return nil, fault(path, err)
	}
	ln.SetUnlinkOnClose(false) // its name is only valid while d is open
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

// lockDir waits at most 10 s: the holder of the lock is in listen.
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

// checkExisting decides whether the file at path may be replaced.
func checkExisting(path string, takeover bool) error {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fault(path, err)
	}
	if st.Mode().Type() != fs.ModeSocket {
		return agentlab.Errorf(agentlab.CodeDenied, "%s exists and is not a socket", path).WithHint("move it away")
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
	return agentlab.Errorf(agentlab.CodeExists, "%s seems to be in use: %w", path, err)
}

// Dial connects to the socket at path. The error has code unavailable for a
// missing or dead socket; the system's error stays in the chain.
func Dial(ctx context.Context, path string) (net.Conn, error) {
	name := path
	if len(path) > maxName {
		short, release, err := shorten(path)
		if err != nil {
			return nil, fault(path, err)
		}
		defer release()
		if len(short) > maxName {
			return nil, tooLong(filepath.Base(path))
		}
		name = short
	}
	var nd net.Dialer
	c, err := nd.DialContext(ctx, "unix", name)
	if err != nil {
		return nil, fault(path, err)
	}
	return c, nil
}

func tooLong(name string) error {
	return agentlab.Errorf(agentlab.CodeInvalid, "the socket name %q is too long", name)
}

// fault returns err with the requested path instead of the one under /proc.
func fault(path string, err error) error {
	code := agentlab.CodeInternal
	var why error
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ECONNREFUSED), errors.Is(err, context.Canceled), errors.Is(err, os.ErrDeadlineExceeded):
		code = agentlab.CodeUnavailable
	case errors.Is(err, fs.ErrPermission):
		code = agentlab.CodeDenied
	case fsfault.Full(err):
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

// PeerOf returns the process at the other end of a unix socket, as the kernel
// reports it.
func PeerOf(c net.Conn) (Peer, error) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return Peer{}, errors.New("not a socket")
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return Peer{}, err
	}
	var p Peer
	var credErr error
	err = raw.Control(func(fd uintptr) { p, credErr = peerOf(int(fd)) })
	if err = errors.Join(err, credErr); err != nil {
		return Peer{}, err
	}
	return p, nil
}

// listener removes its own socket, but not that of a successor, when it is
// closed.
type listener struct {
	*net.UnixListener
	path string
	stat fs.FileInfo
	once sync.Once
	err  error
}

// Addr returns the address with the requested path.
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
