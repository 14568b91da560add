package cli

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/work"
)

// OrDash returns s, or a dash for an empty text.
func OrDash(s string) string { return cmp.Or(s, "-") }

// DashInt returns n as a text, or a dash for 0.
func DashInt(n int) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

// YesNo returns "yes" or "no".
func YesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// FirstLine returns the first line of s, of at most that many characters.
func FirstLine(s string, most int) string {
	s, _, more := strings.Cut(strings.TrimSpace(s), "\n")
	if r := []rune(s); len(r) > most {
		return string(r[:most-1]) + "…"
	}
	if more {
		return s + " …"
	}
	return s
}

// FirstOf returns the first argument, or "" if there is none.
func FirstOf(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return args[0]
}

// UsedBytes formats a size that may be unknown.
func UsedBytes(n int64) string {
	if n == 0 {
		return "-"
	}
	return work.ByteSize(n)
}
