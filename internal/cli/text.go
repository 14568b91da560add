package cli

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/work"
)

func orDash(s string) string { return cmp.Or(s, "-") }

func dashInt(n int) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func firstLine(s string, most int) string {
	s, _, more := strings.Cut(strings.TrimSpace(s), "\n")
	if r := []rune(s); len(r) > most {
		return string(r[:most-1]) + "…"
	}
	if more {
		return s + " …"
	}
	return s
}

func firstOf(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return args[0]
}

// usedBytes formats a size that may be unknown.
func usedBytes(n int64) string {
	if n == 0 {
		return "-"
	}
	return work.ByteSize(n)
}
