package cli

import (
	"bytes"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"

	"github.com/agentlab-vm/agentlab/internal/work"
)

func TestDurationFlag(t *testing.T) {
	tests := []struct {
		in   string
		want time.Duration
		ok   bool
	}{
		{"30m", 30 * time.Minute, true},
		{"4h", 4 * time.Hour, true},
		{"2d", 48 * time.Hour, true},
		{"1d12h", 36 * time.Hour, true},
		{"90m", 90 * time.Minute, true},
		{"0", 0, false},
		{"0m", 0, false},
		{"-1h", 0, false},
		{"30s", 0, false},
		{"1m30s", 0, false},
		{"31d", 0, false},
		{"99999d", 0, false},
		{"d", 0, false},
		{"soon", 0, false},
		{"", 0, false},
		{"5", 0, false},
	}
	for _, tt := range tests {
		var got time.Duration
		err := durationFlag{&got, agentlab.MaxTTL}.Set(tt.in)
		if (err == nil) != tt.ok || got != tt.want {
			t.Errorf("Set(%q) = %v, %v; want %v, ok %v", tt.in, got, err, tt.want, tt.ok)
		}
	}
}

// Nothing that a guest wrote may drive the terminal.
func TestPlain(t *testing.T) {
	tests := map[string]string{
		"plain text ü":          "plain text ü",
		"\x1b]0;title\x07x":     " ]0;title x",
		"a\tb\nc":               "a b c",
		"c1 \u009b31m":          "c1  31m",
		"bidi \u202egnp.exe":    "bidi  gnp.exe",
		"isolate \u2066x\u2069": "isolate  x ",
		"line\u2028separator":   "line separator",
	}
	for in, want := range tests {
		if got := agentlab.WithoutControls(in); got != want {
			t.Errorf("agentlab.WithoutControls(%q) = %q, want %q", in, got, want)
		}
	}
	var out bytes.Buffer
	const in, want = "ok\r\n\x1b[2Jü\x7f\a|\u009b2J|\x9b2J|\u202egnp|\u2028|\U0001f600\xff.", "ok\r\n.[2Jü..|.2J|.2J|.gnp|.|\U0001f600.."
	for chunk := 1; chunk <= len(in); chunk++ { // runes are cut at every place
		out.Reset()
		w := work.Sanitizer(&out)
		for b := []byte(in); len(b) > 0; {
			n := min(chunk, len(b))
			if _, err := w.Write(b[:n]); err != nil {
				t.Fatal(err)
			}
			b = b[n:]
		}
		if got := out.String(); got != want {
			t.Errorf("plainWriter wrote %q in chunks of %d, want %q", got, chunk, want)
		}
	}
}

func TestByteSizeAndDurations(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 1 << 30: "1.0 GiB", 1<<63 - 1: "8.0 EiB"} {
		if got := work.ByteSize(n); got != want {
			t.Errorf("byteSize(%d) = %q, want %q", n, got, want)
		}
	}
	if got := UsedBytes(0); got != "-" {
		t.Errorf("a size that is not known is %q", got)
	}
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 59 * time.Second: "59s", 61 * time.Second: "1m01s",
		2*time.Hour + 3*time.Minute: "2h03m", 50 * time.Hour: "2d2h",
	} {
		if got := ShortDuration(d); got != want {
			t.Errorf("shortDuration(%v) = %q, want %q", d, got, want)
		}
	}
}

func TestSinceFlag(t *testing.T) {
	now := time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)
	for in, want := range map[string]time.Time{
		"10m": now.Add(-10 * time.Minute), "2d": now.Add(-48 * time.Hour), "1d12h": now.Add(-36 * time.Hour),
		"2026-01-30T15:04:05Z": time.Date(2026, 1, 30, 15, 4, 5, 0, time.UTC),
		"":                     {}, "-1h": {}, "d": {}, "soon": {}, "2026-01-30": {},
	} {
		var got time.Time
		err := sinceFlag{&got, func() time.Time { return now }}.Set(in)
		if !got.Equal(want) || (err == nil) == want.IsZero() {
			t.Errorf("Set(%q) = %v, %v; want %v", in, got, err, want)
		}
	}
}

// Messages may have text of a build or a guest.
func TestErrorsHaveNoControlCharacters(t *testing.T) {
	var out bytes.Buffer
	a := &App{Stderr: &out}
	a.PrintError(agentlab.Errorf(agentlab.CodeInternal, "bad \x1b]0;title\x07 \u009b2J text\nmore").WithHint("see\rthis"))
	if got, want := out.String(), "agentlab: bad  ]0;title   2J text\nmore\n  → see this\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
