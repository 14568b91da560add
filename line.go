package agentlab

import (
	"strings"
	"unicode"
)

// OneLine makes text that may come from a guest or a backend fit for one line
// of a row, a log or a terminal: runs of white space and of what is not
// printable become one space, and at most limit bytes are kept.
func OneLine(s string, limit int) string {
	s = strings.Join(strings.FieldsFunc(strings.ToValidUTF8(s, "?"), func(r rune) bool {
		return unicode.IsSpace(r) || !unicode.IsPrint(r)
	}), " ")
	if len(s) > limit {
		s = strings.ToValidUTF8(s[:limit], "") + "…"
	}
	return s
}

// Reason is OneLine for the reason of a job or sandbox.
func Reason(s string) string { return OneLine(s, MaxReasonBytes) }

// MaxReasonBytes is the length to which reasons of jobs and sandboxes are cut.
const MaxReasonBytes = 500
