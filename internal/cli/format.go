package cli

import (
	"fmt"
	"io"
	"iter"
	"text/tabwriter"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// table writes aligned columns. Some cells come from guests, so it replaces
// control characters.
type table struct{ w *tabwriter.Writer }

func newTable(out io.Writer, header ...any) *table {
	t := &table{tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)}
	t.row(header...)
	return t
}

func (t *table) row(cells ...any) {
	for i, c := range cells {
		if i > 0 {
			_, _ = io.WriteString(t.w, "\t")
		}
		_, _ = io.WriteString(t.w, agentlab.WithoutControls(fmt.Sprint(c)))
	}
	_, _ = io.WriteString(t.w, "\n")
}

// optional writes a row if its value is not empty.
func (t *table) optional(label, value string) {
	if value != "" {
		t.row(label, value)
	}
}

func (t *table) flush() error { return t.w.Flush() }

// each calls fn for each value of a stream until one of them returns an error.
func each[T any](stream iter.Seq2[T, error], fn func(T) error) error {
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

// age formats the time since t with one or two units.
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
