package initd

import (
	"bytes"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestModuleName(t *testing.T) {
	for file, want := range map[string]string{
		"/lib/x/07-virtio_console.ko": "virtio_console",
		"00-virtio-ring.ko":           "virtio_ring",
		"crc32c-intel.ko":             "crc32c_intel",
		"8250.ko":                     "8250",
	} {
		if got := moduleName(file); got != want {
			t.Errorf("%s: %q, want %q", file, got, want)
		}
	}
}

func TestModuleParams(t *testing.T) {
	const line = "quiet virtio_mmio.device=512@0x1:5 net.ifnames=0 virtio-mmio.device=512@0x2:6 virtio_mmiox.a=b\n"
	if got := moduleParams(line, "virtio_mmio"); got != "device=512@0x1:5 device=512@0x2:6" {
		t.Errorf("got %q", got)
	}
	if got := moduleParams(line, "virtio_blk"); got != "" {
		t.Errorf("got %q", got)
	}
}

func TestUnsigned(t *testing.T) {
	const magic = "~Module signature appended~\n"
	signed := func(sig string, length uint32) []byte {
		b := append([]byte("module"), sig...)
		b = append(b, make([]byte, 8)...)
		b = binary.BigEndian.AppendUint32(b, length)
		return append(b, magic...)
	}
	for name, tc := range map[string]struct{ in, want []byte }{
		"signed":       {signed("sig", 3), []byte("module")},
		"not signed":   {[]byte("module"), []byte("module")},
		"empty":        {nil, nil},
		"only magic":   {[]byte(magic), []byte(magic)},
		"absurd":       {signed("sig", 100), signed("sig", 100)},
		"most absurd":  {signed("sig", 1<<32-1), signed("sig", 1<<32-1)},
		"all of it":    {signed("sig", 9), []byte{}},
		"no signature": {signed("", 0), []byte("module")},
	} {
		if got := withoutSignature(tc.in); !bytes.Equal(got, tc.want) {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}

// TestExt4Size reads what the real tool makes.
func TestExt4Size(t *testing.T) {
	mkfs, err := exec.LookPath("mke2fs")
	if err != nil {
		mkfs = "/sbin/mke2fs"
	}
	img := filepath.Join(t.TempDir(), "img")
	for blockSize, blocks := range map[uint64]uint64{1024: 9000, 4096: 5000} {
		if err := os.WriteFile(img, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(img, int64(blockSize*blocks)); err != nil {
			t.Fatal(err)
		}
		size := map[uint64]string{1024: "1024", 4096: "4096"}[blockSize]
		if out, err := exec.CommandContext(t.Context(), mkfs, "-q", "-F", "-t", "ext4", "-b", size, img).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v %s", mkfs, err, out)
		}
		b, err := os.ReadFile(img)
		if err != nil {
			t.Fatal(err)
		}
		gotBlocks, gotSize, err := ext4Size(b[sbOffset : sbOffset+1024])
		if err != nil || gotBlocks != blocks || gotSize != blockSize {
			t.Errorf("%d blocks of %d, %v; want %d of %d", gotBlocks, gotSize, err, blocks, blockSize)
		}
	}
	for _, bad := range [][]byte{nil, make([]byte, 1024), bytes.Repeat([]byte{0xff}, 1024)} {
		if _, _, err := ext4Size(bad); err == nil {
			t.Error("took what is no superblock")
		}
	}
}

// TestRunFiles checks the one name that is derived: systemd's escaping of the
// mount point.
func TestRunFiles(t *testing.T) {
	unit := strings.NewReplacer("-", `\x2d`, "/", "-").Replace(strings.TrimPrefix(program, "/")) + ".mount.d"
	for name := range runFiles {
		if strings.Contains(name, unit) {
			return
		}
	}
	t.Errorf("no file for %s", unit)
}
