package cli

import (
	"bytes"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

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
		if drives(r) {
			return ' '
		}
		return r
	}, s)
}

// drives tells whether a rune does something to a terminal instead of being
// shown: a control (C0 and C1), a line or paragraph separator, or a mark that
// changes the direction of the text.
func drives(r rune) bool {
	return unicode.IsControl(r) || r == 0x2028 || r == 0x2029 || unicode.Is(unicode.Bidi_Control, r)
}

// plainWriter passes log bytes of a guest on to a terminal without escape
// sequences that could drive it: of the controls only tab, newline and
// carriage return pass; the others, and bytes that are no UTF-8, become dots.
// Colours are lost on purpose.
type plainWriter struct {
	w    io.Writer
	rest []byte // the begun rune at the end of the last write
}

func (p *plainWriter) Write(b []byte) (int, error) {
	in := append(p.rest, b...)
	clean := make([]byte, 0, len(in))
	for len(in) > 0 && utf8.FullRune(in) {
		r, size := utf8.DecodeRune(in)
		switch {
		case r == utf8.RuneError && size == 1, drives(r) && r != '\t' && r != '\n' && r != '\r':
			clean = append(clean, '.')
		default:
			clean = append(clean, in[:size]...)
		}
		in = in[size:]
	}
	p.rest = bytes.Clone(in)
	if _, err := p.w.Write(clean); err != nil {
		return 0, err
	}
	return len(b), nil
}

// logWriter is where log bytes go: unchanged into files and pipes, plain on
// a terminal.
func logWriter(w io.Writer) io.Writer {
	if _, tty := terminal(w); tty {
		return &plainWriter{w: w}
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

// parseDays is time.ParseDuration with days in front.
func parseDays(s string) (time.Duration, error) {
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
	return total, nil
}

func parseTTL(s string) (time.Duration, error) {
	total, err := parseDays(s)
	if err != nil {
		return 0, err
	}
	if err := agentlab.ValidateTTL(total); err != nil {
		return 0, err
	}
	if total%time.Minute != 0 {
		return 0, fmt.Errorf("%q is not a whole number of minutes", s)
	}
	return total, nil
}
