package work

import (
	"fmt"
	"io"
	"time"
)

// How often progress is shown: on a terminal in one line that is rewritten,
// otherwise in lines of their own.
const (
	meterRewrite = 200 * time.Millisecond
	meterLines   = 5 * time.Second
)

// Meter shows the progress of one step, if the step takes long enough. It must not be used concurrently.
type Meter struct {
	out   io.Writer
	Now   func() time.Time
	tty   bool
	Began time.Time
	next  time.Time // when it prints again
	shown bool      // there is a line on the terminal to remove
}

// NewMeter returns a meter that writes to out, and starts it. On a terminal (tty) it
// rewrites one line. now is the clock.
func NewMeter(out io.Writer, now func() time.Time, tty bool) *Meter {
	m := &Meter{out: out, Now: now, tty: tty}
	m.Start()
	return m
}

// Start begins a step, or the next one.
func (m *Meter) Start() {
	m.Began = m.Now()
	m.next = m.Began.Add(m.pause())
}

func (m *Meter) pause() time.Duration {
	if m.tty {
		return meterRewrite
	}
	return meterLines
}

// Show prints the text if it is time to; only then it calls text.
func (m *Meter) Show(text func() string) {
	now := m.Now()
	if now.Before(m.next) {
		return
	}
	m.next = now.Add(m.pause())
	if m.tty {
		_, _ = fmt.Fprintf(m.out, "\r%s\x1b[K", text())
		m.shown = true
		return
	}
	_, _ = fmt.Fprintln(m.out, text())
}

// Done ends the step and removes the line on a terminal.
func (m *Meter) Done() {
	if m.shown {
		_, _ = io.WriteString(m.out, "\r\x1b[K")
		m.shown = false
	}
}

// bytes shows how many of all bytes are done, and the rate.
func (m *Meter) bytes(what string, n, total int64) {
	m.Show(func() string {
		rate := ""
		if s := m.Now().Sub(m.Began).Seconds(); s > 0 {
			rate = ", " + ByteSize(int64(float64(n)/s)) + "/s"
		}
		return fmt.Sprintf("%s: %d%% of %s%s", what, n*100/max(total, 1), ByteSize(total), rate)
	})
}

// MeterReader shows how much of its reader has been read.
type MeterReader struct {
	R     io.Reader
	M     *Meter
	What  string // the step, such as "sending"
	Total int64  // bytes of all that R has
	n     int64
}

// Read implements io.Reader.
func (r *MeterReader) Read(p []byte) (int, error) {
	n, err := r.R.Read(p)
	r.n += int64(n)
	r.M.bytes(r.What, r.n, r.Total)
	return n, err
}
