package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/api"
)

// crashLab is a session in a VM that crashes.
type crashLab struct {
	*lab
	repo string
}

// session returns the session, which has a sandbox.
func (l *crashLab) session() (s api.Session) {
	l.Helper()
	if err := json.Unmarshal([]byte(l.ok("--json", "session", "show", "app")), &s); err != nil || s.SandboxVMID == 0 {
		l.Fatalf("%+v, %v", s, err)
	}
	return s
}

// root runs a script as root in the VM of the session.
func (l *crashLab) root(script string) string {
	l.Helper()
	return l.ok("exec", "--user", "root", "app", "--", "sh", "-c", script)
}

// starts runs 'agentlab start' in the repository, and returns what it prints.
func (l *crashLab) starts() string {
	l.Helper()
	r := l.run(l.repo, "start", "--agent", "none", "--detach")
	if r.code != 0 {
		l.Fatalf("%v", r)
	}
	return r.stderr
}

// killAll kills every process of AgentLab, as a power cut of the host does, and starts
// the daemon again. It reports whether the VM ran.
func (l *crashLab) killAll(vmid int) bool {
	l.Helper()
	if err := l.kill9("agentlabd", "run"); err != nil {
		l.Fatal(err)
	}
	supervisor := l.kill9("agentlabd", "vmm", "/"+strconv.Itoa(vmid)+"-")
	qemu := l.killQEMU(vmid)
	l.Logf("killed: the supervisor (%v), QEMU (%v)", supervisor, qemu)
	l.ok("daemon", "start")
	return supervisor == nil || qemu == nil
}

// fillDisk allocates all blocks of a disk, also those that are reserved for root.
const fillDisk = `mkdir /full; n=0; size=$((64 << 30))
	while [ $size -ge 4096 ]; do
		if fallocate -l $size /full/$n 2>/dev/null; then n=$((n + 1)); else rm -f /full/$n; size=$((size / 2)); fi
	done
	sync; ! echo more > /more 2>/dev/null`

// damageDisk overwrites the start of the root file system, past the cache of the kernel,
// which may panic at once.
const damageDisk = "dd if=/dev/zero of=$(findmnt -no SOURCE /) bs=1M count=1 oflag=direct 2>/dev/null"

// A VM that has crashed in any way starts again from the same disk: what was installed,
// the home directory and other data of root are there. A full disk does not prevent that.
// Only a disk that does not start is replaced, and then every command reaches the new VM.
func TestCrashedVMStartsAgain(t *testing.T) {
	t.Parallel()
	l := &crashLab{newLab(t), filepath.Join(t.TempDir(), "app")}
	l.workProfile("interactive", "base")
	if err := os.Rename(sampleRepo(t), l.repo); err != nil {
		t.Fatal(err)
	}
	l.starts()
	first := l.session()
	const marks = "/usr/local/bin/tool /home/agent/mark /var/lib/docker/volumes/data/mark /workspace/mark"
	l.root(`mkdir -p /var/lib/docker/volumes/data
		for f in ` + marks + `; do echo kept > $f; done; sync`)
	killAll := func() {
		if !l.killAll(first.SandboxVMID) {
			t.Fatal("the VM ran no more")
		}
	}
	for _, crash := range []struct {
		name string
		do   func()
	}{
		{"the VM is killed", func() {
			if err := l.killQEMU(first.SandboxVMID); err != nil {
				t.Fatal(err)
			}
		}},
		{"the kernel panics", func() {
			l.run("", "exec", "--user", "root", "app", "--", "sh", "-c", "sync; echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger")
		}},
		{"everything is killed", killAll},
		{"the disk is full", func() {
			l.root(fillDisk)
			killAll()
		}},
	} {
		crash.do()
		said := l.starts()
		if s := l.session(); s.SandboxVMID != first.SandboxVMID {
			t.Fatalf("%s: another VM: %+v\n%s", crash.name, s, said)
		}
		if got := l.root("cat " + marks); got != strings.Repeat("kept\n", 4) {
			t.Errorf("%s: the files are %q\n%s", crash.name, got, said)
		}
	}
	l.root("rm -r /full; echo more > /more")

	// The guest may end by the damage before the command is reported.
	r := l.run("", "exec", "--user", "root", "app", "--", "sh", "-c", damageDisk)
	t.Logf("damage of the disk: %v", r)
	l.killAll(first.SandboxVMID)
	said := l.starts()
	second := l.session()
	if second.SandboxVMID == first.SandboxVMID || !strings.Contains(said, "does not start again") || !strings.Contains(said, "sandbox "+strconv.Itoa(first.SandboxVMID)) {
		t.Errorf("%+v\n%s", second, said)
	}
	l.reaches(second)
	l.ok("sandbox", "destroy", strconv.Itoa(first.SandboxVMID))
	l.ok("rm", "app", "--force", "--yes")
	l.noSandboxes()
}

// reaches checks that every command for the session reaches its VM.
func (l *crashLab) reaches(s api.Session) {
	l.Helper()
	if got := l.root("hostname; cat /workspace/mark"); got != s.Sandbox+"\nkept\n" {
		l.Errorf("exec: %q, want %q", got, s.Sandbox)
	}
	local := filepath.Join(l.TempDir(), "hostname")
	l.ok("cp", "app:/etc/hostname", local)
	if got, err := os.ReadFile(local); err != nil || strings.TrimSpace(string(got)) != s.Sandbox {
		l.Errorf("cp: %q, %v", got, err)
	}
	if got := l.ok("ssh", "app", "--", "hostname"); strings.TrimSpace(got) != s.Sandbox {
		l.Errorf("ssh: %q", got)
	}
	home := l.TempDir()
	env := append(slices.Clone(l.env), "HOME="+home)
	for _, line := range [][]string{
		{filepath.Join(l.bin, "agentlab"), "ssh-config", "--install", "--yes"},
		{"ssh", "-F", filepath.Join(home, ".ssh", "config"), "app.agentlab", "hostname"},
	} {
		cmd := exec.Command(line[0], line[1:]...)
		cmd.Env = env
		if got, err := cmd.Output(); err != nil || line[0] == "ssh" && strings.TrimSpace(string(got)) != s.Sandbox {
			l.Errorf("%q: %q, %v", line, got, err)
		}
	}
	var sb api.Sandbox
	if err := json.Unmarshal([]byte(l.ok("--json", "sandbox", "show", "app")), &sb); err != nil || sb.VMID != s.SandboxVMID {
		l.Errorf("show: %+v, %v", sb, err)
	}
	if got := l.ok("sandbox", "logs", "app"); got == "" || !strings.HasPrefix(l.ok("sandbox", "logs", strconv.Itoa(s.SandboxVMID)), got) {
		l.Errorf("logs: %q", got)
	}
	l.root("cd /workspace && nohup python3 -m http.server 8000 >/dev/null 2>&1 &")
	if !eventually(settleLimit, func() bool { return strings.Contains(l.ok("port", "list", "app"), "8000") }) {
		l.Errorf("port list: %s", l.ok("port", "list", "app"))
	}
}
