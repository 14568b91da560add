//go:build linux

package cli

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A relative XDG_RUNTIME_DIR is ignored, even where it names a tmpfs.
func TestPrivateMemoryIgnoresRelativeRuntimeDir(t *testing.T) {
	const memory = "/dev/shm"
	var fs unix.Statfs_t
	if err := unix.Statfs(memory, &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		t.Skipf("%s is not a tmpfs here (%v)", memory, err)
	}
	dir, err := os.MkdirTemp(memory, "agentlab-test-*")
	if err != nil {
		t.Skipf("%s is not writable here: %v", memory, err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	t.Chdir(dir)
	t.Setenv("XDG_RUNTIME_DIR", ".")
	got, err := privateMemory()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(got) })
	if !filepath.IsAbs(got) || filepath.Dir(got) == dir {
		t.Errorf("the directory is %s, made for the relative XDG_RUNTIME_DIR", got)
	}
	t.Setenv("XDG_RUNTIME_DIR", dir)
	if got, err := privateMemory(); err != nil || filepath.Dir(got) != dir {
		t.Errorf("an absolute XDG_RUNTIME_DIR is not used: %s, %v", got, err)
	}
}
