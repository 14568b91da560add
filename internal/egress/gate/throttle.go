package gate

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// maxPiece is the maximum number of bytes that a relay copies at once; a
// throttle's bucket has at least this size.
const maxPiece = 64 << 10

// throttle limits bytes per second; without a limit it has almost no cost.
type throttle struct {
	limit atomic.Pointer[rate.Limiter]
}

// set sets the limit to mbps times 10^6 bits per second; 0 means no limit.
func (t *throttle) set(mbps int) {
	if mbps <= 0 {
		t.limit.Store(nil)
		return
	}
	perSecond := float64(mbps) * 1e6 / 8
	t.limit.Store(rate.NewLimiter(rate.Limit(perSecond), max(maxPiece, int(perSecond/20))))
}

// wait waits until n bytes may pass.
func (t *throttle) wait(ctx context.Context, n int) error {
	l := t.limit.Load()
	if l == nil {
		return nil
	}
	return l.WaitN(ctx, min(n, maxPiece))
}

// admit reports whether a datagram of n bytes may pass now.
func (t *throttle) admit(n int) bool {
	l := t.limit.Load()
	return l == nil || l.AllowN(time.Now(), min(n, maxPiece))
}
