package work

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestSaveToKeepsUmask(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	name := filepath.Join(t.TempDir(), "f")
	if _, err := SaveTo(name, strings.NewReader("x"), false, 0o644); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(name); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("got %v, %v; want mode 0600", info.Mode(), err)
	}
}
