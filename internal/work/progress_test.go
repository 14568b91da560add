package work

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"
)

// steps is a clock that goes on by a second with every reading.
func steps() func() time.Time {
	now := time.Unix(0, 0)
	return func() time.Time { now = now.Add(time.Second); return now }
}

func TestMeterOfAnUpload(t *testing.T) {
	for _, tty := range []bool{false, true} {
		var out bytes.Buffer
		m := NewMeter(&out, steps(), tty)
		r := &MeterReader{R: io.LimitReader(zeros{}, 100<<10), M: m, What: "sending", Total: 100 << 10}
		if n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{r}, make([]byte, 1<<10)); n != 100<<10 || err != nil {
			t.Fatal(n, err)
		}
		m.Done()
		text := out.String()
		if !strings.Contains(text, "% of 100.0 KiB, ") || !strings.Contains(text, "/s") {
			t.Errorf("terminal %v: %q", tty, text)
		}
		lines, rewritten := strings.Count(text, "\n"), strings.Count(text, "\r")
		if tty && (lines != 0 || rewritten < 50 || !strings.HasSuffix(text, "\r\x1b[K")) {
			t.Errorf("on a terminal: %d lines, %d rewritten", lines, rewritten)
		}
		if !tty && (rewritten != 0 || lines < 10 || lines > 50) {
			t.Errorf("in a file: %d lines, %d rewritten", lines, rewritten)
		}
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// notes is a UI that only shows progress.
type notes struct {
	UI
	out io.Writer
}

func (n notes) Progressf(format string, args ...any) { fmt.Fprintf(n.out, format+"\n", args...) }

// A command that waits for long says so once; a short one says nothing.
func TestSlowIsSaidOnce(t *testing.T) {
	var out bytes.Buffer
	a := notes{out: &out}
	slow := make(chan time.Time)
	saySlowAfter(a, slow, "waiting")()
	stop := saySlowAfter(a, slow, "waiting for it")
	slow <- time.Time{}
	stop()
	stop()
	if got := out.String(); got != "waiting for it\n" {
		t.Errorf("it says %q", got)
	}
}
