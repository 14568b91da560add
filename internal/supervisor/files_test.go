package supervisor

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	held := func(want bool) {
		t.Helper()
		if got, err := lockHeld(path); err != nil || got != want {
			t.Fatalf("held: %v, %v, want %v", got, err, want)
		}
	}
	held(false) // no file
	a, err := openLock(path)
	if err != nil {
		t.Fatal(err)
	}
	held(false)
	if ok, err := takeLock(a); !ok || err != nil {
		t.Fatal(ok, err)
	}
	held(true)
	b, err := openLock(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Close() }()
	if ok, err := takeLock(b); ok || err != nil {
		t.Fatal("taken twice", err)
	}
	if ok, err := takeLock(a); !ok || err != nil {
		t.Fatal("not confirmed to its holder", err)
	}
	// What a child inherited keeps it after we have let go.
	dup, err := syscall.Dup(int(a.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	_ = a.Close()
	held(true)
	_ = syscall.Close(dup)
	held(false)
	if ok, err := takeLock(b); !ok || err != nil {
		t.Fatal(ok, err)
	}
}

func TestProcessID(t *testing.T) {
	p, err := identify(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	// A number that is another's now is never signalled: this test goes on.
	for _, other := range []processID{
		{PID: p.PID, Start: p.Start + 1, Boot: p.Boot}, {PID: p.PID, Start: p.Start, Boot: "another"}, {PID: 0, Start: p.Start, Boot: p.Boot}, {PID: 1, Boot: p.Boot},
	} {
		if err := other.kill(); err != nil {
			t.Error(err)
		}
	}
}

func TestLogReader(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "log")
	l, err := bounded.OpenLog(path, 1<<20, 0, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	open := func(follow bool) *logReader {
		ctx, cancel := context.WithCancel(t.Context())
		return &logReader{ctx: ctx, cancel: cancel, path: path, follow: follow}
	}
	write := func(s string) {
		if _, err := l.Write([]byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	write("one ")
	f := open(true)
	read := func(want string) {
		t.Helper()
		b := make([]byte, len(want))
		if _, err := io.ReadFull(f, b); err != nil || string(b) != want {
			t.Fatalf("followed %q, %v, want %q", b, err, want)
		}
	}
	read("one ")
	_ = l.Close()
	if l, err = bounded.OpenLog(path, 10, 0, time.Now); err != nil { // from here on each word has a file of its own
		t.Fatal(err)
	}
	write("two")
	read("two")
	write("three")
	read("three")
	if b, err := io.ReadAll(open(false)); err != nil || string(b) != "twothree" {
		t.Errorf("without follow: %q, %v", b, err)
	}
	ended := make(chan error, 1)
	go func() { _, err := io.ReadAll(f); ended <- err }()
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(guard.Patience):
		t.Error("following does not end with the directory")
	}
	if b, err := io.ReadAll(open(true)); err != nil || len(b) != 0 {
		t.Errorf("a log without a directory: %q, %v", b, err)
	}
}
