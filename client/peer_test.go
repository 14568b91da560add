//go:build linux

package client

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
)

// listenAs listens on a socket as another user, which the kernel remembers.
func listenAs(t *testing.T, uid int) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	// The raw call changes this thread alone.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	own := os.Geteuid()
	become := func(uid int) {
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); errno != 0 {
			t.Fatal(errno)
		}
	}
	become(uid)
	err = unix.Listen(fd, 1)
	become(own)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func TestPeer(t *testing.T) {
	if err := New(listenAs(t, os.Geteuid())).Ping(t.Context()); err != nil {
		t.Errorf("our own daemon: %v", err)
	}
	if err := New(filepath.Join(t.TempDir(), "s")).Ping(t.Context()); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("no daemon: got %v, want unavailable", err)
	}
	if err := checkUID(0, "s"); err != nil {
		t.Errorf("root's daemon: %v", err)
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can listen as another user")
	}
	c := New(listenAs(t, 12345))
	if err := c.Ping(t.Context()); agentlab.CodeOf(err) != agentlab.CodeDenied || agentlab.HintOf(err) == "" {
		t.Errorf("another user's daemon: got %v, want denied with a hint", err)
	}
	if _, err := c.Status(t.Context()); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("a call to another user's daemon: got %v, want denied", err)
	}
}
