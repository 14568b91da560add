package proxmox

import (
	"testing"
	"time"
)

func TestLatestIsWithinItsAge(t *testing.T) {
	now := time.Now()
	for name, test := range map[string]struct {
		l    timed[string]
		age  time.Duration
		want bool
	}{
		"nothing yet":                            {timed[string]{}, time.Hour, false},
		"just now":                               {timed[string]{"x", now}, time.Second, true},
		"nearly as old":                          {timed[string]{"x", now.Add(-time.Second + 1)}, time.Second, true},
		"as old":                                 {timed[string]{"x", now.Add(-time.Second)}, time.Second, false},
		"asked anew":                             {timed[string]{"x", now}, 0, false},
		"asked anew, and the clock was set back": {timed[string]{"x", now.Add(time.Hour)}, 0, false},
	} {
		value, ok := test.l.within(test.age, now)
		if ok != test.want || (value == "x") != test.want {
			t.Errorf("%s: got %q, %t", name, value, ok)
		}
	}
}
