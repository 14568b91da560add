package mcp

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"testing"
)

func TestOutput(t *testing.T) {
	for _, size := range []int{1, 100, 4096, 100_000, 1 << 20} {
		for _, total := range []int{0, 1, keptHead, keptHead + keptTail, keptHead + keptTail + 1, 1 << 20} {
			want := bytes.Repeat([]byte("0123456789abcde\n"), total/16+1)[:total]
			var o Output
			for rest := want; len(rest) > 0; {
				n, err := o.Write(rest[:min(size, len(rest))])
				if err != nil {
					t.Fatal(err)
				}
				rest = rest[n:]
			}
			left := max(total-keptHead-keptTail, 0)
			text := string(want)
			if left > 0 {
				text = fmt.Sprintf("%s\n[%d bytes are left out here]\n%s", want[:keptHead], left, want[total-keptTail:])
			}
			if o.Text() != text {
				t.Errorf("%d bytes in writes of %d: wrong text", total, size)
			}
			piece := make([]byte, size)
			_, _ = o.Write(make([]byte, 4*keptTail))
			if n := testing.AllocsPerRun(100, func() { _, _ = o.Write(piece) }); n > 0 {
				t.Errorf("%v allocations for each write", n)
			}
		}
	}
}

// A command may write while its output is read.
func TestOutputIsSafe(t *testing.T) {
	var o Output
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 50 {
				_, _ = o.Write([]byte("12345678"))
				_ = o.Text()
			}
		})
	}
	wg.Wait()
	if text := o.Text(); len(text) != 4*50*8 {
		t.Errorf("%d bytes", len(text))
	}
}

func TestClean(t *testing.T) {
	for in, want := range map[string]string{
		"a\tb\r\nc":                                          "a\tb\nc",
		"\x1b[31mred\x1b[0m":                                 "red",
		"\x1b]0;title\x07x\x1b]52;c;YQ==\x07":                "x",
		"a\x00b\x7f\u202ec\xff":                              "a?b??c",
		"tags \U000e0049\U000e0067":                          "tags ??",
		"variants \ufe0f\U000e0100":                          "variants ??",
		"fillers \u3164\u115f\u1160\uffa0\u034f\u2800\u17b4": "fillers ???????",
		"zero\u200bwidth\u2028line\u00a0":                    "zero?width line ",
		"äöü 漢字 🙂":                                           "äöü 漢字 🙂",
	} {
		if got := Clean(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestCleanJSON(t *testing.T) {
	got, ok := CleanJSON(`{"n": 12345678901234567890, "a": ["x\u001b[31my", {"k\u200b": "<&>"}], "drop": 1, "z": null}`, func(v map[string]any) { delete(v, "drop") })
	if want := `{"a":["xy",{"k?":"<&>"}],"n":12345678901234567890,"z":null}`; !ok || string(got) != want {
		t.Errorf("%s, want %s", got, want)
	}
	for _, bad := range []string{"", "1", "[]", "null", `{"a":1}{"b":2}`, `{"a":1} x`, strings.Repeat("{", 10)} {
		if got, ok := CleanJSON(bad, func(map[string]any) {}); ok {
			t.Errorf("%s: %s", bad, got)
		}
	}
}
