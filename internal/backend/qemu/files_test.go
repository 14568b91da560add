package qemu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/u-root/u-root/pkg/cpio"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/boundedlog"
)

func TestDirName(t *testing.T) {
	ref := backend.Ref{VMID: 105, UID: agentlab.NewUID()}
	if got, ok := parseDirName(dirName(ref)); !ok || got != ref {
		t.Errorf("%q is read as %+v, %v", dirName(ref), got, ok)
	}
	for _, bad := range []string{
		"", "105", "105-", "-" + ref.UID, "0-" + ref.UID, "0105-" + ref.UID, "105-../../etc/passwd/aaaaaaaaaa",
		"105-" + ref.UID + "a", "105-" + strings.ToUpper(ref.UID), "99999999999999999999-" + ref.UID, trashPrefix + dirName(ref),
	} {
		if got, ok := parseDirName(bad); ok {
			t.Errorf("%q is read as %+v", bad, got)
		}
	}
	for _, bad := range []backend.Ref{{}, {VMID: -1, UID: ref.UID}, {VMID: 1, UID: "../x"}, {VMID: 1, UID: "a/../../b"}} {
		if agentlab.CodeOf(validRef(bad)) != agentlab.CodeInvalid {
			t.Errorf("%+v is taken", bad)
		}
	}
}

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
	for stat, want := range map[string]uint64{
		"7 (x) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21":         4711,
		"7 (a) (b) R S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21":   18, // not what a kernel writes; no crash
		"7 (evil) 1 2) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21": 4711,
	} {
		if got, err := parseStartTime([]byte(stat)); err != nil || got != want {
			t.Errorf("%q: %d, %v, want %d", stat, got, err, want)
		}
	}
	for _, bad := range []string{"", "7 (x S 1", "7 (x) S 1 2", "7 (x) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 x 20"} {
		if _, err := parseStartTime([]byte(bad)); err == nil {
			t.Errorf("%q has a start time", bad)
		}
	}
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
	l, err := boundedlog.Open(path, 1<<20, 0, time.Now)
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
	if l, err = boundedlog.Open(path, 10, 0, time.Now); err != nil { // from here on each word has a file of its own
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
	case <-time.After(10 * time.Second):
		t.Error("following does not end with the directory")
	}
	if b, err := io.ReadAll(open(true)); err != nil || len(b) != 0 {
		t.Errorf("a log without a directory: %q, %v", b, err)
	}
}

func TestInitrd(t *testing.T) {
	dir := t.TempDir()
	modules, runner := filepath.Join(dir, "modules.cpio"), filepath.Join(dir, "runner")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	write(modules, "0123456789") // of a length that needs padding
	r := &initrds{dir: filepath.Join(dir, "cache"), runner: runner}
	if _, err := r.file(t.Context(), modules); agentlab.CodeOf(err) != agentlab.CodeUnavailable || agentlab.HintOf(err) == "" {
		t.Errorf("without agent-runner: %v, want unavailable and a hint", err)
	}
	write(runner, "first")
	if _, err := r.file(t.Context(), modules+"x"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without modules: %v", err)
	}
	a, err := r.file(t.Context(), modules)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(a)
	if err != nil || !bytes.HasPrefix(b, []byte("0123456789\x00\x00070701")) {
		t.Fatalf("the initrd begins %q, %v", b[:min(20, len(b))], err)
	}
	records, err := cpio.ReadAllRecords(cpio.Newc.Reader(bytes.NewReader(b[12:])))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, rec := range records {
		names = append(names, fmt.Sprintf("%s %o", rec.Name, rec.Mode))
	}
	if got, want := strings.Join(names, ", "), "dev 40755, dev/console 20600, dev/null 20666, init 100755"; got != want {
		t.Errorf("the initrd holds %s, want %s", got, want)
	}
	if again, err := r.file(t.Context(), modules); again != a || err != nil {
		t.Errorf("again: %s, %v", again, err)
	}
	fresh := &initrds{dir: r.dir, runner: runner}
	if again, err := fresh.file(t.Context(), modules); again != a || err != nil {
		t.Errorf("another process: %s, %v, want %s", again, err, a)
	}
	for i := range 10 { // the cache does not grow with each build of agent-runner
		write(runner, strings.Repeat("x", i+1))
		if a, err = r.file(t.Context(), modules); err != nil {
			t.Fatal(err)
		}
	}
	entries, _ := os.ReadDir(r.dir)
	if _, err := os.Stat(a); err != nil || len(entries) != keepInitrds {
		t.Errorf("%d files are cached, and the last: %v", len(entries), err)
	}
	if err := os.RemoveAll(r.dir); err != nil { // a cache may be emptied at any time
		t.Fatal(err)
	}
	if again, err := r.file(t.Context(), modules); again != a || err != nil || !fileExists(a) {
		t.Errorf("after the cache was emptied: %s, %v", again, err)
	}
}

func TestReason(t *testing.T) {
	exited := func(code int) syscall.WaitStatus { return syscall.WaitStatus(code << 8) }
	killed := func(s syscall.Signal) syscall.WaitStatus { return syscall.WaitStatus(s) }
	for _, test := range []struct {
		e    ending
		want string
	}{
		{ending{status: killed(syscall.SIGKILL)}, "QEMU was killed by SIGKILL"},
		{ending{status: killed(syscall.SIGKILL), oom: true}, "QEMU was killed because the host ran out of memory"},
		{ending{status: killed(syscall.SIGSYS)}, "QEMU was killed by its system call filter"},
		{ending{status: killed(syscall.SIGABRT), stderr: "a\nassertion failed\n"}, "QEMU was killed by SIGABRT: assertion failed"},
		{ending{status: exited(1), stderr: "qemu: no such disk\n"}, "QEMU failed: qemu: no such disk"},
		{ending{status: exited(1)}, "QEMU failed"},
		{ending{shutdown: "guest-shutdown"}, "the guest powered itself off"},
		{ending{shutdown: "guest-reset"}, "the guest reset itself before agent-runner answered"},
		{ending{shutdown: "guest-reset", answered: true}, "the guest rebooted itself"},
		{
			ending{shutdown: "guest-reset", console: "[1.0] Kernel panic - not syncing: VFS: \x1b[31mno\x07 root\r\n[2.0] next"},
			"guest kernel panic: VFS: [31mno root",
		},
		{ending{shutdown: "guest-reset", console: "Kernel panic - not syncing: "}, "guest kernel panic: no reason given"},
		{ending{shutdown: "host-qmp-quit"}, "QEMU ended"},
		{ending{status: exited(1), stderr: strings.Repeat("ü", 1000)}, "QEMU failed: " + strings.Repeat("ü", 113) + "…"},
	} {
		if got := test.e.reason(); got != test.want {
			t.Errorf("%+v: %q, want %q", test.e, got, test.want)
		}
	}
}

func FuzzReason(f *testing.F) {
	f.Add("Kernel panic - not syncing: x\n", "y")
	f.Add("Kernel panic - not syncing: \xff\x00", "\n\n")
	f.Fuzz(func(t *testing.T, console, stderr string) {
		for _, e := range []ending{{shutdown: "guest-reset", console: console}, {status: 0x100, stderr: stderr}} {
			got := e.reason()
			if got == "" || len(got) > maxReason+len("…") || !agentlab.IsPrintable(got) {
				t.Errorf("reason %q", got)
			}
		}
	})
}

func FuzzQMP(f *testing.F) {
	f.Add([]byte(`{"QMP": {"version": {}, "capabilities": []}}`))
	f.Add([]byte(`{"event":"SHUTDOWN","data":{"guest":true,"reason":"guest-reset"}}`))
	f.Add([]byte(`{"return":{},"id":7}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		m, err := parseQMP(line)
		if err == nil && m.Event == "" && m.ID < -1 {
			(&qmp{waiting: map[int]chan qmpMessage{}}).answer(m) // an id nobody asked with
		}
	})
}
