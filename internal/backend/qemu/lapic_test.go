package qemu

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// lapicDump is what QEMU 7.2 prints for "info lapic 0".
func lapicDump(lvtt, timer string) string {
	return "dumping local APIC state for CPU 0\r\n\r\n" +
		"LVT0\t 0x00010700 active-hi edge  masked                      ExtINT (vec 0)\r\n" +
		"LVTTHMR\t 0x00010000 active-hi edge  masked                      Fixed  (vec 0)\r\n" +
		"LVTT\t " + lvtt + "\r\n" +
		"Timer\t DCR=" + timer + "\r\n" +
		"SPIV\t 0x000001ff APIC enabled, focus=off, spurious vec 255\r\n"
}

func TestLAPICWatch(t *testing.T) {
	const (
		fresh       = "0x00010000 active-hi edge  masked         one-shot     Fixed  (vec 0)"
		calibrating = "0x000300ec active-hi edge  masked         periodic     Fixed  (vec 236)"
		periodic    = "0x000200ec active-hi edge                 periodic     Fixed  (vec 236)"
		oneShot     = "0x000000ec active-hi edge                 one-shot     Fixed  (vec 236)"
	)
	count := func(n int) string {
		return fmt.Sprintf("0x3 (divide by 16) initial_count = %d current_count = 7", n)
	}
	type step struct {
		lvtt, timer string
		after       time.Duration
		want        bootState
	}
	for name, steps := range map[string][]step{
		"as it should be": {
			{fresh, "0x0 (divide by 2) initial_count = 0 current_count = 0", 0, bootGoesOn},
			{calibrating, count(268435455), 0, bootGoesOn},
			{calibrating, count(268435455), lapicCalibrates / 2, bootGoesOn},
			{periodic, count(248240), 0, bootIsSound},
		},
		"dead": {
			{calibrating, count(268435455), 0, bootGoesOn},
			{calibrating, count(268435455), lapicCalibrates + 1, bootIsLost},
		},
		"too fast":        {{periodic, count(156500), 0, bootIsLost}},
		"a storm":         {{periodic, count(40), 0, bootIsLost}},
		"too slow":        {{periodic, count(554389), 0, bootIsLost}},
		"100 Hz":          {{periodic, count(625000), 0, bootIsLost}, {periodic, count(624000), 0, bootIsSound}},
		"wrong twice":     {{periodic, count(625000), 0, bootIsLost}, {periodic, count(700000), 0, bootIsLost}},
		"1000 Hz":         {{periodic, count(62400), 0, bootIsSound}},
		"looked too late": {{oneShot, count(4271906), 0, bootIsPast}},
		"at rest":         {{calibrating, count(0), 0, bootGoesOn}, {calibrating, count(0), time.Hour, bootGoesOn}},
	} {
		t.Run(name, func(t *testing.T) {
			var w lapicWatch
			now := time.Now()
			for i, s := range steps {
				timer, err := parseLAPIC(lapicDump(s.lvtt, s.timer))
				if err != nil {
					t.Fatal(err)
				}
				now = now.Add(s.after)
				if got, why := w.sampleTimer(timer, now); got != s.want || (got == bootIsLost) != (why != "") {
					t.Errorf("step %d: %d %q, want %d", i, got, why, s.want)
				}
			}
		})
	}
}

func TestParseLAPICRefuses(t *testing.T) {
	for _, text := range []string{
		"", "Error: No such CPU\r\n", "LVTT\t 0x000200ec x\r\n",
		"LVTT\t 0x000200ec x\r\nTimer\t DCR=0x3 (divide by 16) initial_count = -1 current_count = 0\r\n",
	} {
		if got, err := parseLAPIC(text); err == nil {
			t.Errorf("%q: %+v", text, got)
		}
	}
}

// TestGuestWithStoppedTimer takes the CPUs away from a guest while its kernel
// measures its timer, until one is lost that way. It must answer all the same.
func TestGuestWithStoppedTimer(t *testing.T) {
	b := newBox(t, vmFixture(t), nil)
	for range 12 {
		b.ok(b.d.Start(b.ctx, b.ref))
		if b.stutter() {
			eventually(t, bootTimeout, "the guest answers", func() error {
				_, err := b.client().Health(b.ctx)
				return err
			})
			b.identify()
			if out := b.output("uptime -s >/dev/null && echo alive"); out != "alive" {
				t.Errorf("%q", out)
			}
			return
		}
		b.ok(b.d.Stop(b.ctx, b.ref, 0))
	}
	t.Fatal("no boot was disturbed")
}

// stutter stops QEMU for long and lets it run for short times, until the shim
// resets the guest (true) or the guest is past what can be disturbed.
func (b *box) stutter() bool {
	b.Helper()
	qemu := b.noted(qemuPID)
	turn := time.NewTicker(150 * time.Millisecond)
	defer turn.Stop()
	for {
		b.ok(syscall.Kill(qemu, syscall.SIGSTOP))
		<-turn.C
		b.ok(syscall.Kill(qemu, syscall.SIGCONT))
		<-time.After(6 * time.Millisecond) // what the guest gets
		log, err := os.ReadFile(filepath.Join(b.d.dir(b.ref), shimLog))
		b.ok(err)
		boot := string(log[max(0, bytes.LastIndex(log, []byte("starting qemu"))):])
		switch {
		case strings.Contains(boot, "resetting the guest"):
			b.Log(boot)
			return true
		case strings.Contains(boot, timerSound), strings.Contains(boot, timerPast):
			return false
		}
		b.ok(b.ctx.Err())
	}
}
