package e2e

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/u-root/u-root/pkg/cpio"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/test/sample"
)

const nestedProfile = `name: nested
resources:
  cores: 2
  memory_mb: 1536
  nested: on
`

// nestedInit is the init of the nested guest: it counts, or takes all memory. The kernel
// prints its messages: what a program writes to the console needs interrupts, and can be
// lost when the guest ends.
const nestedInit = `package main

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"
)

func main() {
	_ = os.Mkdir("/proc", 0o755)
	_ = syscall.Mount("proc", "/proc", "proc", 0, "")
	cmdline, _ := os.ReadFile("/proc/cmdline")
	kmsg, err := os.OpenFile("/dev/kmsg", os.O_WRONLY, 0)
	say := func(args ...any) { fmt.Fprint(kmsg, "<2>"+fmt.Sprintln(args...)) }
	if err != nil {
		panic(err)
	}
	say("the nested guest runs")
	var hold [][]byte
	for n := 0; strings.Contains(string(cmdline), "nest=eat"); n++ {
		b := make([]byte, 16<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = byte(n + 1)
		}
		hold = append(hold, b)
		say("nested guest has", 16*len(hold), "MiB")
	}
	for n := 1; strings.Contains(string(cmdline), "nest=count"); n++ {
		say("nested guest counts", n)
		time.Sleep(time.Second)
	}
	_ = syscall.Reboot(syscall.LINUX_REBOOT_CMD_RESTART)
}
`

// nestedRun starts the nested guest as agent, with KVM and nothing else.
const nestedRun = `#!/bin/sh
cd /tmp/nest
exec ./ld.so --library-path /tmp/nest/lib ./qemu-system-x86_64 -L /tmp/nest/share -nodefaults -no-user-config -display none -no-reboot \
    -machine microvm,isa-serial=on,rtc=on,accel=kvm -cpu host -smp 1 -m "$2" \
    -kernel vmlinux -initrd initrd -append "console=ttyS0 panic=-1 reboot=t tsc=reliable quiet printk.devkmsg=on nest=$1" -serial stdio
`

var libraryRE = regexp.MustCompile(`/[^ ()]+`)

// nest returns an archive with QEMU of this host, the kernel of an image, and the
// nested guest. Programs in the sandbox need nothing else.
func nest(t testing.TB, kernel string) []byte {
	t.Helper()
	dir := t.TempDir()
	src, bin := filepath.Join(dir, "init.go"), filepath.Join(dir, "init")
	if err := os.WriteFile(src, []byte(nestedInit), 0o600); err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-o", bin, src)
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-p=2")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	program, err := os.ReadFile(bin)
	if err != nil {
		t.Fatal(err)
	}
	var initrd bytes.Buffer
	records := []cpio.Record{
		cpio.Directory("dev", 0o755), cpio.CharDev("dev/console", 0o600, 5, 1), cpio.CharDev("dev/kmsg", 0o600, 1, 11), cpio.StaticFile("init", string(program), 0o755),
	}
	archive := cpio.Newc.Writer(&initrd)
	if err := cpio.WriteRecords(archive, records); err != nil {
		t.Fatal(err)
	}
	if err := cpio.WriteTrailer(archive); err != nil {
		t.Fatal(err)
	}
	qemu, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		t.Skip("skipped: qemu-system-x86_64 is not installed")
	}
	files := map[string]string{"qemu-system-x86_64": qemu, "vmlinux": kernel}
	libs, err := exec.Command("ldd", qemu).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, lib := range libraryRE.FindAllString(string(libs), -1) {
		if strings.Contains(lib, "/ld-linux") {
			files["ld.so"] = lib
		}
		files["lib/"+filepath.Base(lib)] = lib
	}
	for _, rom := range []string{"bios-microvm.bin", "linuxboot_dma.bin", "pvh.bin", "qboot.rom"} {
		for _, where := range []string{"/usr/share/qemu", "/usr/share/seabios"} {
			if path := filepath.Join(where, rom); exists(path) {
				files["share/"+rom] = path
			}
		}
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	add := func(name string, data []byte) {
		if err := w.WriteHeader(&tar.Header{Name: "nest/" + name, Mode: 0o755, Size: int64(len(data))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	for name, path := range files {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		add(name, data)
	}
	add("initrd", initrd.Bytes())
	add("run", []byte(nestedRun))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

// imageKernel returns the kernel of the image of a sandbox.
func (l *lab) imageKernel(sb api.Sandbox) string {
	name, digest, _ := strings.Cut(sb.Image, "@")
	found, err := filepath.Glob(filepath.Join(cacheDir(l), "images", name, digest+"*", "vmlinux"))
	if err != nil || len(found) == 0 {
		l.Fatalf("no kernel of image %s", sb.Image)
	}
	return found[0]
}

// shell runs a command in a sandbox as agent, without a terminal.
func (l *lab) shell(sandbox string, stdin io.Reader, command string) result {
	l.Helper()
	args := []string{"exec", "-i", sandbox, "--", "sh", "-c", command}
	if stdin == nil {
		args = append(args[:1], args[2:]...)
	}
	return l.runInput("", stdin, args...)
}

// A virtual machine boots in a sandbox with hardware virtualization, started by an
// ordinary user. It is not affected by a sync of the sandbox. One that takes all memory
// is killed, and the sandbox continues.
func TestNestedVM(t *testing.T) {
	sample.OnlyFull(t, "the emulation of a virtual machine in an emulated one takes minutes")
	t.Parallel()
	l := newLab(t)
	l.profile("nested", nestedProfile)
	repo := sampleRepo(t)
	if r := l.run(repo, "start", "--profile", "nested", "--agent", "none", "--detach"); r.code != 0 {
		t.Fatal(r)
	}
	var list api.List[api.Sandbox]
	if err := json.Unmarshal([]byte(l.ok("--json", "sandbox", "list")), &list); err != nil || len(list.Items) != 1 {
		t.Fatalf("%+v %v", list.Items, err)
	}
	sb := list.Items[0]
	if sb.Nested != "on" || sb.NestedState != "works" || sb.NestedReason != "" {
		t.Errorf("nested %q, state %q, reason %q", sb.Nested, sb.NestedState, sb.NestedReason)
	}
	if r := l.shell(sb.Name, bytes.NewReader(nest(t, l.imageKernel(sb))), "tar xf - -C /tmp && cat /proc/self/cgroup"); r.code != 0 || r.stdout != "0::/agentlab.slice/agents\n" {
		t.Fatal(r)
	}

	if r := l.shell(sb.Name, nil, "sh /tmp/nest/run once 256"); r.code != 0 || !strings.Contains(r.stdout, "the nested guest runs") {
		t.Fatal(r)
	}

	l.ok("exec", sb.Name, "--", "sh", "-c", "setsid sh /tmp/nest/run count 256 >/tmp/nest/count.log 2>&1 </dev/null &")
	counted := func() string {
		out := l.shell(sb.Name, nil, "grep -a 'nested guest counts' /tmp/nest/count.log | tail -n 1").stdout
		return strings.TrimSpace(out)
	}
	if !eventually(commandLimit, func() bool { return counted() != "" }) {
		t.Fatal(l.shell(sb.Name, nil, "cat /tmp/nest/count.log"))
	}
	if !eventually(settleLimit, func() bool {
		return strings.Contains(l.shell(sb.Name, nil, "cat /proc/$(pgrep -o -x ld.so)/cgroup").stdout, "nested")
	}) {
		t.Error("the nested guest has no limit of its own")
	}
	if r := l.shell(sb.Name, nil, "cat /proc/$(pgrep -o -x ld.so)/cgroup /proc/$(pgrep -o -x ld.so)/oom_score_adj"); r.stdout != "0::/agentlab.slice/agentlab-nested.slice/guests\n1000\n" {
		t.Error(r)
	}
	l.ok("exec", sb.Name, "--", "sh", "-c", "cd /workspace && echo nested > nested.txt && git add . && git -c user.name=a -c user.email=a@example.com commit -qm Nested")
	if r := l.run(repo, "sync"); r.code != 0 || !exists(filepath.Join(repo, "nested.txt")) {
		t.Error(r)
	}
	before := counted()
	if !eventually(settleLimit, func() bool { return counted() != before }) {
		t.Errorf("the nested guest stopped at %q after a sync", before)
	}

	boot := l.ok("exec", sb.Name, "--", "cat", "/proc/sys/kernel/random/boot_id")
	r := l.shell(sb.Name, nil, "sh /tmp/nest/run eat 1200")
	if r.code != 137 || !strings.Contains(r.stdout, "nested guest has 64 MiB") {
		t.Errorf("a nested guest that takes all memory: %v", r)
	}
	if now := l.ok("exec", sb.Name, "--", "cat", "/proc/sys/kernel/random/boot_id"); now != boot {
		t.Error("the sandbox was restarted")
	}
	if console := l.ok("sandbox", "logs", sb.Name); !strings.Contains(console, "of nested guests: the memory that these may have was used up") {
		t.Errorf("the console does not have the reason:\n%s", tail(console, 20))
	}
	l.ok("sandbox", "show", sb.Name)
}

// nestedHog is a program that opens the device of the hypervisor, as QEMU does, and
// takes all memory.
const nestedHog = `python3 - <<'END' || echo "it ended with $?"
import time
device = open('/dev/kvm', 'rb+', 0)
while 'agentlab-nested.slice/guests' not in open('/proc/self/cgroup').read():
    time.sleep(0.1)
hold = []
while True:
    hold.append(b'x' * (16 << 20))
END
`

// The reason for the end of a nested guest is in the log and the events of a job.
func TestNestedMemoryOfAJob(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.profile("nested", nestedProfile)
	j, r := l.job("--profile", "nested", "--agent", "shell", "--task", nestedHog)
	if j.Status != "COMPLETED" {
		t.Errorf("%+v\n%v", j, r)
	}
	const reason = "the kernel of the sandbox has killed 1 process of nested guests: the memory that these may have was used up"
	if log := l.ok("job", "logs", j.ID); !strings.Contains(log, "it ended with 137\n") || !strings.Contains(log, "[agentlab] "+reason) {
		t.Errorf("log:\n%s", log)
	}
	if events := l.ok("events", "--job", j.ID); !strings.Contains(events, reason) {
		t.Errorf("events:\n%s", events)
	}
}

// On a host that provides no virtualization a sandbox that can do without starts with a
// warning, and one that cannot is not created.
func TestNestedSwitchedOff(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.profile("nested", nestedProfile)
	l.profile("perhaps", strings.NewReplacer("name: nested", "name: perhaps", "nested: on", "nested: auto").Replace(nestedProfile))
	l.profile("plain", strings.NewReplacer("name: nested", "name: plain", "  nested: on\n", "").Replace(nestedProfile))
	l.config("qemu:\n  nested: false\n")

	const look = "grep -c -w -e svm -e vmx /proc/cpuinfo || true; ls /dev/kvm || true"
	j, r := l.job("--profile", "perhaps", "--agent", "shell", "--task", look)
	if j.Status != "COMPLETED" || !strings.Contains(r.stderr, "warning: virtual machines do not run in sandbox "+j.ID) ||
		!strings.Contains(r.stderr, "set qemu.nested: true in config.yaml") {
		t.Errorf("%+v\n%v", j, r)
	}
	if log := l.ok("job", "logs", j.ID); !strings.Contains(log, "0\n") {
		t.Errorf("the CPUs have virtualization:\n%s", log)
	}
	for _, args := range [][]string{
		{"job", "run", "--profile", "nested", "--agent", "shell", "--task", "true"},
		{"sandbox", "new", "--profile", "nested"},
	} {
		if refused := l.run("", args...); refused.code != 1 || !strings.Contains(refused.stderr, "no nested virtualization: it is switched off on this host") {
			t.Errorf("%v: %v", args, refused)
		}
	}
	l.noSandboxes()

	r = l.run("", "sandbox", "new", "--name", "plain", "--profile", "plain")
	if r.code != 0 || strings.Contains(r.stderr, "virtual machines") {
		t.Error(r)
	}
	if r := l.shell("plain", nil, look); strings.TrimSpace(r.stdout) != "0" {
		t.Errorf("without the key: %v", r)
	}
}
