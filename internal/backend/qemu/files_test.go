package qemu

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/u-root/u-root/pkg/cpio"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
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
