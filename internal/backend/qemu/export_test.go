package qemu

import (
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/guard"
)

// patchDisk writes at an offset of a qcow2 file, as a guest that controls its QEMU can.
func patchDisk(t *testing.T, path string, at int64, values ...uint64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err == nil {
		_, err = f.Seek(at, 0)
	}
	if err == nil {
		err = binary.Write(f, binary.BigEndian, values)
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
}

// word reads a number of a qcow2 file.
func word(t *testing.T, path string, at int64) uint64 {
	t.Helper()
	b := make([]byte, 8)
	f, err := os.Open(path)
	if err == nil {
		_, err = f.ReadAt(b, at)
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	return binary.BigEndian.Uint64(b)
}

// A disk whose file describes more than the file has, or another size, does not fill
// the host's disk.
func TestExportOfForgedDisk(t *testing.T) {
	for _, p := range []string{"qemu-img", "qemu-io"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("skipped: %v", err)
		}
	}
	d, f := still(t)
	sp := f.spec(1)
	ctx := guard.Context(t)
	if err := d.Create(ctx, sp); err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(d.dir(sp.Ref()), fileRoot)
	if out, err := exec.Command("qemu-io", "-f", "qcow2", "-c", "write -P 7 0 64k", root).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	const sizeAt, l1At, offset = 24, 40, 0x00fffffffffffe00
	export := func() error { return d.ExportDisk(ctx, sp.Ref(), filepath.Join(t.TempDir(), "root.img")) }
	if err := export(); err != nil {
		t.Fatal(err)
	}
	// The first 512 MiB are one cluster, in each of its places.
	l2 := int64(word(t, root, int64(word(t, root, l1At))) & offset)
	entry := word(t, root, l2)
	same := make([]uint64, 8192)
	for i := range same {
		same[i] = entry
	}
	patchDisk(t, root, l2, same...)
	if err := export(); err == nil || !strings.Contains(err.Error(), "has more data than its files occupy") {
		t.Errorf("a disk that repeats a cluster: %v", err)
	}
	patchDisk(t, root, sizeAt, 4<<40)
	if err := export(); err == nil || !strings.Contains(err.Error(), "describes a disk of") {
		t.Errorf("a disk of another size: %v", err)
	}
}
