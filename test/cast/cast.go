// Package cast records what a terminal shows as an asciicast (version 2), and draws a
// recording as an animated SVG. The recordings of the documentation are made with it.
package cast

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// Cast is a recording of a terminal of Width columns and Height rows.
type Cast struct {
	Width, Height int
	Title         string
	Events        []Event
}

// Event is output of a program, at a time since the beginning.
type Event struct {
	At   time.Duration
	Data string
}

// header is the first line of a file. Idle time has been shortened already.
type header struct {
	Version int               `json:"version"`
	Width   int               `json:"width"`
	Height  int               `json:"height"`
	Title   string            `json:"title,omitempty"`
	Env     map[string]string `json:"env,omitempty"`
}

// WriteTo writes the recording as a file in the format asciicast v2.
func (c *Cast) WriteTo(w io.Writer) (n int64, err error) {
	var out strings.Builder
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	err = enc.Encode(header{2, c.Width, c.Height, c.Title, map[string]string{"TERM": "xterm-256color"}})
	for _, e := range c.Events {
		if err == nil {
			err = enc.Encode([]any{json.Number(fmt.Sprintf("%.2f", e.At.Seconds())), "o", e.Data})
		}
	}
	if err != nil {
		return 0, err
	}
	written, err := io.WriteString(w, out.String())
	return int64(written), err
}

// Parse reads a file in the format asciicast v2 that has only output. The times must not
// decrease.
func Parse(r io.Reader) (*Cast, error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	var h header
	if !lines.Scan() {
		return nil, fmt.Errorf("no header: %w", lines.Err())
	}
	if err := json.Unmarshal(lines.Bytes(), &h); err != nil {
		return nil, fmt.Errorf("header: %w", err)
	}
	if h.Version != 2 || h.Width < 1 || h.Width > 500 || h.Height < 1 || h.Height > 200 {
		return nil, fmt.Errorf("version %d with %dx%d cells", h.Version, h.Width, h.Height)
	}
	c := &Cast{Width: h.Width, Height: h.Height, Title: h.Title}
	for n := 2; lines.Scan(); n++ {
		var seconds float64
		var kind, data string
		fields := []any{&seconds, &kind, &data}
		if err := json.Unmarshal(lines.Bytes(), &fields); err != nil || len(fields) != 3 {
			return nil, fmt.Errorf("line %d is not an event (%w)", n, err)
		}
		at := time.Duration(seconds*100+0.5) * 10 * time.Millisecond
		if kind != "o" || len(c.Events) > 0 && at < c.Events[len(c.Events)-1].At {
			return nil, fmt.Errorf("line %d: event %q at %v", n, kind, at)
		}
		c.Events = append(c.Events, Event{at, data})
	}
	return c, lines.Err()
}

// Times of a recording that are not those of the programs.
const (
	maxIdle   = time.Second            // without output; longer times are shortened
	readPause = 2 * time.Second        // before a step, to read what the last one showed
	keyPause  = 300 * time.Millisecond // after typing
	keyTime   = 50 * time.Millisecond
	together  = 100 * time.Millisecond // output of this time is one event
)

// Recorder records the output of a program, which is written to it, in steps. The time of
// a step is shortened to its limit. It can be used from any goroutine; the caller closes it.
type Recorder struct {
	mu     sync.Mutex
	now    func() time.Time
	last   time.Time
	cast   Cast
	steps  []step
	screen *Screen
	held   []byte // the beginning of a character
}

// step has the output of one step, with the time since the previous one.
type step struct {
	limit  time.Duration
	typed  bool // it takes limit, not at most limit
	events []Event
}

// NewRecorder returns a recorder with one step that has the limit maxIdle.
func NewRecorder(width, height int, title string, now func() time.Time) *Recorder {
	r := &Recorder{now: now, last: now(), cast: Cast{Width: width, Height: height, Title: title}, screen: NewScreen(width, height)}
	r.Step(maxIdle)
	return r
}

// Step begins a step, which takes at most limit in the recording.
func (r *Recorder) Step(limit time.Duration) { r.begin(step{limit: limit}) }

// Typing begins a step in which a line is typed, at the speed of a person.
func (r *Recorder) Typing(line string) {
	r.begin(step{limit: time.Duration(len(line)) * keyTime, typed: true})
}

func (r *Recorder) begin(s step) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.steps = append(r.steps, s)
}

// Write records output.
func (r *Recorder) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	idle := min(now.Sub(r.last), maxIdle)
	r.last = now
	data := append(r.held, p...)
	end := len(data)
	for n := 1; n <= min(len(data), utf8.UTFMax); n++ {
		if tail := data[len(data)-n:]; utf8.RuneStart(tail[0]) {
			if !utf8.FullRune(tail) {
				end -= n
			}
			break
		}
	}
	r.held = slices.Clone(data[end:])
	text := strings.ToValidUTF8(string(data[:end]), "\uFFFD")
	at := &r.steps[len(r.steps)-1]
	at.events = append(at.events, Event{idle, text})
	r.screen.Write(text)
	return len(p), nil
}

// Text returns what the terminal shows now.
func (r *Recorder) Text() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.screen.Text()
}

// Close ends the terminal of the recorder.
func (r *Recorder) Close() { r.screen.Close() }

// Cast returns the recording.
func (r *Recorder) Cast() *Cast {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.cast
	var begin time.Duration
	for i, s := range r.steps {
		var took, at time.Duration
		for _, e := range s.events {
			took += e.At
		}
		switch {
		case i > 0 && r.steps[i-1].typed:
			begin += keyPause
		case i > 0:
			begin += readPause
		}
		scale := 1.0
		if took > s.limit || s.typed && took > 0 {
			scale = float64(s.limit) / float64(took)
		}
		for j, e := range s.events {
			at += e.At
			when := begin + time.Duration(float64(at)*scale)
			if last := len(c.Events) - 1; j > 0 && when-c.Events[last].At < together {
				c.Events[last].Data += e.Data
				continue
			}
			c.Events = append(c.Events, Event{when.Round(10 * time.Millisecond), e.Data})
		}
		begin += time.Duration(float64(took) * scale)
	}
	return &c
}
