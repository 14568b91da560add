package qemu

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/backend/qemu/migration"
)

// The copy has exactly the pages that a process has written to its private mapping of a
// file, and later writes to the same page.
func TestCopyOfWrittenPages(t *testing.T) {
	const pages = 20_000 // more than one part of the pagemap, and of the copy
	const page = migration.PageSize
	file, err := os.Create(filepath.Join(t.TempDir(), "memory"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	want := bytes.Repeat([]byte{1}, pages*page)
	if _, err := file.Write(want); err != nil {
		t.Fatal(err)
	}
	ram, err := unix.Mmap(int(file.Fd()), 0, pages*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(ram)
	var sum byte
	for i := 0; i < pages; i += 3 {
		sum += ram[i*page] // a page that was only read
	}
	wrote := 0
	for i := range pages {
		if i < 600 || i%7 == 0 || i >= pages-5 {
			ram[i*page+i%page], want[i*page+i%page] = byte(i)|2, byte(i)|2
			wrote++
		}
	}
	r, err := openRAM(os.Getpid(), uint64(uintptr(unsafe.Pointer(&ram[0]))), pages*page)
	if err != nil {
		t.Skipf("skipped: this machine does not allow to read the memory of a process: %v", err)
	}
	defer r.Close()
	got := &pageCounter{b: bytes.Repeat([]byte{1}, pages*page)}
	if err := r.copyWritten(t.Context(), got); err != nil {
		t.Fatal(err)
	}
	if got.pages != wrote || !bytes.Equal(got.b, want) {
		t.Errorf("%d pages were copied, want %d (%d); equal: %v", got.pages, wrote, sum, bytes.Equal(got.b, want))
	}
}

// pageCounter counts the pages that are written.
type pageCounter struct {
	b     []byte
	pages int
}

func (c *pageCounter) Zero(at, size int64) error {
	_, err := c.WriteAt(make([]byte, size), at)
	return err
}

func (c *pageCounter) WriteAt(p []byte, at int64) (int, error) {
	c.pages += len(p) / migration.PageSize
	return copy(c.b[at:], p), nil
}
