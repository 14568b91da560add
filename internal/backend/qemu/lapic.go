package qemu

import (
	"context"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"time"
)

// Linux measures its local APIC timer against the TSC at the very start of a
// boot, in steps of one tick which it counts off one by one. Where the host
// does not run the emulated CPU just then, the steps that it slept through
// pass at once, and the timer looks slower than it is: for every millisecond
// lost that way a hundredth. After a hundred it looks as if it stood still;
// Linux then does without it, and as a microVM has no other timer, it waits
// for its first tick for ever, silently. Less, and every pause of the guest is
// too short or too long by that factor. (arch/x86/kernel/apic/apic.c,
// calibrate_APIC_clock, of Linux 6.1.)
//
// So the outcome is looked at from outside, and a guest that got it wrong
// begins anew. It has read nothing of its disk by then.

// The bounds of that look.
const (
	lapicEvery = 50 * time.Millisecond
	// lapicCalibrates is how long a measurement of a tenth of a second may
	// seem to last before it is taken for the leftover of one that failed.
	lapicCalibrates = 2 * time.Second
	lapicResets     = 8
	// lapicError is how many times too fast or too slow a timer may be,
	// lapicSame by how much two boots may differ that measured the same.
	lapicError, lapicSame = 1.2, 1.02
	// lapicHz is the rate of QEMU's local APIC timer, before its divider.
	lapicHz = 1e9
)

// kernelHz are the tick rates that Debian and Ubuntu build their kernels with.
// Another is known by its coming again after a reset.
var kernelHz = []float64{250, 1000}

// lapicTimer is a CPU's local APIC timer.
type lapicTimer struct {
	vector           byte
	masked, periodic bool
	initial          uint64 // counts of one period
	divider          uint64
}

var lapicText = regexp.MustCompile(`LVTT\s+0x([0-9a-f]{1,8})\s[^\n]*\n(?:[^\n]*\n)*?Timer\s+DCR=0x[0-9a-f]+ \(divide by (\d{1,3})\) initial_count = (\d{1,10})\s`)

// parseLAPIC reads what QEMU's monitor prints for "info lapic".
func parseLAPIC(text string) (lapicTimer, error) {
	m := lapicText.FindStringSubmatch(text)
	if m == nil {
		return lapicTimer{}, fmt.Errorf("no timer in %q", text[:min(len(text), 200)])
	}
	lvt, err := strconv.ParseUint(m[1], 16, 32)
	if err != nil {
		return lapicTimer{}, err
	}
	t := lapicTimer{vector: byte(lvt), masked: lvt>>16&1 == 1, periodic: lvt>>17&3 == 1} //nolint:gosec // its lowest byte
	if t.divider, err = strconv.ParseUint(m[2], 10, 64); err != nil {
		return lapicTimer{}, err
	}
	t.initial, err = strconv.ParseUint(m[3], 10, 64)
	return t, err
}

// calibrating tells whether Linux measures the timer, or has given it up
// after that: it counts from its highest value and interrupts nobody.
func (t lapicTimer) calibrating() bool {
	return t.vector != 0 && t.masked && t.periodic && t.initial == math.MaxUint32/16
}

// ticking tells whether Linux takes its ticks from the timer, which it does
// until it programs each interrupt by itself.
func (t lapicTimer) ticking() bool { return t.vector != 0 && !t.masked && t.periodic && t.initial > 0 }

// hz is how many ticks a second a ticking timer really gives.
func (t lapicTimer) hz() float64 { return lapicHz / float64(t.divider) / float64(t.initial) }

// factor is how many times one number is the other, at least 1.
func factor(a, b float64) float64 { return max(a/b, b/a) }

// lapicWatch follows the boots of a guest.
type lapicWatch struct {
	begun time.Time // when this boot's measurement was seen first; zero before
	hz    float64   // tick rate of the boot before, 0 when unknown
}

// bootState is what a look at the timer says.
type bootState int

const (
	bootGoesOn bootState = iota // too early to tell
	bootIsSound
	bootIsLost
	bootIsPast // too late to tell
)

func (w *lapicWatch) sampleTimer(t lapicTimer, now time.Time) (bootState, string) {
	switch {
	case t.calibrating() && w.begun.IsZero():
		w.begun = now
	case t.calibrating() && now.Sub(w.begun) > lapicCalibrates:
		return bootIsLost, "the guest's kernel took its timer for a dead one"
	case t.calibrating():
	case t.ticking():
		return w.evaluateTimer(t.hz())
	case t.vector != 0 && !t.masked:
		return bootIsPast, ""
	}
	return bootGoesOn, ""
}

// evaluateTimer compares a tick rate with those that there are, and with the last
// one: what went wrong by chance does not do so twice in the same way.
func (w *lapicWatch) evaluateTimer(hz float64) (bootState, string) {
	sound := func(right float64) bool { return factor(hz, right) <= lapicError }
	if slices.ContainsFunc(kernelHz, sound) || w.hz > 0 && factor(hz, w.hz) <= lapicSame {
		return bootIsSound, ""
	}
	w.hz = hz
	return bootIsLost, fmt.Sprintf("the guest's kernel measured its timer wrong: it ticks %.0f times a second", hz)
}

// How a watch ends in the supervisor's log where it leaves the guest alone.
const (
	timerSound = "the guest's timer is sound"
	timerPast  = "the guest's timer was looked at too late to judge it"
)

// watchLAPIC resets an emulated guest until its kernel has measured its timer
// right. It returns when that is so, the guest answers, or QEMU has ended.
func (m *machine) watchLAPIC(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_ = m.hooks.GuestUp(ctx)
		cancel()
	}()
	var w lapicWatch
	tick := time.NewTicker(lapicEvery)
	defer tick.Stop()
	for resets := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-m.done:
			return
		case <-tick.C:
		}
		t, err := m.lapic(ctx)
		if err != nil {
			if ctx.Err() == nil {
				m.hooks.Log.Warn("the guest's timer cannot be looked at", "err", err)
			}
			return
		}
		v, why := w.sampleTimer(t, time.Now())
		switch {
		case v == bootIsSound:
			m.hooks.Log.Info(timerSound)
			return
		case v == bootIsPast:
			m.hooks.Log.Info(timerPast)
			return
		case v == bootIsLost && resets == lapicResets:
			m.hooks.Log.Error("the guest is left to itself", "why", why, "resets", resets)
			return
		case v == bootIsLost:
			resets++
			m.hooks.Log.Warn("the guest begins anew", "why", why, "resets", resets)
			if err := m.reset(ctx); err != nil {
				m.hooks.Log.Error("the guest cannot be reset", "err", err)
				return
			}
			w.begun = time.Time{}
		}
	}
}

func (m *machine) lapic(ctx context.Context) (lapicTimer, error) {
	ctx, cancel := context.WithTimeout(ctx, qmpPatience)
	defer cancel()
	var text string
	err := m.qmp.execute(ctx, "human-monitor-command", map[string]string{"command-line": "info lapic 0"}, &text)
	if err != nil {
		return lapicTimer{}, err
	}
	return parseLAPIC(text)
}

// reset sets the machine back to where it was when QEMU started. With
// -no-reboot any reset would end QEMU, so that is suspended for this one.
func (m *machine) reset(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, qmpPatience)
	defer cancel()
	if err := m.qmp.execute(ctx, "set-action", map[string]string{"reboot": "reset"}, nil); err != nil {
		return err
	}
	if err := m.qmp.execute(ctx, "system_reset", nil, nil); err != nil {
		return err
	}
	return m.qmp.execute(ctx, "set-action", map[string]string{"reboot": "shutdown"}, nil)
}
