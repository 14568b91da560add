package termfilter

import (
	"strings"
	"testing"
)

func TestRestore(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"text": "\x1b[m",
		"\x1b[?1049h\x1b[?1000;1006h\x1b[?2004h\x1b[?25l\x1b=\x1b[1;20r":    "\x1b[m\x1b>\x1b7\x1b[r\x1b8\x1b[?1000l\x1b[?1006l\x1b[?2004l\x1b[?25h\x1b[?1049l",
		"\x1b[?1049h\x1b[?1049l\x1b[?25l\x1b[?25h\x1b=\x1b>\x1b[2;3r\x1b[r": "\x1b[m",
		"\x1b[>1u\x1b[>1u\x1b[<u\x1b[>4;2m\x1b[4 q":                         "\x1b[m\x1b[<1u\x1b[>4m\x1b[0 q",
		"\x1b[?100": "\x1b[m", // the beginning of a sequence
	} {
		var out strings.Builder
		f := New(&out, Options{})
		_, _ = f.Write([]byte(in))
		out.Reset()
		if err := f.Restore(); err != nil || out.String() != want {
			t.Errorf("after %q: %q, not %q", in, out.String(), want)
		}
		out.Reset()
		if err := f.Restore(); err != nil || out.String() != "\x1b[m" {
			t.Errorf("a second time after %q: %q", in, out.String())
		}
	}
}
