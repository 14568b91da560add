package cli

import (
	"bytes"
	"fmt"
	"io"
	"regexp"
	"time"
)

// How often progress is shown: on a terminal as one line that is rewritten,
// elsewhere as a line of its own.
const (
	meterRewrite = 200 * time.Millisecond
	meterLines   = 5 * time.Second
)

// meter shows the progress of one step on standard error. A step that is over
// before its time shows nothing. It is for one goroutine at a time.
type meter struct {
	out   io.Writer
	now   func() time.Time
	tty   bool
	began time.Time
	next  time.Time // when it shows something again
	shown bool      // a line on the terminal is to be ended
}

func (a *App) newMeter() *meter {
	m := &meter{out: a.Stderr, now: time.Now}
	_, m.tty = terminal(a.Stderr)
	m.start()
	return m
}

func (m *meter) start() {
	m.began = m.now()
	m.next = m.began.Add(m.pause())
}

func (m *meter) pause() time.Duration {
	if m.tty {
		return meterRewrite
	}
	return meterLines
}

// show shows the text, which is made only when it is time for it.
func (m *meter) show(text func() string) {
	now := m.now()
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

// done ends the step: the line on a terminal is removed.
func (m *meter) done() {
	if m.shown {
		_, _ = io.WriteString(m.out, "\r\x1b[K")
		m.shown = false
	}
}

// bytes shows how many bytes of a total were moved, and how fast.
func (m *meter) bytes(what string, n, total int64) {
	m.show(func() string {
		rate := ""
		if s := m.now().Sub(m.began).Seconds(); s > 0 {
			rate = ", " + byteSize(int64(float64(n)/s)) + "/s"
		}
		return fmt.Sprintf("%s: %d%% of %s%s", what, n*100/max(total, 1), byteSize(total), rate)
	})
}

// meterReader shows how far its reader has been read.
type meterReader struct {
	r        io.Reader
	m        *meter
	what     string
	n, total int64
}

func (r *meterReader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	r.n += int64(n)
	r.m.bytes(r.what, r.n, r.total)
	return n, err
}

// gitProgress shows the percentages that git writes to standard error.
type gitProgress struct {
	m    *meter
	what string
	rest []byte
}

var gitPercent = regexp.MustCompile(`^(Counting|Compressing|Writing) objects: +([0-9]{1,3})% \(([0-9]+)/([0-9]+)\)`)

func (g *gitProgress) Write(p []byte) (int, error) {
	g.rest = append(g.rest, p...)
	for {
		i := bytes.IndexAny(g.rest, "\r\n")
		if i < 0 {
			return len(p), nil
		}
		if f := gitPercent.FindSubmatch(g.rest[:i]); f != nil {
			g.m.show(func() string {
				return fmt.Sprintf("%s: %s objects, %s%% of %s", g.what, bytes.ToLower(f[1]), f[2], f[4])
			})
		}
		g.rest = g.rest[i+1:]
	}
}
