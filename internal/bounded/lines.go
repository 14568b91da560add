// Package bounded limits what untrusted writers can add to logs and buffers.
package bounded

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// Lines returns a logger that passes burst records at once, then one record
// per interval every, and drops the others. The next record that passes has
// the number of dropped ones. Loggers derived from it share its limit.
func Lines(log *slog.Logger, burst int, every time.Duration, clock func() time.Time) *slog.Logger {
	return slog.New(&linesHandler{Handler: log.Handler(), lines: rate.NewLimiter(rate.Every(every), burst), clock: clock, dropped: new(atomic.Int64)})
}

// Recovered reports whether a logger that Lines returned would pass burst records
// at once, as a new one would, and has dropped none that it has not reported.
func Recovered(log *slog.Logger) bool {
	h, ok := log.Handler().(*linesHandler)
	return !ok || h.dropped.Load() == 0 && h.lines.TokensAt(h.clock()) >= float64(h.lines.Burst())
}

type linesHandler struct {
	slog.Handler
	lines   *rate.Limiter
	clock   func() time.Time
	dropped *atomic.Int64
}

// Handle implements slog.Handler.
func (h *linesHandler) Handle(ctx context.Context, r slog.Record) error {
	if !h.lines.AllowN(h.clock(), 1) {
		h.dropped.Add(1)
		return nil
	}
	if n := h.dropped.Swap(0); n > 0 {
		r.AddAttrs(slog.Int64("dropped_before", n))
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h *linesHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	c := *h
	c.Handler = h.Handler.WithAttrs(attrs)
	return &c
}

// WithGroup implements slog.Handler.
func (h *linesHandler) WithGroup(name string) slog.Handler {
	c := *h
	c.Handler = h.Handler.WithGroup(name)
	return &c
}
