package client

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// A stream without messages goes on however often its connection ends: each of them was
// healthy. One that fails at once comes to its end.
func TestQuietStreamGoesOn(t *testing.T) {
	gone := agentlab.Errorf(agentlab.CodeUnavailable, "the daemon ended")
	for name, c := range map[string]struct {
		lasts time.Duration
		ends  error
		most  int // connections; the caller stops at this one
		final error
	}{
		"quiet, then restarted": {time.Hour, gone, 100, nil},
		"ended by the daemon":   {time.Hour, nil, 100, nil},
		"fails at once":         {0, gone, 100, gone},
		"ends at once":          {0, nil, 100, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n, last := 0, time.Time{}
				once := func(_ context.Context, connected *bool, _ func(int, error) bool) (bool, error) {
					if n++; n > 1 && time.Since(last) <= 0 {
						t.Error("it connects again without a pause")
					}
					*connected = true
					time.Sleep(c.lasts)
					last = time.Now()
					return n == c.most, c.ends
				}
				var final error
				for _, err := range follow(t.Context(), func() int64 { return 7 }, once) {
					final = err
				}
				if final != c.final || (n == c.most) != (c.final == nil) {
					t.Errorf("it ended with %v after %d connections", final, n)
				}
			})
		})
	}
}
