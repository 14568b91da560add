package qemu

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/u-root/u-root/pkg/cpio"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

func TestDirName(t *testing.T) {
	const vmid = 105
	mark := agentlab.NewUID()
	if got, uid, ok := parseDirName(dirName(vmid, mark)); !ok || got != vmid || uid != mark {
		t.Errorf("%q is read as %d, %q, %v", dirName(vmid, mark), got, uid, ok)
	}
	for _, bad := range []string{
		"", "105", "105-", "-" + mark, "0-" + mark, "0105-" + mark, "-1-" + mark, "105-../../etc/passwd/aaaaaaaaaa", "1-../x",
		"105-" + mark + "a", "105-" + strings.ToUpper(mark), "99999999999999999999-" + mark, trashPrefix + dirName(vmid, mark),
	} {
		if vmid, uid, ok := parseDirName(bad); ok {
			t.Errorf("%q is read as %d, %q", bad, vmid, uid)
		}
	}
}

// The uid alone names a sandbox. A foreign directory with the uid in its name
// does not hide it, and trash is found beside it.
func TestFind(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	whole := filepath.Join(d.sandboxes(), dirName(sp.VMID, sp.UID))
	copied := filepath.Join(d.sandboxes(), dirName(999, sp.UID)) // sorts before it
	if err := os.CopyFS(copied, os.DirFS(whole)); err != nil {
		t.Fatal(err)
	}
	trash := filepath.Join(d.sandboxes(), trashPrefix+filepath.Base(whole))
	if err := os.Mkdir(trash, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(d.sandboxes(), dirName(7, sp.UID)), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := d.find(sp.UID)
	if err != nil || got.dir != whole || got.trash != trash || got.vmid != sp.VMID || got.Spec.Name != sp.Name {
		t.Errorf("%+v, %v", got, err)
	}
	in, err := d.Inspect(t.Context(), backend.Ref{UID: sp.UID})
	if err != nil || in.Power != backend.PowerStopped || in.Ref.UID != sp.UID {
		t.Errorf("%+v, %v", in, err)
	}
	if list, err := d.List(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("%+v, %v", list, err)
	}
	if err := d.Destroy(t.Context(), backend.Ref{UID: sp.UID}); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(copied); err != nil || fileExists(whole) || fileExists(trash) {
		t.Errorf("after Destroy: the copy: %v; the sandbox: %v, its trash: %v", err, fileExists(whole), fileExists(trash))
	}
	for _, uid := range []string{"", "../x", "a/../../b", uid(7)} {
		if _, err := d.Inspect(t.Context(), backend.Ref{UID: uid}); agentlab.CodeOf(err) != agentlab.CodeNotFound {
			t.Errorf("%q: %v", uid, err)
		}
	}
}

func TestInitrd(t *testing.T) {
	dir := t.TempDir()
	modules, runner := filepath.Join(dir, "modules.cpio"), filepath.Join(dir, "runner")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	write(modules, "0123456789") // of a length that needs padding
	r := &initrds{dir: filepath.Join(dir, "cache"), runner: runner, boot: "1"}
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
	made, err := stampOf(a)
	if err != nil {
		t.Fatal(err)
	}
	fresh := &initrds{dir: r.dir, runner: runner, boot: r.boot}
	if again, err := fresh.file(t.Context(), modules); again != a || err != nil {
		t.Errorf("another process: %s, %v, want %s", again, err, a)
	}
	if now, err := stampOf(a); now.ino != made.ino || err != nil {
		t.Errorf("another process has made the initrd again: %v", err)
	}
	write(a, "incomplete")                       // a power cut
	for _, boot := range []string{"2", "", ""} { // "": not known
		next := &initrds{dir: r.dir, runner: runner, boot: boot}
		if again, err := next.file(t.Context(), modules); again != a || err != nil {
			t.Errorf("after a restart of the host: %s, %v, want %s", again, err, a)
		}
		if now, err := os.ReadFile(a); !bytes.Equal(now, b) {
			t.Errorf("after a restart of the host the initrd begins %q, %v", now[:min(20, len(now))], err)
		}
		write(a, "incomplete")
	}
	for i := range 10 { // the cache does not grow with each build of agent-runner
		write(runner, strings.Repeat("x", i+1))
		if a, err = r.file(t.Context(), modules); err != nil {
			t.Fatal(err)
		}
	}
	initrds, _ := filepath.Glob(filepath.Join(r.dir, "*.cpio"))
	links, _ := filepath.Glob(filepath.Join(r.dir, "*"+linkSuffix))
	if _, err := os.Stat(a); err != nil || len(initrds) != keepInitrds || len(links) != keepInitrds {
		t.Errorf("%d initrds and %d links are cached, and the last: %v", len(initrds), len(links), err)
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
		e    vmExit
		want string
	}{
		{vmExit{status: killed(syscall.SIGKILL)}, "QEMU was killed by SIGKILL"},
		{vmExit{status: killed(syscall.SIGKILL), oom: true}, "QEMU was killed because the host ran out of memory"},
		{vmExit{status: killed(syscall.SIGSYS)}, "QEMU was killed by its system call filter"},
		{vmExit{status: killed(syscall.SIGABRT), stderr: "a\nassertion failed\n"}, "QEMU was killed by SIGABRT: assertion failed"},
		{vmExit{status: exited(1), stderr: "qemu: no such disk\n"}, "QEMU failed: qemu: no such disk"},
		{vmExit{status: exited(1)}, "QEMU failed"},
		{vmExit{shutdown: "guest-shutdown"}, "the guest powered itself off"},
		{vmExit{shutdown: "guest-reset"}, "the guest reset itself before agent-runner answered"},
		{vmExit{shutdown: "guest-reset", answered: true}, "the guest rebooted itself"},
		{
			vmExit{shutdown: "guest-reset", console: "[1.0] Kernel panic - not syncing: VFS: \x1b[31mno\x07 root\r\n[2.0] next"},
			"guest kernel panic: VFS: [31mno root",
		},
		{vmExit{shutdown: "guest-reset", console: "Kernel panic - not syncing: "}, "guest kernel panic: no reason given"},
		{vmExit{shutdown: "host-qmp-quit"}, "QEMU ended"},
		{vmExit{status: exited(1), stderr: strings.Repeat("ü", 1000)}, "QEMU failed: " + strings.Repeat("ü", 113) + "…"},
	} {
		if got := test.e.end().Reason; got != test.want {
			t.Errorf("%+v: %q, want %q", test.e, got, test.want)
		}
		if e := test.e.end(); e.PoweredOff != (test.want == "the guest powered itself off") || e.Rebooted != (test.want == "the guest rebooted itself") {
			t.Errorf("%+v: %+v", test.e, e)
		}
	}
}

func FuzzReason(f *testing.F) {
	f.Add("Kernel panic - not syncing: x\n", "y")
	f.Add("Kernel panic - not syncing: \xff\x00", "\n\n")
	f.Fuzz(func(t *testing.T, console, stderr string) {
		for _, e := range []vmExit{{shutdown: "guest-reset", console: console}, {status: 0x100, stderr: stderr}} {
			got := e.end().Reason
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
			(&qmp{waiting: map[int]chan qmpMessage{}}).reply(m) // an id without a request
		}
	})
}

// The files of an older version of AgentLab can be started, and a supervisor of
// that version finds what it needs in those of this version.
func TestFilesOfAnOlderVersion(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	dir := d.dir(sp.Ref())
	const start = `{"version":1,"run_id":"old-1","pause_below":5,"reserved":[7],"upstream_proxy":{"url":"http://127.0.0.1:1"},` +
		`"qemu":"/usr/bin/qemu","accel":"tcg","tsc_khz":7,"tsc_fixed":true,"initrd":"/i"}`
	if err := os.WriteFile(filepath.Join(dir, "start.json"), []byte(start), 0o600); err != nil {
		t.Fatal(err)
	}
	vm, err := openVM(dir, supervisor.Hooks{})
	if err != nil {
		t.Fatal(err)
	}
	m := vm.(*machine)
	if m.Network().Mode != sp.Network.Mode || !slices.Equal(m.Disks(), []string{filepath.Join(dir, fileRoot)}) {
		t.Errorf("%+v, %q", m.Network(), m.Disks())
	}
	if b, err := json.Marshal(&m.cfg); err != nil || string(b) != start {
		t.Errorf("written again: %s, %v", b, err)
	}
}
