package agentlab

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// OneLine turns text that may come from a guest or a backend into one line that
// is safe for a row, a log or a terminal. Runs of white space and of
// unprintable characters become one space. Text of more than limit bytes is
// cut.
func OneLine(s string, limit int) string {
	return Cut(strings.Join(strings.FieldsFunc(strings.ToValidUTF8(s, "?"), func(r rune) bool {
		return unicode.IsSpace(r) || !unicode.IsPrint(r)
	}), " "), limit)
}

// Cut shortens text of more than limit bytes to at most limit bytes, with an
// ellipsis after them. It splits no character.
func Cut(s string, limit int) string {
	if len(s) > limit {
		s = strings.ToValidUTF8(s[:limit], "") + "…"
	}
	return s
}

// Reason is OneLine for the reason of a job or sandbox.
func Reason(s string) string { return OneLine(s, MaxReasonBytes) }

// IsPrintable reports whether s is valid UTF-8 without control characters and
// without characters that change the text direction.
func IsPrintable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}

// ControlsTerminal reports whether a rune controls a terminal: a control character (C0
// and C1), a line or paragraph separator, or a bidirectional formatting character.
func ControlsTerminal(r rune) bool {
	return unicode.IsControl(r) || r == 0x2028 || r == 0x2029 || unicode.Is(unicode.Bidi_Control, r)
}

// WithoutControls replaces what controls a terminal by spaces.
func WithoutControls(s string) string {
	return strings.Map(func(r rune) rune {
		if ControlsTerminal(r) {
			return ' '
		}
		return r
	}, s)
}

// EscapeJSON replaces what controls a terminal in the strings of a JSON text by its
// escape in JSON. Line breaks between values stay.
func EscapeJSON(s string) string {
	if !strings.ContainsFunc(s, ControlsTerminal) {
		return s
	}
	var b strings.Builder
	b.Grow(len(s))
	for _, r := range s {
		if r != '\n' && ControlsTerminal(r) {
			fmt.Fprintf(&b, `\u%04x`, r)
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// MaxReasonBytes is the length to which reasons of jobs and sandboxes are cut.
const MaxReasonBytes = 500

// Plural returns a number with its noun: 1 job, 2 jobs, 2 sandboxes, 2 entries.
func Plural[T int | int64](n T, noun string) string {
	switch {
	case n == 1:
	case strings.HasSuffix(noun, "x"):
		noun += "es"
	case strings.HasSuffix(noun, "try"):
		noun = strings.TrimSuffix(noun, "y") + "ies"
	default:
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}
