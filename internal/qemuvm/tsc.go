package qemuvm

import (
	"context"
	"os"
	"strings"
	"time"
)

// tscWindow is the time between two samples of the TSC. A sample is accurate to
// about 100 ns, so the rate is accurate to a few millionths.
const tscWindow = 50 * time.Millisecond

// tscSample is the TSC at a time; 0 if there is none.
type tscSample struct {
	ticks uint64
	at    time.Time
}

// sampleTSC returns the best of several readings: the one in which reading the
// clock took the least time was not interrupted.
func sampleTSC() tscSample {
	var best tscSample
	least := uint64(1 << 63)
	for range 20 {
		before := rdtsc()
		at := time.Now()
		after := rdtsc()
		if d := after - before; d < least {
			least, best = d, tscSample{before + d/2, at}
		}
	}
	return best
}

// TSC returns the rate of the host's TSC in kHz, 0 when it has none, and
// whether it never changes. Under TCG a guest reads the host's TSC.
func (h *Host) TSC(ctx context.Context) (khz int, fixed bool, err error) {
	if h.tsc0.ticks == 0 {
		return 0, false, nil
	}
	if left := tscWindow - time.Since(h.tsc0.at); left > 0 {
		select {
		case <-ctx.Done():
			return 0, false, context.Cause(ctx)
		case <-time.After(left):
		}
	}
	now := sampleTSC()
	cpuinfo, _ := os.ReadFile("/proc/cpuinfo")
	return tscRate(h.tsc0, now), tscIsFixed(string(cpuinfo)), nil
}

func tscRate(a, b tscSample) int {
	elapsed := b.at.Sub(a.at)
	if elapsed <= 0 || b.ticks <= a.ticks {
		return 0 // the host slept or the counter was set
	}
	return int(float64(b.ticks-a.ticks)/elapsed.Seconds()/1000 + 0.5)
}

// tscIsFixed checks the flags that Linux itself uses.
func tscIsFixed(cpuinfo string) bool {
	for line := range strings.Lines(cpuinfo) {
		if name, flags, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "flags" {
			f := " " + strings.TrimSpace(flags) + " "
			return strings.Contains(f, " constant_tsc ") && strings.Contains(f, " nonstop_tsc ")
		}
	}
	return false
}
