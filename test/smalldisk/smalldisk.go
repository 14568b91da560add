// Package smalldisk runs a test on a small file system of its own, so that a
// disk that is really full can be tried without filling the machine's.
package smalldisk

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
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
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=8m") //nolint:gosec // this program
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

func mount(dir, size string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	return unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700,size="+size)
}

// Fill writes the file "fill" in dir until less than left bytes are free. A
// left of 0 means until nothing more can be written.
func Fill(t testing.TB, dir string, left int64) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "fill"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600) //nolint:gosec // a test's own
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	block := make([]byte, 64<<10)
	for {
		free := Free(t, dir)
		if left > 0 && free < left {
			return
		}
		_, err := f.Write(block)
		switch {
		case errors.Is(err, unix.ENOSPC) && len(block) > 1:
			block = block[:len(block)/2]
		case errors.Is(err, unix.ENOSPC):
			return
		case err != nil:
			t.Fatal(err)
		}
	}
}

// Free returns how many bytes are free in dir.
func Free(t testing.TB, dir string) int64 {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Bavail) * st.Bsize //nolint:gosec // a small file system's bytes fit
}
