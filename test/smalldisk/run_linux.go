package smalldisk

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const env = "AGENTLAB_TEST_SMALLDISK"

// Run calls fn with the directory of an empty tmpfs of that size, e.g. "256m".
// The test runs again for it, in a process with a mount namespace of its own:
// the file system goes with that process, however it ends. Where the user may
// not make one, the test is skipped with the reason.
func Run(t *testing.T, size string, fn func(t *testing.T, dir string)) {
	t.Helper()
	if dir := os.Getenv(env); dir != "" {
		if err := mount(dir, size); err != nil {
			t.Fatal(err)
		}
		fn(t, dir)
		return
	}
	dir, err := os.MkdirTemp("", "agentlab-disk-*") // short: sockets are made below it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(dir) })
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=8m")
	cmd.Env = append(os.Environ(), env+"="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if uid := os.Geteuid(); uid != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: uid, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}}
	}
	out, err := cmd.CombinedOutput()
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.ENOSYS):
		t.Skipf("skipped: this user may not make a mount namespace: %v", err)
	case err != nil:
		t.Fatalf("on a small disk: %v\n%s", err, out)
	case strings.Contains(string(out), "--- SKIP"):
		t.Skipf("%s", out)
	case !strings.Contains(string(out), "--- PASS"):
		t.Fatalf("the test did not run on the small disk:\n%s", out)
	}
	t.Logf("on a small disk:\n%s", out)
}

// Tmpfs mounts a small file system for the length of a test. resize gives it another
// size. Where the user may not mount one, the test is skipped.
func Tmpfs(t testing.TB, dir, size string) (resize func(size string)) {
	t.Helper()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0700,size="+size); err != nil {
		t.Skipf("skipped: this needs the right to mount: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return func(size string) {
		t.Helper()
		if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT, "size="+size); err != nil {
			t.Fatal(err)
		}
	}
}

func mount(dir, size string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	return unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700,size="+size)
}
