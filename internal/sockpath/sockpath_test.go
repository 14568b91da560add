package sockpath

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func deep(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), strings.Repeat("a-long-directory-name/", 12))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "agentlabd.sock")
}

// answer serves every connection of ln with text until ln is closed.
func answer(ln net.Listener, text string) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		_, _ = io.WriteString(c, text)
		_ = c.Close()
	}
}

func ask(t *testing.T, path string) (string, error) {
	t.Helper()
	c, err := Dial(guard.Context(t), path)
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	b, err := io.ReadAll(c)
	return string(b), err
}

func TestShortAndLongPaths(t *testing.T) {
	short := filepath.Join(t.TempDir(), "s")
	for _, path := range []string{short, deep(t)} {
		t.Run(fmt.Sprint(len(path)), func(t *testing.T) {
			ln, err := Listen(path, 0o600)
			if err != nil {
				t.Fatal(err)
			}
			if ln.Addr().String() != path {
				t.Errorf("Addr = %s", ln.Addr())
			}
			st, err := os.Stat(path)
			if err != nil || st.Mode().Perm() != 0o600 {
				t.Errorf("mode %v, %v", st.Mode(), err)
			}
			go answer(ln, "hello")
			if got, err := ask(t, path); got != "hello" || err != nil {
				t.Errorf("got %q, %v", got, err)
			}
			if _, err := Listen(path, 0o600); agentlab.CodeOf(err) != agentlab.CodeExists {
				t.Errorf("second Listen: %v, want exists", err)
			}
			if err := ln.Close(); err != nil {
				t.Fatal(err)
			}
			if _, err := ask(t, path); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
				t.Errorf("after Close: %v, want unavailable", err)
			}
			if left, _ := os.ReadDir(filepath.Dir(path)); len(left) != 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

// dead creates a socket without a listener, as a killed process leaves it.
func dead(t *testing.T, path string) {
	t.Helper()
	ln, err := Listen(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	_ = ln.(*listener).UnixListener.Close()
	if _, err := os.Lstat(path); err != nil {
		t.Fatal(err)
	}
}

func TestDeadSocketIsReplacedAndOnlyThat(t *testing.T) {
	path := deep(t)
	dead(t, path)
	if _, err := ask(t, path); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Fatalf("dead socket: %v, want unavailable", err)
	}
	ln, err := Listen(path, 0o660)
	if err != nil {
		t.Fatal(err)
	}
	_ = ln.Close()

	if err := os.WriteFile(path, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, f := range []func(string) error{
		func(p string) error { _, err := Listen(p, 0o600); return err },
		func(p string) error { _, err := Takeover(p, 0o600); return err },
	} {
		if err := f(path); agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("over a plain file: %v, want denied", err)
		}
	}
	if b, _ := os.ReadFile(path); string(b) != "mine" {
		t.Errorf("the file holds %q now", b)
	}
}

func TestForeignSocketIsKept(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give a socket to another user")
	}
	path := deep(t)
	dead(t, path)
	if err := unix.Lchown(path, 12345, -1); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(path, 0o600); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("got %v, want denied", err)
	}
}

func TestNodeRestore(t *testing.T) {
	path := deep(t)
	first, err := Listen(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	go answer(first, "first")
	second, err := Takeover(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = second.Close() }()
	go answer(second, "second")
	if got, err := ask(t, path); got != "second" {
		t.Errorf("got %q, %v", got, err)
	}
	_ = first.Close() // must not take the successor's socket with it
	if got, err := ask(t, path); got != "second" {
		t.Errorf("after the first closed: got %q, %v", got, err)
	}
}

func TestParallelListenHasOneWinner(t *testing.T) {
	path := deep(t)
	dead(t, path)
	var wg sync.WaitGroup
	won := make(chan net.Listener, 8)
	for range 8 {
		wg.Go(func() {
			ln, err := Listen(path, 0o600)
			if err == nil {
				won <- ln
			} else if agentlab.CodeOf(err) != agentlab.CodeExists {
				t.Errorf("got %v, want exists", err)
			}
		})
	}
	wg.Wait()
	close(won)
	n := 0
	for ln := range won {
		n++
		_ = ln.Close()
	}
	if n != 1 {
		t.Errorf("%d winners", n)
	}
}

func TestNoDescriptorLeaks(t *testing.T) {
	path := deep(t)
	count := func() int { e, _ := os.ReadDir("/proc/self/fd"); return len(e) }
	once := func() {
		ln, err := Listen(path, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		c, err := Dial(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
		_ = ln.Close()
		_, _ = Dial(t.Context(), path)
	}
	once()
	before := count()
	for range 20 {
		once()
	}
	if after := count(); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestNameTooLong(t *testing.T) {
	path := filepath.Join(t.TempDir(), strings.Repeat("n", 100))
	if _, err := Listen(path, 0o600); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("got %v, want invalid", err)
	}
}

func TestPeerOf(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	ln, err := Listen(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if p, err := PeerOf(conn); err != nil || int(p.PID) != os.Getpid() || int(p.UID) != os.Getuid() || int(p.GID) != os.Getgid() {
		t.Errorf("PeerOf = %+v, %v", p, err)
	}
	a, b := net.Pipe()
	defer func() { _, _ = a.Close(), b.Close() }()
	if _, err := PeerOf(a); err == nil {
		t.Error("a pipe has credentials")
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tcp.Close() }()
	far, err := net.Dial("tcp", tcp.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = far.Close() }()
	if p, err := PeerOf(far); err == nil && p.UID == 0 {
		t.Errorf("a TCP connection is root: %+v", p)
	}
}
