package guestserver

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"
)

// What one guest may make us write into the daemon's log, which all share and
// which has a bounded size: a guest must not push the lines of others out.
const (
	linesPerSecond = 0.2
	lineBurst      = 50
)

// quiet returns a logger that drops lines that come too fast. The next one
// that passes tells how many were dropped.
func quiet(log *slog.Logger, clock func() time.Time) *slog.Logger {
	return slog.New(&quietHandler{
		Handler: log.Handler(), dropped: &atomic.Int64{}, lines: &bucket{rate: linesPerSecond, burst: lineBurst, clock: clock},
	})
}

type quietHandler struct {
	slog.Handler
	lines   *bucket
	dropped *atomic.Int64
}

// Handle implements slog.Handler.
func (h *quietHandler) Handle(ctx context.Context, r slog.Record) error {
	if !h.lines.take() {
		h.dropped.Add(1)
		return nil
	}
	if n := h.dropped.Swap(0); n > 0 {
		r.AddAttrs(slog.Int64("dropped_before", n))
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h *quietHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	c := *h
	c.Handler = h.Handler.WithAttrs(attrs)
	return &c
}

// WithGroup implements slog.Handler.
func (h *quietHandler) WithGroup(name string) slog.Handler {
	c := *h
	c.Handler = h.Handler.WithGroup(name)
	return &c
}
