//go:build linux

package image

import (
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/images"
)

// escape is what a hostile program in the tree does: as far as it may it
// leaves a chroot in the classic way, and it looks for the host where it could
// show. It says LEAK for all that it finds.
const escape = `
import os, sys
marker = sys.argv[1]
def look(where):
    if os.path.lexists(marker) or os.path.lexists('/proc/1/root' + marker): print('LEAK', where, marker)
look('at once')
for d in sorted(os.listdir('/dev')):
    if d not in 'fd full null random shm stderr stdin stdout urandom zero'.split(): print('LEAK device', d)
for line in open('/proc/self/mountinfo'):
    if line.split()[4].split('/')[1] not in ['', 'dev', 'proc', 'run', 'tmp'] and line.split()[4] not in ['/var/tmp', '/etc/passwd', '/etc/group']: print('LEAK mount', line)
try:
    os.mkdir('/tmp/x'); os.chroot('/tmp/x')
    for _ in range(40): os.chdir('..')
    os.chroot('.')
    print('LEFT chroot')
except OSError: print('STAYED')
look('after chroot')
`

// hostileStep is a step of a recipe that tries what it may not.
const hostileStep = `
test "$(id -un)" = agent || echo LEAK user
python3 - PORT <<'EOT'
import socket, sys
try:
    socket.create_connection(('127.0.0.1', int(sys.argv[1])), 2)
    print('LEAK network')
except OSError: print('ALONE')
EOT
ln /etc/shadow /usr/local/stolen && echo LEAK link
ln /etc/passwd /usr/local/stolen && echo LEAK link
touch /etc/x && echo LEAK write
cat /run/build/setup.sh && echo LEAK build
cp /bin/sh /usr/local/sh && chmod 6777 /usr/local/sh
sleep 1000 &
setsid sleep 1000 &
echo $! >/work/left
`

// neighbour looks for the user of the host who has the same number: for the
// keys of the user and of the session, and for the user's processes. It prints
// the number that the kernel has for it.
const neighbour = `
import ctypes, os, platform
libc = ctypes.CDLL(None)
number = {'x86_64': 250, 'aarch64': 219}[platform.machine()]
for name, keyring in [('session', -3), ('user', -4), ('user session', -5)]:
    if libc.syscall(number, 10, keyring, b'user', b'KEY', 0) >= 0: print('LEAK key of the', name) # KEYCTL_SEARCH
for pid in [PIDS]:
    try:
        os.kill(pid, 0)
        print('LEAK process', pid)
    except ProcessLookupError: pass
print('NUMBER', open('/proc/self/uid_map').read().split()[1], os.getuid())
`

// neighbours puts a key into the session keyring of the calling thread, and, if
// this is the host's root, one into the keyring of each of the users who run
// the programs of a build elsewhere: 1000 and 65534. It also starts a process of
// each. It returns the text of neighbour for them.
func neighbours(t *testing.T) string {
	t.Helper()
	key := "agentlab-test-" + rand.Text()
	add := func(keyring int) error {
		id, err := unix.AddKey("user", key, []byte("x"), keyring)
		if err == nil {
			_, err = unix.KeyctlInt(unix.KEYCTL_SET_TIMEOUT, id, 600, 0, 0)
		}
		return err
	}
	if _, err := unix.KeyctlInt(unix.KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	if err := add(unix.KEY_SPEC_SESSION_KEYRING); err != nil {
		t.Fatal(err)
	}
	pids := ""
	for _, uid := range []int{1000, 65534} {
		if os.Geteuid() != 0 {
			break
		}
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // for good: the thread has another user now
			if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); e != 0 {
				done <- e
				return
			}
			done <- add(unix.KEY_SPEC_USER_KEYRING)
		}()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), "sleep", "1000")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		pids += fmt.Sprint(cmd.Process.Pid, ",")
	}
	return strings.NewReplacer("KEY", key, "PIDS", pids).Replace(neighbour)
}

// finishHostile runs finish.sh on a tree with a hostile setup.sh and a hostile
// command, and returns what they say.
func finishHostile(t *testing.T, tree string, edit func(string) string) string {
	t.Helper()
	b := &builder{work: t.TempDir()}
	marker := filepath.Join(b.work, "marker")
	script, err := images.Scripts.ReadFile("build/finish.sh")
	if err != nil {
		t.Fatal(err)
	}
	enter, err := images.Scripts.ReadFile("build/enter.sh")
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	_, port, _ := net.SplitHostPort(l.Addr().String()) // it has one
	runtime.LockOSThread()                             // which has the session keyring
	defer runtime.UnlockOSThread()
	neighbours := "/usr/bin/python3 - <<'EOT'" + neighbours(t) + "EOT\n"
	run := "cat > /tmp/escape.py <<'EOT'" + escape + "EOT\n/usr/bin/python3 /tmp/escape.py " + marker + " || echo FAILED\n"
	for path, text := range map[string]string{
		"marker": "the host", "finish.sh": edit(string(script)), "enter.sh": string(enter), "kind": "direct\n", "commands": "hostile\n",
		"setup.sh": "cp -R --preserve=mode --no-preserve=ownership /run/build/npm/. /usr/local/\n" + run + "rm -rf /tmp/x /tmp/escape.py\n",
		"run/01":   strings.Replace(hostileStep, "PORT", port, 1) + neighbours,
		"seal.sh":  run + "rm -rf /tmp/x /tmp/escape.py; stat -c 'SH %a %U' /usr/local/sh; echo OWN $(stat -c %u:%g /work /work/left /usr/local/sh); rm -f /usr/local/sh; ls /proc/*/comm | xargs cat | grep sleep && echo LEAK process\n:\n",
		"npm/bin/hostile": "#!/bin/sh\n" + run + neighbours +
			"id; grep -E 'Cap(Eff|Prm|Bnd)|NoNewPrivs' /proc/self/status; sudo -n id && echo LEAK sudo; touch /etc/x && echo LEAK write; touch /usr/local/x && echo LEAK write; ls /run/build && echo LEAK build; ls /sys/class/net; echo x >/proc/sys/kernel/core_pattern && echo LEAK sysctl; :\n",
	} {
		if err := writeFile(b.path(path), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(b.path("npm", "bin", "hostile"), 0o755); err != nil {
		t.Fatal(err)
	}
	argv := isolated("unshare", "--net", "--ipc", "--uts", "sh", b.path("finish.sh"), b.work, tree)
	cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	cmd.Env = buildEnv(t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out) + readTrimmed(b.path("versions", "hostile"))
}

// downloader takes pip's place in a tree. It looks for a terminal, and says
// what it is and what fetch.sh tells it.
const downloader = `#!/bin/sh
echo "AS $(id -u)"
read -r pid _ _ _ _ session _ </proc/$$/stat
test "$pid" = "$session" || echo LEAK session
(: </dev/tty) 2>/dev/null && echo LEAK tty
grep agentlab-test- /proc/keys && echo LEAK key
echo "INDEX $PIP_EXTRA_INDEX_URL"
`

// fetchHostile runs fetch.sh on a tree with a hostile downloader.
func fetchHostile(t *testing.T, tree, index string) (string, error) {
	t.Helper()
	runtime.LockOSThread() // which has the session keyring
	defer runtime.UnlockOSThread()
	neighbours(t)
	b := &builder{work: t.TempDir()}
	if err := os.Chmod(b.work, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"fetch.sh", "enter.sh"} {
		text, err := images.Scripts.ReadFile("build/" + name)
		if err != nil {
			t.Fatal(err)
		}
		if err := writeFile(b.path(name), string(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := writeFile(b.path("pip.specs"), "hostile==1\n", 0o644); err != nil {
		t.Fatal(err)
	}
	if err := writeFile(b.path("npm", "bin", "python3"), "#!/bin/sh\necho LEAK a package of npm runs\n", 0o755); err != nil {
		t.Fatal(err)
	}
	argv := isolated("sh", "-c", `rm -f "$2/usr/bin/python3" && printf %s "$0" >"$2/usr/bin/python3" && chmod 0755 "$2/usr/bin/python3" && exec sh "$1/fetch.sh" "$1" "$2"`, downloader, b.work, tree)
	cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	cmd.Env = append(buildEnv(t.TempDir()), "PIP_EXTRA_INDEX_URL="+index)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// Programs in the tree find nothing of the host, whatever they are run as.
func TestFinishConfines(t *testing.T) {
	img := builtImage(t, "base")
	tree := filepath.Join(t.TempDir(), "tree")
	// Its files belong to the owners in the namespace.
	argv := isolated("sh", "-c", `mkdir "$1" && "$0" -R "rdump / $1" "$2"`, lookPath("debugfs"), tree, img.RootDisk())
	if out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Cleanup(func() {
		argv := isolated("rm", "-rf", tree)
		_ = exec.Command(argv[0], argv[1:]...).Run()
	})
	asShipped := func(s string) string { return s }
	// Not even root with all privileges gets out by way of another chroot.
	privileged := func(s string) string {
		changed := strings.Replace(s, "setpriv --no-new-privs --inh-caps=-all --bounding-set=-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setuid,+setgid,+setfcap", "env", 1)
		if changed == s {
			t.Fatal("finish.sh has no privileges to change")
		}
		return changed
	}
	for _, tc := range []struct {
		name string
		edit func(string) string
		want []string
	}{
		{"as shipped", asShipped, []string{"STAYED", "uid=65533(agent) gid=65533(agent) groups=65533(agent)\n", " 65533\n", "OWN 1000:1000 1000:1000 0:0", "CapBnd:\t0000000000000000", "CapPrm:\t0000000000000000", "NoNewPrivs:\t1", "ALONE", "SH 755 root"}},
		{"with all privileges", privileged, []string{"LEFT chroot", "ALONE", "SH 755 root"}},
	} {
		got := finishHostile(t, tree, tc.edit)
		if strings.Contains(got, "LEAK") || strings.Contains(got, "FAILED") {
			t.Errorf("%s: the host shows:\n%s", tc.name, got)
		}
		for _, want := range tc.want {
			if !strings.Contains(got, want) {
				t.Errorf("%s: no %q in\n%s", tc.name, want, got)
			}
		}
	}
	const index = "https://user:p$a`ss@one.example/simple http://two.example/simple?a=b&c"
	got, err := fetchHostile(t, tree, index)
	if err != nil || strings.Contains(got, "LEAK") || !strings.Contains(got, "AS 65532\n") || !strings.Contains(got, "INDEX "+index+"\n") {
		t.Errorf("the downloader says, %v:\n%s", err, got)
	}
	// The public index may have other packages under the same names.
	if got, err := fetchHostile(t, tree, "https://it's.example/"); err == nil || strings.Contains(got, "INDEX https") || !strings.Contains(got, "E: the variable PIP_EXTRA_INDEX_URL") {
		t.Errorf("an index with a quote: %v\n%s", err, got)
	}
}
