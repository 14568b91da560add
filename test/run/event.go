package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab/test/sample"
)

// event is a line of 'go test -json'; its form is documented by 'go doc test2json'.
type event struct {
	Action      string
	Package     string
	ImportPath  string // of build-output
	Test        string
	Output      string
	Elapsed     float64 // seconds
	FailedBuild string
}

// name is a top-level test of a package, or the package itself if Test is "".
type name struct{ Package, Test string }

func (n name) String() string {
	if n.Test == "" {
		return n.Package
	}
	return n.Package + "." + n.Test
}

// outcome is the result of one execution of a test or of a package.
type outcome struct {
	name
	Action  string // pass, fail or skip
	Took    time.Duration
	Output  []byte
	Long    bool // -short left out a part of it
	Cached  bool // of a package: go test has not run it again
	NoTests bool // of a package
	Whole   bool // of a package: it failed, and its failed tests do not explain that
	Build   bool // of a package: it cannot be built
	Final   bool // a failure that does not run again
}

// stream turns the events of 'go test -json' into outcomes.
type stream struct {
	outputs map[name]*bytes.Buffer
	began   map[name]bool // tests without an end
	builds  map[string]*bytes.Buffer
	tests   map[string]int // of a package, those that ran
	failed  map[string]int
	broken  map[string]bool // its process did not come to its end: events of tests are missing
	done    func(outcome)
}

func newStream(done func(outcome)) *stream {
	return &stream{
		outputs: map[name]*bytes.Buffer{}, began: map[name]bool{}, builds: map[string]*bytes.Buffer{},
		tests: map[string]int{}, failed: map[string]int{}, broken: map[string]bool{}, done: done,
	}
}

// read reads events until the end of r. Lines that are no events are output of the package.
func (s *stream) read(r io.Reader, pkg string) error {
	br := bufio.NewReader(r)
	for {
		line, err := br.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil || e.Action == "" {
				e = event{Action: "output", Package: pkg, Output: string(line)}
			}
			s.take(e)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (s *stream) take(e event) {
	top, _, sub := strings.Cut(e.Test, "/")
	n := name{e.Package, top}
	switch e.Action {
	case "run":
		if !sub {
			s.began[n] = true
		}
	case "output":
		s.output(n).WriteString(e.Output)
		if crashed(e.Output) {
			s.broken[e.Package] = true
		}
	case "build-output":
		if s.builds[e.ImportPath] == nil {
			s.builds[e.ImportPath] = &bytes.Buffer{}
		}
		s.builds[e.ImportPath].WriteString(e.Output)
	case "pass", "fail", "skip":
		if !sub {
			s.end(n, e)
		}
	}
}

func (s *stream) output(n name) *bytes.Buffer {
	if s.outputs[n] == nil {
		s.outputs[n] = &bytes.Buffer{}
	}
	return s.outputs[n]
}

func (s *stream) end(n name, e event) {
	out := s.output(n).Bytes()
	delete(s.outputs, n)
	delete(s.began, n)
	o := outcome{name: n, Action: e.Action, Took: time.Duration(e.Elapsed * float64(time.Second)), Output: out}
	switch {
	case n.Test != "":
		o.Long = bytes.Contains(out, []byte(sample.LongTest))
		s.tests[n.Package]++
		if e.Action == "fail" {
			s.failed[n.Package]++
		}
	case e.FailedBuild != "":
		o.Build = true
		if b := s.builds[e.FailedBuild]; b != nil {
			o.Output = append(b.Bytes(), out...)
		}
	default:
		o.Cached = bytes.Contains(out, []byte("(cached)"))
		o.NoTests = s.tests[n.Package] == 0
		o.Whole = e.Action == "fail" && (s.broken[n.Package] || s.failed[n.Package] == 0)
	}
	s.done(o)
}

// crashed reports whether a line is the first one of a process that ends before its tests
// do. Messages of tests are indented.
func crashed(line string) bool {
	for _, sign := range []string{"panic: ", "fatal error: ", "SIGQUIT: ", "signal: "} {
		if strings.HasPrefix(line, sign) {
			return true
		}
	}
	return false
}
