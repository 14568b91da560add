// Package redact removes literal secret values from text and byte streams.
//
// It knows values, not patterns: what it was not told is not found, and what
// it was told is found in every encoding in which values usually reach a log
// (see variants), also when the value is split over writes at any point, has
// many lines, or overlaps another.
//
// It does not find a value that was compressed, encrypted, reversed, encoded
// twice or printed in parts by somebody who wants to hide it. It keeps honest
// programs from leaking; it is no barrier against a hostile one.
package redact

import (
	"io"
	"strings"
)

// Replacement stands in the output for every run of secret bytes. Values that
// touch or overlap become one Replacement.
const Replacement = "[redacted]"

// MinLength is the length in bytes, without surrounding white space, below
// which a value is not redacted: shorter ones ("true", "8080", "debug") are
// common words that would eat ordinary text, and no secrets worth the name.
const MinLength = 6

// MaxPattern is the longest run of bytes that is looked for in one piece, and
// so the most that a stream holds back. Longer values are found piecewise.
const MaxPattern = 1024

// Redactor knows a set of secret values. It does not change after New and is
// safe for concurrent use. The zero value and nil redact nothing.
type Redactor struct {
	m *matcher
}

// New returns a Redactor of the values. Values shorter than MinLength are
// left out; the lines of a value with many lines are also values of their own.
func New(values ...string) *Redactor {
	seen := map[string]bool{}
	m := newMatcher()
	for _, v := range values {
		for _, p := range variants(v) {
			if len(p) < MinLength {
				continue
			}
			for _, piece := range pieces(p) {
				if !seen[piece] {
					seen[piece] = true
					m.add(piece)
				}
			}
		}
	}
	if len(seen) == 0 {
		return &Redactor{}
	}
	m.link()
	return &Redactor{m: m}
}

// pieces cuts a pattern so that every piece has at most MaxPattern bytes and
// the pieces together cover the pattern.
func pieces(p string) []string {
	if len(p) <= MaxPattern {
		return []string{p}
	}
	var out []string
	for i := 0; i+MaxPattern < len(p); i += MaxPattern {
		out = append(out, p[i:i+MaxPattern])
	}
	return append(out, p[len(p)-MaxPattern:])
}

// Empty reports whether the Redactor knows no value.
func (r *Redactor) Empty() bool { return r == nil || r.m == nil }

// String returns s without the secret values.
func (r *Redactor) String(s string) string {
	if r.Empty() || s == "" {
		return s
	}
	var b strings.Builder
	w := r.Writer(&b)
	_, _ = io.WriteString(w, s) // a Builder never fails
	_ = w.Flush()
	return b.String()
}

// Bytes returns p without the secret values; p is not changed.
func (r *Redactor) Bytes(p []byte) []byte {
	if r.Empty() {
		return p
	}
	return []byte(r.String(string(p)))
}

// Mask overwrites every secret byte of p with '*', which keeps the length,
// and returns how many bytes at the start of p are settled: what follows them
// may be the beginning of a secret and has to be seen again together with
// what comes next. The bytes of p after settled are not meaningful.
func (r *Redactor) Mask(p []byte) (settled int) {
	if r.Empty() {
		return len(p)
	}
	m, state := r.m, int32(0)
	for i, b := range p {
		state = m.step(state, b)
		for j := i + 1 - int(m.nodes[state].match); j <= i; j++ {
			p[j] = '*'
		}
	}
	settled = len(p) - int(m.nodes[state].hold)
	if settled == len(p) {
		return settled
	}
	// A cut inside a masked run would let the second half of its secret pass
	// unseen the next time.
	for settled > 0 && p[settled-1] == '*' {
		settled--
	}
	return settled
}

// Writer redacts what is written to it and passes it on to w.
func (r *Redactor) Writer(w io.Writer) *Writer {
	out := &Writer{w: w}
	if r != nil {
		out.m = r.m
	}
	return out
}

// Writer is a redacting io.Writer. It holds back only bytes that may be the
// beginning of a secret, at most MaxPattern-1. It is not safe for concurrent
// use.
type Writer struct {
	m     *matcher
	w     io.Writer
	state int32
	held  []byte // undecided bytes
	hit   []bool // which of held are secret
	inRun bool   // the last byte passed on was secret
	out   []byte
}

// Write implements io.Writer. An error of the underlying writer is returned
// with a count of 0; what was written by then cannot be told.
func (w *Writer) Write(p []byte) (int, error) {
	if w.m == nil {
		return w.w.Write(p)
	}
	w.out = w.out[:0]
	for i := 0; i < len(p); i++ {
		if w.state == 0 && len(w.held) == 0 {
			n := w.m.skip(p[i:])
			if n > 0 {
				w.out = append(w.out, p[i:i+n]...)
				w.inRun = false
				i += n
			}
			if i == len(p) {
				break
			}
		}
		w.state = w.m.step(w.state, p[i])
		node := &w.m.nodes[w.state]
		w.held = append(w.held, p[i])
		w.hit = append(w.hit, false)
		for j := len(w.hit) - int(node.match); j < len(w.hit); j++ {
			w.hit[j] = true
		}
		w.settle(len(w.held) - int(node.hold))
	}
	return len(p), w.pass()
}

// Flush passes on what is held back; the stream ends here, and a secret that
// has only begun is not redacted.
func (w *Writer) Flush() error {
	w.out = w.out[:0]
	w.settle(len(w.held))
	w.state = 0
	return w.pass()
}

func (w *Writer) pass() error {
	if len(w.out) == 0 {
		return nil
	}
	_, err := w.w.Write(w.out)
	return err
}

// settle moves the first n held bytes to out.
func (w *Writer) settle(n int) {
	if n <= 0 {
		return
	}
	for i := range n {
		switch {
		case !w.hit[i]:
			w.out = append(w.out, w.held[i])
		case !w.inRun:
			w.out = append(w.out, Replacement...)
		}
		w.inRun = w.hit[i]
	}
	w.held = w.held[:copy(w.held, w.held[n:])]
	w.hit = w.hit[:copy(w.hit, w.hit[n:])]
}

// Reader returns a reader of src without the secret values.
func (r *Redactor) Reader(src io.Reader) io.Reader {
	if r.Empty() {
		return src
	}
	out := &reader{src: src, buf: make([]byte, 32<<10)}
	out.w = r.Writer(&out.ready)
	return out
}

type reader struct {
	src   io.Reader
	w     *Writer
	ready readyBuffer
	buf   []byte
	err   error
}

type readyBuffer struct{ p []byte }

func (b *readyBuffer) Write(p []byte) (int, error) {
	b.p = append(b.p, p...)
	return len(p), nil
}

func (r *reader) Read(p []byte) (int, error) {
	for len(r.ready.p) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		if len(p) == 0 {
			return 0, nil
		}
		r.ready.p = nil
		var n int
		n, r.err = r.src.Read(r.buf)
		_, _ = r.w.Write(r.buf[:n]) // a readyBuffer never fails
		if r.err != nil {
			_ = r.w.Flush()
		}
	}
	n := copy(p, r.ready.p)
	r.ready.p = r.ready.p[n:]
	return n, nil
}
