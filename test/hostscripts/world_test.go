// Package hostscripts runs the scripts of a host (scripts/) against a host of
// their own: a copy of this machine's root in an overlay, with network
// namespace, /proc and /run of its own, in which the kernel, ip, nft and
// AgentLab's programs are real. What a test machine lacks (systemd, ifupdown2,
// Tailscale, Proxmox VE) is imitated by stand-ins that refuse whatever the real
// programs do not have.
package hostscripts

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/sample"
)

const root = "../.."

// built are AgentLab's own programs, made once; agentlabd is that of the tests,
// which has the fake backend.
func built() (string, error) {
	return guard.Programs(root, "./cmd/agentlab", "./test/agentlabd", "./cmd/agent-runner")
}

// standIns are the programs that this test binary takes the place of, by the
// name that it is called with.
var standIns = map[string]func(args []string) error{
	"systemctl": systemctl, "ifup": ifup, "ifdown": ifdown, "tailscale": tailscale, "pveum": pveum, "pvesh": pvesh, "runuser": runuser,
}

func TestMain(m *testing.M) {
	if f := standIns[filepath.Base(os.Args[0])]; f != nil {
		os.Exit(standIn(f, os.Args[1:]))
	}
	os.Exit(guard.Run(m))
}

// host is one such host.
type host struct {
	*testing.T
	dir    string // its root as this machine sees it
	pid    string // of the process that holds its namespaces
	chroot string // its root in its own mount namespace
}

const hold = `set -e
mount -t tmpfs -o size=8g tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount --rbind /dev dev
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mkdir -p run/lock
rm -rf etc/agentlab var/lib/agentlab var/cache/agentlab var/log/agentlab usr/local/lib/agentlab usr/local/share/agentlab etc/network
rm -f usr/local/bin/agentlab* usr/local/bin/agent-runner etc/systemd/system/agentlab* etc/sysctl.d/80-agentlab.conf
sed -i /^agentlab:/d etc/group etc/gshadow 2>/dev/null || true
ip link set lo up
echo ready
exec sleep infinity`

// newHost makes one with the programs and the scripts in /opt/agentlab, as they
// come out of a release, and with the stand-ins that are named.
func newHost(t *testing.T, with ...string) *host {
	t.Helper()
	return begin(t, hold, with...)
}

// begin makes a host by a shell script that says "ready" when its root is at
// $1/root, and ends with the program that holds the namespaces.
func begin(t *testing.T, hold string, with ...string) *host {
	t.Helper()
	sample.Long(t, "it runs scripts of a host")
	if os.Geteuid() != 0 {
		t.Skip("a host of its own takes root")
	}
	programs, err := built()
	if err != nil {
		t.Fatal(err)
	}
	base := t.TempDir()
	var said bytes.Buffer
	group := controlGroup(t)
	cmd := exec.Command("bash", "-c", `[ -z "$0" ] || echo $$ >"$0/cgroup.procs"; exec "$@"`, group, "unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--cgroup", "--fork", "--kill-child", "--propagation", "private", "bash", "-c", hold, "hold", base)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	h := &host{T: t}
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // with its process 1 all in it ends
		_ = cmd.Wait()
	})
	if b := make([]byte, 6); func() bool { _, err = out.Read(b); return err != nil || string(b) != "ready\n" }() {
		t.Skipf("no host of its own can be made here (overlay, namespaces): %v %s", err, said.String())
	}
	// The process that holds the namespaces is the child of unshare.
	kids, err := os.ReadFile(filepath.Join("/proc", itoa(cmd.Process.Pid), "task", itoa(cmd.Process.Pid), "children"))
	if err != nil {
		t.Fatal(err)
	}
	h.pid = strings.TrimSpace(string(kids))
	h.chroot = filepath.Join(base, "root")
	h.dir = filepath.Join("/proc", h.pid, "root", h.chroot)
	h.tree("scripts", "skills", "profiles", "images")
	for _, p := range []string{"agentlab", "agentlabd", "agent-runner"} {
		h.install(filepath.Join(programs, p), "/opt/agentlab/bin/"+p)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	h.install(self, "/opt/stand-in")
	for _, name := range with {
		if err := os.Symlink("/opt/stand-in", filepath.Join(h.dir, "usr/local/sbin", name)); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

// controlGroup makes a group of its own for a host whose process 1 makes groups;
// "" where that cannot be.
func controlGroup(t *testing.T) string {
	t.Helper()
	mounts, _ := os.ReadFile("/proc/self/mounts")
	own, _ := os.ReadFile("/proc/self/cgroup")
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if len(f) < 3 || f[2] != "cgroup2" {
			continue
		}
		path := "/"
		for line := range strings.Lines(string(own)) {
			if p, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
				path = p
			}
		}
		dir, err := os.MkdirTemp(filepath.Join(f[1], path), "agentlab-hostscripts-")
		if err != nil {
			return ""
		}
		t.Cleanup(func() { // groups can be removed a moment after their last process
			for deadline := time.Now().Add(guard.Patience); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
				_ = exec.Command("find", dir, "-depth", "-type", "d", "-exec", "rmdir", "{}", ";").Run()
				if _, err := os.Stat(dir); err != nil {
					return
				}
			}
			t.Errorf("the control group %s is left", dir)
		})
		return dir
	}
	return ""
}

// tree copies directories of the repository.
func (h *host) tree(names ...string) {
	h.Helper()
	if err := os.MkdirAll(filepath.Join(h.dir, "opt/agentlab"), 0o755); err != nil {
		h.Fatal(err)
	}
	for _, name := range names {
		if out, err := exec.Command("cp", "-a", filepath.Join(root, name), filepath.Join(h.dir, "opt/agentlab/")).CombinedOutput(); err != nil {
			h.Fatal(string(out))
		}
	}
}

// install copies a program.
func (h *host) install(from, to string) {
	h.Helper()
	if out, err := exec.Command("install", "-D", "-m", "0755", from, filepath.Join(h.dir, to)).CombinedOutput(); err != nil {
		h.Fatal(string(out))
	}
}

// write puts a file there; its directory is made.
func (h *host) write(path, text string) {
	h.Helper()
	full := filepath.Join(h.dir, path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		h.Fatal(err)
	}
	if err := os.WriteFile(full, []byte(text), 0o600); err != nil {
		h.Fatal(err)
	}
}

// read returns a file; "" when it is not there.
func (h *host) read(path string) string {
	h.Helper()
	text, err := os.ReadFile(filepath.Join(h.dir, path))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		h.Fatal(err)
	}
	return string(text)
}

func (h *host) has(path string) bool {
	_, err := os.Lstat(filepath.Join(h.dir, path))
	return err == nil
}

// result is what a program did.
type result struct {
	stdout, stderr string
	code           int
}

// commands are the lines that begin with "+ ".
func (r result) commands() []string {
	var out []string
	for line := range strings.Lines(r.stdout) {
		if c, ok := strings.CutPrefix(strings.TrimRight(line, "\n"), "+ "); ok {
			out = append(out, c)
		}
	}
	return out
}

// do runs a program on the host.
func (h *host) do(args ...string) result {
	h.Helper()
	cmd := exec.Command("nsenter", append([]string{"--target", h.pid, "--mount", "--net", "--uts", "--ipc", "--pid", "--cgroup", "--", "chroot", h.chroot,
		"/usr/bin/env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"}, args...)...)
	var r result
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = 5 * time.Second // a daemon that was started keeps the pipes
	err := cmd.Run()
	r.stdout, r.stderr = stdout.String(), stderr.String()
	exit, failed := errors.AsType[*exec.ExitError](err)
	switch {
	case failed:
		r.code = exit.ExitCode()
	case err != nil && !errors.Is(err, exec.ErrWaitDelay):
		h.Fatal(err)
	}
	return r
}

// script runs a script of the release.
func (h *host) script(args ...string) result {
	h.Helper()
	args[0] = "/opt/agentlab/scripts/" + args[0]
	return h.do(args...)
}

// ok runs a program that must succeed.
func (h *host) ok(args ...string) string {
	h.Helper()
	r := h.do(args...)
	if r.code != 0 {
		h.Fatalf("%q: %d\n%s%s", args, r.code, r.stdout, r.stderr)
	}
	return r.stdout
}

// applied runs a script dry, which must change nothing, then really, and then
// dry again, which must find nothing to do. It returns what was run.
func (h *host) applied(args ...string) []string {
	h.Helper()
	name := args[0]
	before := h.changes()
	dry := h.script(append([]string{}, args...)...)
	if dry.code != 0 {
		h.Fatalf("%q: %d\n%s%s", args, dry.code, dry.stdout, dry.stderr)
	}
	differ(h.T, "changed without --apply", before, h.changes())
	done := h.script(append(append([]string{}, args...), "--apply")...)
	if done.code != 0 {
		h.Fatalf("%q --apply: %d\n%s%s", args, done.code, done.stdout, done.stderr)
	}
	h.settled(append([]string{name}, args[1:]...)...)
	return dry.commands()
}

// settled checks that a script has nothing to do.
func (h *host) settled(args ...string) {
	h.Helper()
	name := args[0]
	for _, extra := range []string{"--dry-run", "--apply"} {
		args[0] = name
		if r := h.script(append(append([]string{}, args...), extra)...); r.code != 0 || len(r.commands()) > 0 {
			h.Errorf("%q again: %d\n%s%s", args, r.code, r.stdout, r.stderr)
		}
	}
}

// changes describes what was written on the host, and its network: what a
// script could change, and nothing that changes by itself. So duplicate address
// detection, which ends some time after an address was given, does not show,
// nor what the rules have counted, nor what a daemon that runs has written.
func (h *host) changes() string {
	h.Helper()
	net := h.ok("bash", "-c", "ip -o addr | grep -v fe80; ip -o link | cut -d: -f2; nft --stateless list ruleset; cat /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv6/conf/all/forwarding")
	return strings.Join(h.written(), "\n") + "\n" + detection.ReplaceAllString(net, "")
}

var detection = regexp.MustCompile(`\b(tentative|optimistic|dadfailed) `)

// written are the files that the host has and this machine's root has not. Of a
// directory that a running daemon writes to, it tells what is in it, but not
// what is below, how long or how old.
func (h *host) written() []string {
	h.Helper()
	upper := filepath.Join(filepath.Dir(h.dir), "upper")
	var lines []string
	err := filepath.WalkDir(upper, func(full string, entry fs.DirEntry, err error) error {
		path := strings.TrimPrefix(full, upper)
		owner := h.daemonOf(path)
		if owner != "" && errors.Is(err, fs.ErrNotExist) {
			return nil // the daemon has just removed it
		}
		if err != nil {
			return err
		}
		if owner != "" && filepath.Dir(path) != owner && path != owner {
			return fs.SkipDir
		}
		info, err := entry.Info()
		if owner != "" && errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		line := path + " " + info.Mode().String()
		if owner == "" {
			target, _ := os.Readlink(full)
			line += fmt.Sprintf(" %d %s %s", info.Size(), info.ModTime().Format(time.RFC3339Nano), target)
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		h.Fatal(err)
	}
	return lines
}

// daemonOf is the directory with this path that a running daemon writes to; ""
// when there is none, or no daemon runs.
func (h *host) daemonOf(path string) string {
	h.Helper()
	for _, dir := range []string{"/var/lib/agentlab", "/var/log/agentlab", "/var/cache/agentlab"} {
		if (path == dir || strings.HasPrefix(path, dir+"/")) && h.has("/run/systemd/system/pid-agentlabd.service") {
			return dir
		}
	}
	return ""
}

// differ tells what two descriptions have not in common.
func differ(t *testing.T, what, before, after string) {
	t.Helper()
	old, now := strings.Split(before, "\n"), strings.Split(after, "\n")
	for _, line := range now {
		if !slices.Contains(old, line) {
			t.Errorf("%s: %s", what, line)
		}
	}
	for _, line := range old {
		if !slices.Contains(now, line) {
			t.Errorf("%s: it was %s", what, line)
		}
	}
	if len(old) != len(now) {
		t.Errorf("%s: %d lines were %d", what, len(now), len(old))
	}
}
