package qemu

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// Linux measures its local APIC timer against the TSC at the start of a boot, in
// steps of one tick. If the host does not run the emulated CPU during some steps,
// they pass at once, and the timer looks slower than it is: by one percent for
// each lost millisecond. After a hundred lost milliseconds the timer looks dead.
// Linux then does not use it, and as a microVM has no other timer, it waits for
// its first tick without end and without a message. After fewer, every timeout of
// the guest is wrong by that factor. (arch/x86/kernel/apic/apic.c,
// calibrate_APIC_clock, of Linux 6.1.)
//
// So the driver reads the timer's registers from outside, and resets a guest that
// measured a wrong rate. The guest has not read its disk by then.

// The bounds of the watch.
const (
	lapicEvery = 50 * time.Millisecond
	// lapicCalibrates is how long the measurement, which takes a tenth of a
	// second, may appear to last before it counts as failed.
	lapicCalibrates = 2 * time.Second
	lapicResets     = 8
	// lapicError is the factor by which a timer may be too fast or too slow;
	// lapicSame is the factor by which two boots with the same rate may differ.
	lapicError, lapicSame = 1.2, 1.02
	// lapicHz is the rate of QEMU's local APIC timer, before its divider.
	lapicHz = 1e9
)

// kernelHz are the tick rates that Debian and Ubuntu build their kernels with.
// Another rate is accepted if it is the same after a reset.
var kernelHz = []float64{250, 1000}

// lapicTimer is a CPU's local APIC timer.
type lapicTimer struct {
	vector           byte
	masked, periodic bool
	initial          uint64 // counts of one period
	divider          uint64
}

var lapicText = lazyre.New(`LVTT\s+0x([0-9a-f]{1,8})\s[^\n]*\n(?:[^\n]*\n)*?Timer\s+DCR=0x[0-9a-f]+ \(divide by (\d{1,3})\) initial_count = (\d{1,10})\s`)

// parseLAPIC parses the output of "info lapic" of QEMU's monitor.
func parseLAPIC(text string) (lapicTimer, error) {
	m := lapicText.FindStringSubmatch(text)
	if m == nil {
		return lapicTimer{}, fmt.Errorf("no timer in %q", text[:min(len(text), 200)])
	}
	lvt, err := strconv.ParseUint(m[1], 16, 32)
	if err != nil {
		return lapicTimer{}, err
	}
	t := lapicTimer{vector: byte(lvt), masked: lvt>>16&1 == 1, periodic: lvt>>17&3 == 1}
	if t.divider, err = strconv.ParseUint(m[2], 10, 64); err != nil {
		return lapicTimer{}, err
	}
	t.initial, err = strconv.ParseUint(m[3], 10, 64)
	return t, err
}

// calibrating reports whether Linux measures the timer, or has stopped using it
// after that: it counts from its highest value, and its interrupt is masked.
func (t lapicTimer) calibrating() bool {
	return t.vector != 0 && t.masked && t.periodic && t.initial == math.MaxUint32/16
}

// ticking reports whether the timer makes periodic ticks, which Linux uses until
// it programs each interrupt separately.
func (t lapicTimer) ticking() bool { return t.vector != 0 && !t.masked && t.periodic && t.initial > 0 }

// hz returns the real rate of a ticking timer, in ticks per second.
func (t lapicTimer) hz() float64 { return lapicHz / float64(t.divider) / float64(t.initial) }

// factor returns the ratio of two numbers, at least 1.
func factor(a, b float64) float64 { return max(a/b, b/a) }

// lapicWatch watches the boots of a guest.
type lapicWatch struct {
	started time.Time // when this boot's measurement was first seen; zero before
	hz      float64   // tick rate of the boot before; 0: unknown
}

// bootState is the result of a sample of the timer.
type bootState int

const (
	bootGoesOn bootState = iota // too early to know
	bootIsSound
	bootIsLost
	bootIsPast // too late to know
)

func (w *lapicWatch) sampleTimer(t lapicTimer, now time.Time) (bootState, string) {
	switch {
	case t.calibrating() && w.started.IsZero():
		w.started = now
	case t.calibrating() && now.Sub(w.started) > lapicCalibrates:
		return bootIsLost, "the guest's kernel does not use its timer, because it looked dead"
	case t.calibrating():
	case t.ticking():
		return w.evaluateTimer(t.hz())
	case t.vector != 0 && !t.masked:
		return bootIsPast, ""
	}
	return bootGoesOn, ""
}

// evaluateTimer compares a tick rate with the known rates and with that of the
// boot before: a random error does not occur twice with the same value.
func (w *lapicWatch) evaluateTimer(hz float64) (bootState, string) {
	sound := func(right float64) bool { return factor(hz, right) <= lapicError }
	if slices.ContainsFunc(kernelHz, sound) || w.hz > 0 && factor(hz, w.hz) <= lapicSame {
		return bootIsSound, ""
	}
	w.hz = hz
	return bootIsLost, fmt.Sprintf("the guest's kernel measured a wrong timer rate: it gets %.0f ticks per second", hz)
}

// Messages in the supervisor's log when a watch ends without a reset.
const (
	timerSound = "the guest's timer has the right rate"
	timerPast  = "the guest's timer was checked too late"
)

// watchLAPIC resets an emulated guest until its kernel has measured the right
// rate of its timer. It returns then, when the guest answers, or when QEMU has
// ended.
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
		case <-m.Done():
			return
		case <-tick.C:
		}
		t, err := m.lapic(ctx)
		if err != nil {
			if ctx.Err() == nil {
				m.hooks.Log.Warn("cannot read the guest's timer", "err", err)
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
			m.hooks.Log.Error("the guest's timer is still wrong after the last reset", "why", why, "resets", resets)
			return
		case v == bootIsLost:
			resets++
			m.hooks.Log.Warn("resetting the guest", "why", why, "resets", resets)
			if err := m.reset(ctx); err != nil {
				m.hooks.Log.Error("cannot reset the guest", "err", err)
				return
			}
			w.started = time.Time{}
		}
	}
}

func (m *machine) lapic(ctx context.Context) (lapicTimer, error) {
	ctx, cancel := context.WithTimeout(ctx, qmpPatience)
	defer cancel()
	text, err := m.monitor(ctx, "info lapic 0")
	if err != nil {
		return lapicTimer{}, err
	}
	return parseLAPIC(text)
}

// monitor runs a command of QEMU's human monitor, which QMP does not have.
func (m *machine) monitor(ctx context.Context, line string) (text string, err error) {
	err = m.QMP.Execute(ctx, "human-monitor-command", map[string]string{"command-line": line}, &text)
	return text, err
}

// reset resets the machine. With -no-reboot a reset ends QEMU, so that option is
// disabled for this reset.
func (m *machine) reset(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, qmpPatience)
	defer cancel()
	if err := m.QMP.Execute(ctx, "set-action", map[string]string{"reboot": "reset"}, nil); err != nil {
		return err
	}
	if err := m.QMP.Execute(ctx, "system_reset", nil, nil); err != nil {
		return err
	}
	return m.QMP.Execute(ctx, "set-action", map[string]string{"reboot": "shutdown"}, nil)
}
