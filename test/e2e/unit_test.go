package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

const unitFile = "../../scripts/systemd/agentlabd.service"

// confinedDaemon starts the lab's daemon as the unit confines it.
func (l *lab) confinedDaemon() *exec.Cmd {
	l.Helper()
	unit, err := filepath.Abs(unitFile)
	if err != nil {
		l.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		l.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd := exec.Command(self, filepath.Join(l.bin, "agentlabd"), "run")
	cmd.Env, cmd.Stderr = append(l.env, envConfine+"="+unit), &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		l.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // the lab ends it
	socket := filepath.Join(l.home, "run", "agentlabd.sock")
	if !eventually(settleLimit, func() bool { _, err := os.Stat(socket); return err == nil || len(ended) > 0 }) || len(ended) > 0 {
		l.Fatalf("the daemon does not start: %s", stderr.String())
	}
	return cmd
}

// status returns one line of /proc/PID/status.
func status(t testing.TB, pid int, key string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(line, key+":"); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// What the unit forbids keeps neither virtual machines nor image builds from
// working: the real daemon runs a job and builds an image with the unit's
// capabilities, system calls, address families and namespaces.
func TestUnderTheUnit(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("the unit is for root")
	}
	for _, need := range []string{"systemd-analyze"} {
		if _, err := exec.LookPath(need); err != nil {
			t.Skipf("%v: it expands the unit's groups of system calls", err)
		}
	}
	if _, err := os.Stat("/usr/include/linux/capability.h"); err != nil {
		t.Skipf("%v: it holds the numbers of capabilities (linux-libc-dev)", err)
	}
	l := newLab(t)
	daemon := l.confinedDaemon()
	if got := status(t, daemon.Process.Pid, "CapBnd"); got == status(t, os.Getpid(), "CapBnd") || status(t, daemon.Process.Pid, "Seccomp") != "2" {
		t.Errorf("the daemon is not confined: capabilities %s", got)
	}

	t.Run("job", func(t *testing.T) {
		id := l.submit("--repo", sampleRepo(t), "--agent", "shell", "--task", "touch begun; while [ ! -e go ]; do sleep 0.2; done; "+mendTask, "--keepalive")
		var pids []int
		if !eventually(commandLimit, func() bool { pids = l.processes("qemu-system"); return len(pids) > 0 }) {
			t.Fatal("QEMU does not run")
		}
		for _, pid := range pids {
			if eff, nnp := status(t, pid, "CapEff"), status(t, pid, "NoNewPrivs"); eff != "0000000000000000" || nnp != "1" {
				t.Errorf("QEMU has capabilities %s, no_new_privs %s", eff, nnp)
			}
		}
		var shown string
		if !eventually(commandLimit, func() bool {
			shown = l.run("", "--json", "job", "show", id).stdout
			return strings.Contains(shown, `"phase": "agent"`) || strings.Contains(shown, `"status": "FAILED"`)
		}) || strings.Contains(shown, `"status": "FAILED"`) {
			t.Fatalf("the agent does not run: %s", tail(shown, 15))
		}
		l.ok("exec", id, "--", "touch", "/tmp/repo/go")
		if j := l.finish(id); j.Status != "COMPLETED" || j.Result.Commits != 1 {
			t.Errorf("%+v", j)
		}
	})
	t.Run("image", func(t *testing.T) {
		recipe := filepath.Join(t.TempDir(), "probe.yaml")
		text := "name: unit-probe\nsuite: bookworm\nsize_gb: 2\npackages: [sudo, openssh-server]\n"
		if err := os.WriteFile(recipe, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		defer l.run("", "image", "remove", "unit-probe")
		if r := l.run("", "image", "build", "unit-probe", "--force", "--recipe", recipe); r.code != 0 {
			t.Errorf("%v", r)
		}
	})
}

// unitProbe runs before the daemon in the very confinement of its unit.
const unitProbe = `#!/bin/bash
say() { if "${@:2}" >/dev/null 2>&1; then echo "$1 yes"; else echo "$1 no"; fi; }
{
say 'write to /etc:' sh -c 'echo x > /etc/x'
say 'write to /usr:' sh -c 'echo x > /usr/local/bin/x'
say 'write to its configuration:' sh -c 'echo x > /etc/agentlab/x'
say 'write to its state:' sh -c 'echo x > /var/lib/agentlab/x'
say 'write to its cache:' sh -c 'echo x > /var/cache/agentlab/x'
say 'see homes:' ls /home/agent/.profile
say 'see /tmp of others:' ls /tmp/of-others
say 'read the disk:' head -c1 /dev/vda
say 'change kernel settings:' sh -c 'echo 1 > /proc/sys/kernel/panic'
say 'change the host name:' hostname other
say 'make namespaces and mounts:' unshare --mount --propagation private --pid --fork mount -t tmpfs x /mnt
say 'make user namespaces:' unshare --user true
say 'make devices:' mknod /var/lib/agentlab/disk b 254 0
say 'make setuid files:' sh -c 'touch /var/lib/agentlab/s && chmod u+s /var/lib/agentlab/s && test -u /var/lib/agentlab/s'
say 'give files away:' sh -c 'touch /var/lib/agentlab/o && chown 1000:1000 /var/lib/agentlab/o'
} > /var/lib/agentlab/probe.txt
`

// The unit as systemd itself carries it out, in a virtual machine: what it is
// to forbid is forbidden, what image builds need is not, the daemon answers,
// and what it started outlives it.
func TestUnitUnderSystemd(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.ok("sandbox", "new", "--name", "host")
	in := func(input []byte, script string) string {
		t.Helper()
		r := l.runInput("", bytes.NewReader(input), "exec", "-i", "host", "--", "sudo", "sh", "-c", script)
		if r.code != 0 {
			t.Fatalf("%s: %v", script, r)
		}
		return r.stdout
	}
	unit, err := os.ReadFile(unitFile)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"agentlab", "agentlabd", "agent-runner"} {
		bin, err := os.ReadFile(filepath.Join(l.bin, "test", name))
		if err != nil {
			t.Fatal(err)
		}
		in(bin, "cat > /usr/local/sbin/"+name+" && chmod 755 /usr/local/sbin/"+name+" && ln -sf /usr/local/sbin/"+name+" /usr/local/bin/"+name)
	}
	in(unit, "cat > /etc/systemd/system/agentlabd.service")
	in([]byte(unitProbe), "mkdir -p /etc/agentlab /etc/systemd/system/agentlabd.service.d && cat > /etc/agentlab/probe.sh && echo 'backend: fake' > /etc/agentlab/config.yaml && touch /tmp/of-others")
	in([]byte("[Service]\nExecStartPre=/bin/bash /etc/agentlab/probe.sh\n"),
		"cat > /etc/systemd/system/agentlabd.service.d/test.conf && systemctl daemon-reload && systemctl start agentlabd || { journalctl -n 30 -u agentlabd --no-pager; systemctl status agentlabd --no-pager; exit 1; }")
	probe := in(nil, "cat /var/lib/agentlab/probe.txt")
	for what, answer := range map[string]string{
		"write to /etc": "no", "write to /usr": "no", "write to its configuration": "yes", "write to its state": "yes", "write to its cache": "yes",
		"see homes": "no", "see /tmp of others": "no", "read the disk": "no", "change kernel settings": "no", "change the host name": "no",
		"make namespaces and mounts": "yes", "make user namespaces": "no", "make devices": "no", "make setuid files": "yes", "give files away": "yes",
	} {
		if !strings.Contains(probe, what+": "+answer+"\n") {
			t.Errorf("%s: want %q", what, answer)
		}
	}
	if t.Failed() {
		t.Log(probe)
	}
	cli := "agentlab --socket /run/agentlab/agentlabd.sock "
	if out := in(nil, cli+"job run --agent shell --task 'echo hello from the unit'"); !strings.Contains(out, "hello from the unit") {
		t.Errorf("a job says %q", out)
	}
	// A process of the unit's group that is not the daemon is left alone.
	out := in(nil, `systemctl show -p KillMode --value agentlabd; p=$(systemctl show -p MainPID --value agentlabd)
sleep 600 & echo $! > /sys/fs/cgroup$(cut -d: -f3 /proc/$p/cgroup)/cgroup.procs
systemctl restart agentlabd && kill -0 $! && echo alive; kill $!; systemctl is-active agentlabd; `+cli+`status >/dev/null && echo answers`)
	if out != "process\nalive\nactive\nanswers\n" {
		t.Errorf("after a restart: %q", out)
	}
	l.ok("sandbox", "destroy", "host")
}
