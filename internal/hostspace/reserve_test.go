package hostspace_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/hostspace"
	"github.com/agentlab-vm/agentlab/test/smalldisk"
)

// The reserve has its blocks, frees them on a full disk, and is made again
// only when there is room for it and for more.
func TestReserveOnFullDisk(t *testing.T) {
	smalldisk.Run(t, "256m", func(t *testing.T, dir string) {
		path := filepath.Join(dir, "reserve")
		r := hostspace.NewReserve(path)
		if r.Release() {
			t.Error("there was nothing to release")
		}
		if err := r.Make(); err != nil || !r.Held() {
			t.Fatalf("made: %v, held %v", err, r.Held())
		}
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if blocks := st.Sys().(*syscall.Stat_t).Blocks; blocks*512 < hostspace.ReserveBytes {
			t.Errorf("%d blocks", blocks)
		}
		smalldisk.Fill(t, dir, 0)
		write := func() error { return os.WriteFile(filepath.Join(dir, "more"), make([]byte, 1<<20), 0o600) }
		if write() == nil {
			t.Fatal("the disk is not full")
		}
		for range 3 { // each time who fills the disk takes all of it
			if !r.Release() || r.Held() {
				t.Fatal("it was not released")
			}
			if err := write(); err != nil {
				t.Errorf("after the release: %v", err)
			}
			smalldisk.Fill(t, dir, 0)
		}
		parts := 0
		for r.Release() {
			parts++
		}
		if _, err := os.Stat(path); err == nil || parts > 10 {
			t.Errorf("%d more parts, left: %v", parts, err)
		}
		if err := r.Make(); err != nil || r.Held() {
			t.Errorf("made on a full disk: %v, held %v", err, r.Held())
		}
		if err := os.Remove(filepath.Join(dir, "fill")); err != nil {
			t.Fatal(err)
		}
		if err := r.Make(); err != nil || !r.Held() {
			t.Errorf("with room again: %v, held %v", err, r.Held())
		}
	})
}

func TestPauseBelow(t *testing.T) {
	for least, want := range map[int64]int64{0: hostspace.PauseLeast, 1 << 30: 256 << 20, 1 << 40: 1 << 38} {
		if got := hostspace.PauseBelow(least); got != want {
			t.Errorf("%d: %d, want %d", least, got, want)
		}
	}
}
