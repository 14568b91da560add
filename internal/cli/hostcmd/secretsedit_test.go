//go:build linux

package hostcmd

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
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
	got, remove, err := privateMemory()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(remove)
	if !filepath.IsAbs(got) || filepath.Dir(got) == dir {
		t.Errorf("the directory is %s, made for the relative XDG_RUNTIME_DIR", got)
	}
	t.Setenv("XDG_RUNTIME_DIR", dir)
	got, remove, err = privateMemory()
	if err != nil || filepath.Dir(got) != dir {
		t.Fatalf("an absolute XDG_RUNTIME_DIR is not used: %s, %v", got, err)
	}
	t.Cleanup(remove)

	// What a killed process has left is removed, but nothing that is used.
	killed := filepath.Join(dir, strings.Replace(privatePattern, "*", "killed", 1))
	fresh := filepath.Join(dir, strings.Replace(privatePattern, "*", "fresh", 1))
	link := filepath.Join(dir, strings.Replace(privatePattern, "*", "link", 1))
	target := t.TempDir()
	old := time.Now().Add(-2 * gitsafe.KilledAge)
	for _, name := range []string{killed, fresh} {
		if err := errors.Join(os.Mkdir(name, 0o700), os.WriteFile(filepath.Join(name, "b.yaml"), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Symlink(target, link), os.Chtimes(killed, old, old), os.Chtimes(got, old, old)); err != nil {
		t.Fatal(err)
	}
	_, other, err := privateMemory()
	if err != nil {
		t.Fatal(err)
	}
	other()
	for name, want := range map[string]bool{killed: false, fresh: true, got: true, target: true} {
		if _, err := os.Stat(name); (err == nil) != want {
			t.Errorf("%s: %v, want it left: %t", name, err, want)
		}
	}
}
