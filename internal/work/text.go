package work

import (
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
)

// SanitizeLines is agentlab.WithoutControls for a text of several lines.
func SanitizeLines(s string) string {
	lines := strings.Split(s, "\n")
	for i, line := range lines {
		lines[i] = agentlab.WithoutControls(line)
	}
	return strings.Join(lines, "\n")
}

// ByteSize formats a size with binary units.
func ByteSize(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return strconv.FormatInt(n, 10) + " B"
	}
	f := float64(n)
	i := -1
	for f >= 1024 && i < len(units)-1 {
		f /= 1024
		i++
	}
	return fmt.Sprintf("%.1f %ciB", f, units[i])
}

// JoinNames joins the first names of a list.
func JoinNames(names []string) string {
	const most = 10
	text := agentlab.WithoutControls(strings.Join(names[:min(most, len(names))], ", "))
	if n := len(names) - most; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return text
}

// ShellQuote quotes s as one word of a shell, if necessary.
func ShellQuote(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./-_") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// LocalFault returns the error for a file of this machine that cannot be read or
// written.
func LocalFault(name string, err error) error {
	if e, ok := errors.AsType[*agentlab.Error](err); ok {
		return e
	}
	code := agentlab.CodeUnavailable
	if fsfault.Full(err) {
		code = agentlab.CodeNoSpace
	}
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		err = e.Err
	}
	return agentlab.Errorf(code, "cannot copy %s: %w", fmt.Sprintf("%.200q", name), err)
}

// LocalTime formats a time for the user, to the second and in the local time zone.
func LocalTime(t time.Time) string { return t.Local().Format("2006-01-02 15:04:05") }
