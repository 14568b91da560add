//go:build linux

package initd

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestParseCPUTimes(t *testing.T) {
	for text, want := range map[string][2]int{
		"cpu  10 1 20 300 40 5 6 7 0 0\ncpu0 1 1 1 1\n": {49, 389},
		"cpu  10 1 x 300 40 5\n":                        {0, 0},
		"cpu 1 2\n":                                     {0, 0},
		"":                                              {0, 0},
	} {
		if busy, all := parseCPUTimes(text); busy != want[0] || all != want[1] {
			t.Errorf("%q: %d of %d, want %v", text, busy, all, want)
		}
	}
	if _, all := cpuTimes(); all == 0 {
		t.Error("this machine has no times")
	}
}

func TestAwaitIdle(t *testing.T) {
	const window, limit = 100 * time.Millisecond, 3 * time.Second
	for name, tc := range map[string]struct {
		busyFor, want time.Duration
	}{
		"idle":           {0, window},
		"busy, idle":     {time.Second, time.Second + window},
		"always busy":    {time.Hour, limit},
		"cannot be read": {-1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				awaitIdle(window, limit, func() (busy, all int) {
					if tc.busyFor < 0 {
						return 0, 0
					}
					ran := time.Since(began)
					return int(min(ran, tc.busyFor) / time.Millisecond), int(2*ran/time.Millisecond) + 1
				})
				if got := time.Since(began); got != tc.want {
					t.Errorf("%s, want %s", got, tc.want)
				}
			})
		})
	}
}
