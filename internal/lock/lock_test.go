package lock

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// TestMain lets the test binary be its own second process: with LOCK_CHILD it
// takes that lock, says so, and holds it until its standard input ends.
func TestMain(m *testing.M) {
	if path := os.Getenv("LOCK_CHILD"); path != "" {
		if _, err := Try(path); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("locked")
		_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func child(t *testing.T, path string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "LOCK_CHILD="+path)
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "locked\n" {
		t.Fatalf("child said %q, %v", line, err)
	}
	return cmd
}

func TestHeldByAnotherProcessUntilItIsKilled(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.lock")
	cmd := child(t, path)

	_, err := Try(path)
	if agentlab.CodeOf(err) != agentlab.CodeBusy {
		t.Fatalf("got %v, want busy", err)
	}
	if want := fmt.Sprintf("process %d", cmd.Process.Pid); !strings.Contains(err.Error(), want) {
		t.Errorf("%q does not name %q", err, want)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Acquire(ctx, path); agentlab.CodeOf(err) != agentlab.CodeBusy || !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want busy that wraps context.Canceled", err)
	}

	got := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), guard.Patience)
		defer cancel()
		l, err := Acquire(ctx, path)
		if err == nil {
			err = l.Unlock()
		}
		got <- err
	}()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Fatalf("not acquired after the holder's death: %v", err)
	}
}

func TestOncePerProcessAndAgainAfterUnlock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.lock")
	l, err := Try(path)
	if err != nil {
		t.Fatal(err)
	}
	if pid, note := Holder(path); pid != os.Getpid() || note != "" {
		t.Errorf("Holder = %d, %q, want %d without a note", pid, note, os.Getpid())
	}
	l.Note("/run/a socket")
	if pid, note := Holder(path); pid != os.Getpid() || note != "/run/a socket" {
		t.Errorf("Holder = %d, %q, want %d and the note", pid, note, os.Getpid())
	}
	if _, err := Try(path); agentlab.CodeOf(err) != agentlab.CodeBusy {
		t.Errorf("second Try: got %v, want busy", err)
	}
	for range 2 {
		if err := l.Unlock(); err != nil {
			t.Fatal(err)
		}
	}
	if pid, note := Holder(path); pid != 0 || note != "" {
		t.Errorf("Holder after Unlock = %d, %q, want nothing", pid, note)
	}
	l, err = Try(path)
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Unlock()
}

// Lock files of earlier versions have only a process ID, and a note may be read while
// it is written.
func TestHolderReadsPartsOfAFile(t *testing.T) {
	for text, want := range map[string]struct {
		pid  int
		note string
	}{
		"":                {},
		"x\n/a\n":         {},
		"12":              {pid: 12},
		"12\n":            {pid: 12},
		"12\n/run/a":      {pid: 12},
		"12\n/run/a\n":    {12, "/run/a"},
		"12\n/run/a\nb\n": {12, "/run/a"},
	} {
		path := filepath.Join(t.TempDir(), "x.lock")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if pid, note := Holder(path); pid != want.pid || note != want.note {
			t.Errorf("%q: got %d, %q, want %d, %q", text, pid, note, want.pid, want.note)
		}
	}
}

func TestSymlinkRefused(t *testing.T) {
	dir := t.TempDir()
	victim := filepath.Join(dir, "victim")
	if err := os.WriteFile(victim, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, filepath.Join(dir, "x.lock")); err != nil {
		t.Fatal(err)
	}
	if _, err := Try(filepath.Join(dir, "x.lock")); err == nil {
		t.Fatal("a symlink was followed")
	}
	if b, _ := os.ReadFile(victim); string(b) != "precious" {
		t.Errorf("victim now holds %q", b)
	}
}

// The lock on an open file excludes other open files, here and in another
// process, until it is closed.
func TestTryFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.lock")
	open := func() *os.File {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	want := func(f *os.File, held bool) {
		t.Helper()
		if ok, err := TryFile(f); ok != held || err != nil {
			t.Errorf("got %v, %v, want %v", ok, err, held)
		}
	}
	a, b := open(), open()
	want(a, true)
	want(a, true) // through the same file it is held already
	want(b, false)
	if _, err := Try(path); agentlab.CodeOf(err) != agentlab.CodeBusy {
		t.Errorf("Try: got %v, want busy", err)
	}
	_ = a.Close()
	want(b, true)
	_ = b.Close()
	cmd := child(t, path)
	c := open()
	want(c, false)
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	want(c, true)
	_ = c.Close()
	if ok, err := TryFile(c); ok || err == nil {
		t.Errorf("a closed file: %v, %v", ok, err)
	}
}
