package cli

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// table writes aligned columns. Cells come from the daemon and partly from
// guests, so control characters never reach the terminal.
type table struct{ w *tabwriter.Writer }

func newTable(out io.Writer, header ...string) *table {
	t := &table{tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)}
	t.row(toAny(header)...)
	return t
}

func toAny(s []string) []any {
	out := make([]any, len(s))
	for i, v := range s {
		out[i] = v
	}
	return out
}

func (t *table) row(cells ...any) {
	for i, c := range cells {
		if i > 0 {
			_, _ = io.WriteString(t.w, "\t")
		}
		_, _ = io.WriteString(t.w, plain(fmt.Sprint(c)))
	}
	_, _ = io.WriteString(t.w, "\n")
}

func (t *table) flush() error { return t.w.Flush() }

// plain replaces control characters, so that text from a guest can neither
// move the cursor nor break a table.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		if r < 0x20 || (r >= 0x7f && r < 0xa0) || r == 0x2028 || r == 0x2029 || (r >= 0x202a && r <= 0x202e) || (r >= 0x2066 && r <= 0x2069) {
			return ' '
		}
		return r
	}, s)
}

// plainWriter passes log bytes of a guest on to a terminal without escape
// sequences that could drive it: everything but tab, newline, carriage
// return and printable bytes becomes a dot. Colours are lost on purpose.
type plainWriter struct{ w io.Writer }

func (p plainWriter) Write(b []byte) (int, error) {
	clean := make([]byte, len(b))
	for i, c := range b {
		if c < 0x20 && c != '\t' && c != '\n' && c != '\r' || c == 0x7f {
			c = '.'
		}
		clean[i] = c
	}
	if _, err := p.w.Write(clean); err != nil {
		return 0, err
	}
	return len(b), nil
}

// logWriter is where log bytes go: unchanged into files and pipes, plain on
// a terminal.
func logWriter(w io.Writer) io.Writer {
	if _, tty := terminal(w); tty {
		return plainWriter{w}
	}
	return w
}

// age formats a duration since t, coarsely.
func (a *App) age(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return shortDuration(a.Now().Sub(t))
}

// until formats the time left until t.
func (a *App) until(t time.Time) string {
	d := t.Sub(a.Now())
	if d <= 0 {
		return "expired"
	}
	return shortDuration(d)
}

func shortDuration(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%dh", int(d.Hours())/24, int(d.Hours())%24)
}

// byteSize formats a size with binary units.
func byteSize(n int64) string {
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

// ttlFlag is a duration in whole minutes with days: 30m, 4h, 2d, 1d12h.
type ttlFlag struct{ d *time.Duration }

func (f ttlFlag) String() string {
	if f.d == nil || *f.d == 0 {
		return ""
	}
	return f.d.String()
}

func (ttlFlag) Type() string { return "duration" }

func (f ttlFlag) Set(s string) error {
	d, err := parseTTL(s)
	if err != nil {
		return err
	}
	*f.d = d
	return nil
}

func parseTTL(s string) (time.Duration, error) {
	rest, total := s, time.Duration(0)
	if before, after, ok := strings.Cut(s, "d"); ok {
		n, err := strconv.ParseUint(before, 10, 16)
		if err != nil {
			return 0, fmt.Errorf("%q is not a duration such as 30m, 4h or 2d", s)
		}
		total, rest = time.Duration(n)*24*time.Hour, after //nolint:gosec // 16 bits of days fit
	}
	if rest != "" {
		d, err := time.ParseDuration(rest)
		if err != nil {
			return 0, fmt.Errorf("%q is not a duration such as 30m, 4h or 2d", s)
		}
		total += d
	}
	if err := agentlab.ValidateTTL(total); err != nil {
		return 0, err
	}
	if total%time.Minute != 0 {
		return 0, fmt.Errorf("%q is not a whole number of minutes", s)
	}
	return total, nil
}
