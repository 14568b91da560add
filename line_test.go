package agentlab

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"
)

func TestOneLine(t *testing.T) {
	for in, want := range map[string]string{
		"":                            "",
		"plain text":                  "plain text",
		"  a\tb\r\n\n c ":             "a b c",
		"\x1b[31mred\x00\u202e\u2028": "[31mred",
		"bad\xffutf":                  "bad?utf",
		strings.Repeat("x", 21):       strings.Repeat("x", 20) + "…",
		strings.Repeat("é", 11):       strings.Repeat("é", 10) + "…",
		"x" + strings.Repeat("é", 11): "x" + strings.Repeat("é", 9) + "…",
	} {
		if got := OneLine(in, 20); got != want {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
	}
}

func FuzzOneLine(f *testing.F) {
	f.Add("a\nb", 5)
	f.Fuzz(func(t *testing.T, s string, limit int) {
		if limit < 0 || limit > 1000 {
			return
		}
		got := OneLine(s, limit)
		if len(got) > limit+len("…") || strings.ContainsFunc(got, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("%q, %d: %q", s, limit, got)
		}
	})
}

func TestIsPrintable(t *testing.T) {
	for in, want := range map[string]bool{
		"": true, "a b": true, "ünï": true, "a\tb": false, "a\n": false, "\x7f": false, "bad\xff": false, "x\u202ey": false, "x\u2028y": false,
	} {
		if got := IsPrintable(in); got != want {
			t.Errorf("%q: %v", in, got)
		}
	}
}

func TestEscapeJSON(t *testing.T) {
	const hostile = "a\u009b2J\u202eb\x7f\u2028\u00e9"
	text, err := json.MarshalIndent(map[string]string{hostile: hostile}, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	got := EscapeJSON(string(text))
	if i := strings.IndexFunc(got, func(r rune) bool { return r != '\n' && ControlsTerminal(r) }); i >= 0 || !strings.Contains(got, "\u00e9") {
		t.Errorf("%q", got)
	}
	var back map[string]string
	if err := json.Unmarshal([]byte(got), &back); err != nil || back[hostile] != hostile {
		t.Errorf("%q, %v", back, err)
	}
}
