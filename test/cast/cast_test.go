package cast

import (
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "draw the recordings of the documentation again")

// The recording of the documentation, and its drawing.
const (
	workflow    = "../../docs/workflow.cast"
	workflowSVG = "../../docs/workflow.svg"
	maxSVG      = 300 << 10 // bytes
)

// private matches what a recording of the documentation must not have: secrets, paths and
// addresses of the machine that it was made on.
var private = regexp.MustCompile(`sk-[a-z]|/tmp/|/root\b|/work/(main|shared)|/var/|agentlab-e2e|AGENTLAB_|/home/[^a]|\b\d+\.\d+\.\d+\.\d+\b`)

// The recording in the documentation is that of the workflow, from its first command to
// its last, and its drawing is made from it.
func TestWorkflowRecording(t *testing.T) {
	t.Parallel()
	f, err := os.Open(workflow)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	c, err := Parse(f)
	if err != nil {
		t.Fatal(err)
	}
	s := NewScreen(c.Width, c.Height)
	defer s.Close()
	wants := []string{
		"$ agentlab claude", "bypass permissions on", "Fix the greeting so that its test passes", "I mended the greeting and committed it",
		"session app keeps running", "$ agentlab sync", "$ git log --oneline", "Fix the greeting", "$ agentlab stop", "is STOPPED",
	}
	var before time.Duration
	for _, e := range c.Events {
		if e.At-before > 3*time.Second {
			t.Errorf("nothing happens from %v to %v", before, e.At)
		}
		before = e.At
		s.Write(e.Data)
		text := s.Text()
		for len(wants) > 0 && strings.Contains(text, wants[0]) {
			wants = wants[1:]
		}
		if got := private.FindString(e.Data + "\n" + text); got != "" {
			t.Fatalf("at %v the recording has %q:\n%s", e.At, got, text)
		}
	}
	if len(wants) > 0 || before > time.Minute {
		t.Errorf("the recording ends after %v without %q:\n%s", before, wants, s.Text())
	}
	svg := c.SVG()
	if *update {
		if err := os.WriteFile(workflowSVG, []byte(svg), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(workflowSVG); err != nil || string(got) != svg {
		t.Errorf("docs/workflow.svg is not drawn from docs/workflow.cast (%v): go test ./test/cast -run TestWorkflowRecording -update", err)
	}
	if len(svg) > maxSVG {
		t.Errorf("the drawing has %d bytes, more than %d", len(svg), maxSVG)
	}
	wellFormed(t, svg)
}

// wellFormed checks that a drawing is XML without scripts and foreign content.
func wellFormed(t *testing.T, svg string) {
	t.Helper()
	for dec := xml.NewDecoder(strings.NewReader(svg)); ; {
		token, err := dec.Token()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		e, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		if e.Name.Local == "script" || e.Name.Local == "image" || e.Name.Local == "foreignObject" {
			t.Errorf("the drawing has the element %s", e.Name.Local)
		}
		for _, a := range e.Attr {
			if a.Name.Local == "href" && !strings.HasPrefix(a.Value, "#") {
				t.Errorf("the drawing refers to %s", a.Value)
			}
		}
	}
}

func TestRecorder(t *testing.T) {
	t.Parallel()
	now := time.Unix(0, 0)
	r := NewRecorder(20, 3, "A & B", func() time.Time { return now })
	defer r.Close()
	write := func(after time.Duration, text string) {
		now = now.Add(after)
		if n, err := r.Write([]byte(text)); n != len(text) || err != nil {
			t.Fatal(n, err)
		}
	}
	write(0, "a\xe2")
	write(time.Hour, "\x94\x80<\xff")
	r.Step(2 * time.Second)
	for range 8 { // each is shortened to a second, and all to two
		write(time.Minute, "\x1b[31m.\x1b[m")
	}
	write(10*time.Millisecond, "\r\nend")
	if got := r.Text(); got != "a─<\uFFFD........\nend" {
		t.Errorf("the screen shows %q", got)
	}
	c := r.Cast()
	var file strings.Builder
	if _, err := c.WriteTo(&file); err != nil {
		t.Fatal(err)
	}
	got, err := Parse(strings.NewReader(file.String()))
	if err != nil {
		t.Fatal(err)
	}
	var text string
	for _, e := range got.Events {
		text += e.Data
	}
	if want := "a─<\uFFFD" + strings.Repeat("\x1b[31m.\x1b[m", 8) + "\r\nend"; text != want {
		t.Errorf("got %q", text)
	}
	last := got.Events[len(got.Events)-1].At
	if n := len(got.Events); n != 10 || last != 5*time.Second || got.Events[2].At != 3250*time.Millisecond {
		t.Errorf("%d events, the third at %v, the last at %v", n, got.Events[2].At, last)
	}
	svg := got.SVG()
	if svg != c.SVG() {
		t.Error("the drawings of a recording and of its file differ")
	}
	if !strings.Contains(svg, "A &amp; B") || !strings.Contains(svg, palette[1]) || !strings.Contains(svg, "a─&lt;") {
		t.Errorf("the drawing:\n%s", svg)
	}
	wellFormed(t, svg)
}

func TestParseRejects(t *testing.T) {
	t.Parallel()
	const head = `{"version": 2, "width": 80, "height": 24}` + "\n"
	if _, err := Parse(strings.NewReader(head + `[0.5, "o", "x"]`)); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{
		"", "x", `{"version": 3, "width": 80, "height": 24}`, `{"version": 2}`, `{"version": 2, "width": 8000, "height": 24}`,
		head + "x", head + `[1, "o"]`, head + `[1, "i", "x"]`, head + `["1", "o", "x"]`, head + `[2, "o", "x"]` + "\n" + `[1, "o", "x"]`,
	} {
		if c, err := Parse(strings.NewReader(bad)); err == nil {
			t.Errorf("%q is accepted: %+v", bad, c)
		}
	}
}
