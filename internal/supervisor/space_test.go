package supervisor

import (
	"math"
	"os"
	"testing"
	"time"
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
		u := diskUsage{limit: limit}
		var below uint64
		var due bool
		for _, l := range c.looks {
			var err error
			if l[1] == unknown {
				err = os.ErrNotExist
			}
			below, due = u.pauseThreshold(l[0], l[1], err)
		}
		if below != c.below || due != (c.below > 0) {
			t.Errorf("%s: %v, below %d MiB, want %d", c.name, due, below/mib, c.below/mib)
		}
	}
	if _, due := (&diskUsage{}).pauseThreshold(0, 1, nil); due {
		t.Error("it is paused without a limit")
	}
}

const mib = 1 << 20
