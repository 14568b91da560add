package qemu

import (
	"context"
	"fmt"
	"math"
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

// Only a guest that has used up its share is paused, all are when half of the
// space is left, and what a guest wrote before does not count.
func TestWriterIsPaused(t *testing.T) {
	const limit, share = 128 * mib, 8 * mib
	const unknown = math.MaxUint64
	for _, c := range []struct {
		name  string
		looks [][2]uint64 // free space of the host, size of the guest's disk
		below uint64
	}{
		{"enough room", [][2]uint64{{200 * mib, 0}, {limit, 1000 * mib}}, 0},
		{"another one writes", [][2]uint64{{200 * mib, 50 * mib}, {100 * mib, 50 * mib}, {limit / 2, 50*mib + share}}, 0},
		{"it writes", [][2]uint64{{200 * mib, 50 * mib}, {100 * mib, 51*mib + share}}, limit},
		{"it writes slowly", [][2]uint64{{limit, 50 * mib}, {120 * mib, 54 * mib}, {115 * mib, 57 * mib}, {110 * mib, 59 * mib}}, limit},
		{"it wrote before", [][2]uint64{{1000 * mib, 0}, {limit, 800 * mib}, {limit - 1, 800 * mib}}, 0},
		{"it trims and writes", [][2]uint64{{limit, 50 * mib}, {100 * mib, 10 * mib}, {90 * mib, 19 * mib}}, limit},
		{"a start on a nearly full disk", [][2]uint64{{100 * mib, 50 * mib}, {95 * mib, 55 * mib}}, 0},
		{"half is left", [][2]uint64{{200 * mib, 50 * mib}, {limit/2 - 1, 50 * mib}}, limit / 2},
		{"room again", [][2]uint64{{limit, 50 * mib}, {100 * mib, 60 * mib}, {limit, 60 * mib}, {100 * mib, 60 * mib}}, 0},
		{"its disk cannot be measured", [][2]uint64{{200 * mib, 50 * mib}, {limit - 1, unknown}}, limit},
		{"its disk could not be measured", [][2]uint64{{200 * mib, 50 * mib}, {100 * mib, unknown}, {100 * mib, 50 * mib}}, 0},
		{"nor with enough room", [][2]uint64{{limit, 50 * mib}, {limit, unknown}, {100 * mib, 50 * mib}}, 0},
		{"nor at first", [][2]uint64{{limit, unknown}, {100 * mib, 50 * mib}, {100 * mib, 55 * mib}}, 0},
	} {
		w := writer{limit: limit}
		var below uint64
		var due bool
		for _, l := range c.looks {
			var err error
			if l[1] == unknown {
				err = os.ErrNotExist
			}
			below, due = w.due(l[0], l[1], err)
		}
		if below != c.below || due != (c.below > 0) {
			t.Errorf("%s: %v, below %d MiB, want %d", c.name, due, below/mib, c.below/mib)
		}
	}
	if _, due := (&writer{}).due(0, 1, nil); due {
		t.Error("it is paused without a limit")
	}
}

const mib = 1 << 20

// A guest that fills its host's disk is paused long before the disk is full,
// while another one that writes little goes on until half of that space is left.
// The one that filled it goes on when there is room, is paused again, and can be destroyed when there
// is no room at all.
func TestFullDiskPausesGuest(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: -short, and this boots virtual machines")
	}
	smalldisk.Run(t, "900m", fullDiskPausesGuest)
}

func fullDiskPausesGuest(t *testing.T, dir string) {
	f := vmFixture(t)
	f.StateDir, f.PauseBelow = dir, hostspace.PauseLeast
	t.Cleanup(func() { f.destroyAll(t) })
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 300<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	b, quiet := newBox(t, f, nil), newBox(t, f, func(sp *backend.Spec) { *sp = f.spec(2) })
	quiet.boot()
	quiet.output("systemctl is-system-running --wait || true; sync") // it writes while it starts
	b.boot()
	size := quiet.settled()
	b.sh("dd if=/dev/urandom of=/var/fill bs=1M count=4000 conv=fsync")
	b.awaitPaused(true)
	if free := smalldisk.Free(t, dir); free < hostspace.ReserveBytes || free >= hostspace.PauseLeast {
		t.Errorf("paused with %d MiB free", free>>20)
	}
	if b.answers() {
		t.Error("a paused guest answers")
	}
	quiet.goesOn(size)
	smalldisk.Fill(t, dir, hostspace.PauseLeast/2)
	quiet.awaitPaused(true)
	if quiet.answers() {
		t.Error("with half of the space left a guest answers")
	}
	if err := os.Remove(filepath.Join(dir, "fill")); err != nil {
		t.Fatal(err)
	}
	b.ok(quiet.d.Destroy(quiet.ctx, quiet.ref))

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

// settled waits until the guest's disk has the same size in two looks that are
// a few seconds apart: late first-boot writes would use up its share.
func (b *box) settled() (size uint64) {
	b.Helper()
	var since time.Time
	eventually(b, bootTimeout, "the guest stops writing", func() error {
		now, err := occupied(filepath.Join(b.d.dir(b.ref), fileRoot))
		if err == nil && now == size && time.Since(since) > 5*time.Second {
			return nil
		}
		if now != size {
			size, since = now, time.Now()
		}
		return fmt.Errorf("its disk occupies %d KiB, %v", now>>10, err)
	})
	return size
}

// goesOn checks that the guest, whose disk had this size, is not paused.
func (b *box) goesOn(size uint64) {
	b.Helper()
	now, _ := occupied(filepath.Join(b.d.dir(b.ref), fileRoot))
	b.Logf("the disk of the quiet guest grew from %d to %d KiB", size>>10, now>>10)
	in, err := b.d.Inspect(b.ctx, b.ref)
	if err != nil || in.Power != backend.PowerRunning || in.Reason != "" || !b.answers() {
		b.Errorf("%s: %q, answers %v, %v; %d MiB free", in.Power, in.Reason, b.answers(), err, smalldisk.Free(b, b.f.StateDir)>>20)
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
		switch paused := strings.Contains(in.Reason, "MiB free, less than "); {
		case err != nil:
			return err
		case in.Power != backend.PowerRunning || paused != want || !paused && in.Reason != "":
			return fmt.Errorf("%s: %q, %d MiB free", in.Power, in.Reason, smalldisk.Free(b, b.f.StateDir)>>20)
		}
		return nil
	})
}
