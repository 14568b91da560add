package cli

import (
	"bytes"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
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
		m := newMeter(&out, steps(), tty)
		r := &meterReader{r: io.LimitReader(zeros{}, 100<<10), m: m, what: "sending", total: 100 << 10}
		if n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{r}, make([]byte, 1<<10)); n != 100<<10 || err != nil {
			t.Fatal(n, err)
		}
		m.done()
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

// Packing shows what git itself says, and a short step shows nothing.
func TestMeterOfPacking(t *testing.T) {
	repo := sampleRepo(t)
	src, err := findSource(t.Context(), repo, "")
	if err != nil {
		t.Fatal(err)
	}
	pack := func(now func() time.Time) string {
		t.Helper()
		var out bytes.Buffer
		m := newMeter(&out, now, false)
		file, err := packBundle(t.Context(), t.TempDir(), src, &gitProgress{m: m, what: "packing"})
		if err != nil {
			t.Fatal(err)
		}
		_ = file.Close()
		return out.String()
	}
	hour := time.Unix(0, 0)
	if got := pack(func() time.Time { hour = hour.Add(time.Hour); return hour }); !strings.Contains(got, "packing: writing objects, 100% of 3") {
		t.Errorf("progress is %q", got)
	}
	if got := pack(func() time.Time { return time.Unix(0, 0) }); got != "" {
		t.Errorf("a step that takes no time shows %q", got)
	}
}

// A command that waits for long says so once; a short one says nothing.
func TestSlowIsSaidOnce(t *testing.T) {
	var out bytes.Buffer
	a := &App{Stderr: &out}
	slow := make(chan time.Time)
	a.saySlowAfter(slow, "waiting")()
	stop := a.saySlowAfter(slow, "waiting for it")
	slow <- time.Time{}
	stop()
	stop()
	if got := out.String(); got != "waiting for it\n" {
		t.Errorf("it says %q", got)
	}
}

// Each command for the repository of a session says what it waits for.
func TestSlowCommandsSayWhatTheyWaitFor(t *testing.T) {
	a := &App{Stderr: io.Discard}
	var said []string
	ended := 0
	r := sessionRepo{sandbox: "1", slow: func(what string) func() {
		said = append(said, what)
		return func() { ended++ }
	}}
	r.c = commandClient(t, func(command []string, in []byte) ([]byte, string, int) {
		if verb := command[2]; verb == "receive" {
			return []byte(`{"errors":{}}`), "", 0
		}
		return nil, "", 0
	})
	for verb := range slowWork {
		if verb != "receive" {
			if err := r.call(t.Context(), nil, io.Discard, verb); err != nil {
				t.Error(verb, err)
			}
		}
	}
	bundle, err := os.Create(filepath.Join(t.TempDir(), "bundle"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = bundle.Close() }()
	if _, err := r.push(t.Context(), pushed{bundle: bundle}, nil, a.Meter()); err != nil {
		t.Error(err)
	}
	if slices.Sort(said); !slices.Equal(said, slices.Sorted(maps.Values(slowWork))) || ended < len(said) {
		t.Errorf("commands say %q, and %d have ended", said, ended)
	}
}
