package supervisor

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/test/disk"
)

// Pages of a file that a process has mapped privately are its own only after it has
// changed them: the host can drop the others.
func TestMemoryOfMappedFile(t *testing.T) {
	const size = 64 << 20
	path := filepath.Join(disk.Dir(t), "memory")
	if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := durable.SyncPath(path); err != nil { // its pages are clean
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	d := Dir{Path: t.TempDir(), Process: "test"}
	if err := d.NoteProcess(os.Getpid()); err != nil {
		t.Fatal(err)
	}
	measure := func() (unique, all int64) {
		t.Helper()
		m, err := memoryOf(d.processID())
		if err != nil {
			t.Fatal(err)
		}
		if m.Proportional < m.Unique || m.Proportional > m.Unique+m.Shared {
			t.Errorf("%+v", m)
		}
		return m.Unique, m.Unique + m.Shared
	}
	unique, all := measure()
	mapped, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mapped) }()
	sum := 0
	for i := 0; i < size; i += os.Getpagesize() {
		sum += int(mapped[i])
	}
	read, allRead := measure()
	if read-unique > size/4 || allRead-all < size*3/4 {
		t.Errorf("after %d bytes were read: unique %d more, all %d more", size, read-unique, allRead-all)
	}
	for i := 0; i < size/2; i += os.Getpagesize() {
		mapped[i] = byte(sum + 1)
	}
	if written, _ := measure(); written-read < size/4 || written-read > size*3/4 {
		t.Errorf("after %d bytes were written: unique %d more", size/2, written-read)
	}
}
