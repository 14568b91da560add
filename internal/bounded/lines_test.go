package bounded_test

import (
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab/internal/bounded"
)

// A burst passes, then one line at a time, which says how many were dropped;
// loggers that are derived from it have the same limit.
func TestLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b strings.Builder
		drop := func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}
		log := bounded.Lines(slog.New(slog.NewTextHandler(&b, &slog.HandlerOptions{ReplaceAttr: drop})), 3, time.Second, time.Now)
		want := func(lines string) {
			t.Helper()
			if b.String() != lines {
				t.Errorf("logged %q, want %q", b.String(), lines)
			}
			b.Reset()
		}
		recovered := func(want bool, when string) {
			t.Helper()
			if bounded.Recovered(log) != want {
				t.Errorf("recovered %t %s", !want, when)
			}
		}
		derived := log.With("a", 1).WithGroup("g")
		recovered(true, "at the start")
		for range 3 {
			log.Info("x")
			derived.Info("y", "b", 2)
		}
		want("level=INFO msg=x\nlevel=INFO msg=y a=1 g.b=2\nlevel=INFO msg=x\n")
		time.Sleep(time.Second)
		derived.Info("z")
		log.Info("lost")
		want("level=INFO msg=z a=1 g.dropped_before=3\n")
		recovered(false, "after a burst")
		time.Sleep(time.Minute)
		recovered(false, "with a dropped line")
		for range 10 {
			log.Info("w")
		}
		want("level=INFO msg=w dropped_before=1\n" + strings.Repeat("level=INFO msg=w\n", 2))
		time.Sleep(time.Minute)
		log.Info("v")
		recovered(false, "after a line")
		time.Sleep(time.Second)
		recovered(true, "a second later")
	})
}
