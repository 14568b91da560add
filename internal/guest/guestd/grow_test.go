//go:build linux

package guestd

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

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
