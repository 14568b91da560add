package cli

import (
	"fmt"
	"io"
	"iter"
	"text/tabwriter"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Table writes aligned columns. Some cells come from guests, so it replaces
// control characters.
type Table struct{ w *tabwriter.Writer }

// NewTable returns a table with a header; without one, the table has no header.
func NewTable(out io.Writer, header ...any) *Table {
	t := &Table{tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)}
	t.Row(header...)
	return t
}

// Row adds a line.
func (t *Table) Row(cells ...any) {
	for i, c := range cells {
		if i > 0 {
			_, _ = io.WriteString(t.w, "\t")
		}
		_, _ = io.WriteString(t.w, agentlab.WithoutControls(fmt.Sprint(c)))
	}
	_, _ = io.WriteString(t.w, "\n")
}

// Optional writes a row if its value is not empty.
func (t *Table) Optional(label, value string) {
	if value != "" {
		t.Row(label, value)
	}
}

// Flush prints the table.
func (t *Table) Flush() error { return t.w.Flush() }

// Each calls fn for each value of a stream until one of them returns an error.
func Each[T any](stream iter.Seq2[T, error], fn func(T) error) error {
	for v, err := range stream {
		if err == nil {
			err = fn(v)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Age formats the time since t with one or two units.
func (a *App) Age(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return ShortDuration(a.Now().Sub(t))
}

// Until formats the time left until t.
func (a *App) Until(t time.Time) string {
	d := t.Sub(a.Now())
	if d <= 0 {
		return "expired"
	}
	return ShortDuration(d)
}

// ShortDuration returns a duration in at most two units, such as 4h05m.
func ShortDuration(d time.Duration) string {
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
