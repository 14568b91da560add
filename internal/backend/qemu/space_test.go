package qemu

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
	"github.com/agentlab-vm/agentlab/test/smalldisk"
)

// The time between two looks at the disk is too short for any guest to fill it.
func TestNextLook(t *testing.T) {
	const limit = 128 << 20
	for free, want := range map[uint64]time.Duration{
		0: lookFast, limit: lookFast, limit + 1: lookFast, limit + fastestGuest/2: time.Second / 2, limit + 1<<50: lookSlow,
	} {
		if got := nextLook(free, limit); got != want {
			t.Errorf("%d free: %s, want %s", free, got, want)
		}
	}
}

// A guest that fills its host's disk is paused long before the disk is full,
// goes on when there is room, is paused again, and can be destroyed when there
// is no room at all.
func TestFullDiskPausesGuest(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: -short, and this boots virtual machines")
	}
	smalldisk.Run(t, "700m", fullDiskPausesGuest)
}

func fullDiskPausesGuest(t *testing.T, dir string) {
	f := vmFixture(t)
	f.StateDir, f.PauseBelow = dir, hostspace.PauseLeast
	t.Cleanup(func() { f.destroyAll(t) })
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 300<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	b := newBox(t, f, nil)
	b.boot()
	b.sh("dd if=/dev/urandom of=/var/fill bs=1M count=4000 conv=fsync")
	b.awaitPaused(true)
	if free := smalldisk.Free(t, dir); free < hostspace.ReserveBytes || free >= hostspace.PauseLeast {
		t.Errorf("paused with %d MiB free", free>>20)
	}
	if b.answers() {
		t.Error("a paused guest answers")
	}

	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	b.awaitPaused(false)
	eventually(t, bootTimeout, "the guest goes on", func() error {
		if free := smalldisk.Free(t, dir); free > 250<<20 && !b.answers() {
			return fmt.Errorf("%d MiB free", free>>20)
		}
		return nil
	})
	b.awaitPaused(true)

	smalldisk.Fill(t, dir, 0)
	b.ok(b.d.Destroy(b.ctx, b.ref))
	if free := smalldisk.Free(t, dir); free < 200<<20 {
		t.Errorf("%d MiB free after the guest that filled the disk is destroyed", free>>20)
	}
	if left := processes(dir); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func (b *box) answers() bool {
	ctx, cancel := context.WithTimeout(b.ctx, 3*time.Second)
	defer cancel()
	_, err := b.client().Health(ctx)
	return err == nil
}

// awaitPaused waits until the sandbox runs, with its guest paused or not.
func (b *box) awaitPaused(want bool) {
	b.Helper()
	eventually(b, bootTimeout, fmt.Sprintf("paused: %v", want), func() error {
		in, err := b.d.Inspect(b.ctx, b.ref)
		switch paused := strings.Contains(in.Reason, "MiB free, less than 128"); {
		case err != nil:
			return err
		case in.Power != backend.PowerRunning || paused != want || !paused && in.Reason != "":
			return fmt.Errorf("%s: %q, %d MiB free", in.Power, in.Reason, smalldisk.Free(b, b.f.StateDir)>>20)
		}
		return nil
	})
}
