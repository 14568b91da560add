// Package smalldisk runs a test on a small file system of its own, so that a
// disk that is really full can be tried without filling the machine's.
package smalldisk

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/hostspace"
)

// Fill writes the file "fill" in dir until less than left bytes are free. A
// left of 0 means until nothing more can be written.
func Fill(t testing.TB, dir string, left int64) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "fill"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
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
	n, err := hostspace.FreeBytes(dir)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
