// Package redact removes literal secret values from text and byte streams.
//
// It knows values, not patterns: what it was not told is not found, and what
// it was told is found in every encoding in which values usually reach a log
// (see variants), also when the value is split over writes at any point, has
// many lines, overlaps another, or is broken by white space where a program
// wrapped it (see loosely).
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

// MaxPattern is the longest run of bytes that is looked for in one piece.
// Longer values are found piecewise.
const MaxPattern = 1024

// minPart is the length in bytes from which the beginning of a secret, at the
// very end of a stream, is redacted too: a program that was killed may have
// written no more of it.
const minPart = 12

// Redactor knows a set of secret values. It does not change after New and is
// safe for concurrent use. The zero value and nil redact nothing.
type Redactor struct {
	exact *matcher // nil when there is nothing to find
	loose *matcher // patterns that gaps may break
	start [256]bool
}

// New returns a Redactor of the values. Values shorter than MinLength are
// left out; the lines of a value with many lines are also values of their own.
func New(values ...string) *Redactor {
	r := &Redactor{exact: newMatcher(), loose: newMatcher()}
	for _, v := range values {
		for _, p := range variants(v) {
			if len(p) >= MinLength {
				r.exact.addAll(pieces(p, MaxPattern, 0))
			}
		}
		for _, p := range loosely(v) {
			r.loose.addAll(pieces(p, loosePiece, looseLead))
		}
	}
	if len(r.exact.nodes) == 1 {
		return &Redactor{}
	}
	r.exact.link()
	r.loose.link()
	for b := range r.start {
		r.start[b] = r.exact.root[b] != 0 || r.loose.root[b] != 0
	}
	return r
}

// pieces cuts a pattern so that every piece has at most size bytes, the pieces
// together cover the pattern, and each begins overlap bytes before the end of
// the one before.
func pieces(p string, size, overlap int) []string {
	if len(p) <= size {
		return []string{p}
	}
	var out []string
	for i := 0; i+size < len(p); i += size - overlap {
		out = append(out, p[i:i+size])
	}
	return append(out, p[len(p)-size:])
}

// Empty reports whether the Redactor knows no value.
func (r *Redactor) Empty() bool { return r == nil || r.exact == nil }

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

// Context is how many bytes before a chunk Mask wants to see.
const Context = looseLead * (1 + maxGap)

// Mask overwrites every secret byte of p with '*', which keeps the length,
// and returns how many bytes at the start of p are settled: what follows them
// may be the beginning of a secret and has to be seen again together with
// what comes next. The bytes of p after settled are not meaningful. before is
// the end of what was settled already, as it was left: Context bytes of it, or
// all when there are fewer.
func (r *Redactor) Mask(before, p []byte) (settled int) {
	if r.Empty() {
		return len(p)
	}
	c := r.mask(before, p)
	settled = max(len(p)-c.hold(), 0)
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

// MaskEnd is Mask for the end of a stream: all of p is settled, and a secret
// that has only begun at its end is masked too.
func (r *Redactor) MaskEnd(before, p []byte) {
	if r.Empty() {
		return
	}
	c := r.mask(before, p)
	stars(p[len(p)-c.part(p):])
}

func (r *Redactor) mask(before, p []byte) *cursor {
	c := &cursor{r: r}
	for _, b := range before {
		c.next(b)
	}
	for i, b := range p {
		if n := c.next(b); n > 0 {
			stars(p[max(i+1-n, 0) : i+1])
		}
	}
	return c
}

func stars(p []byte) {
	for i := range p {
		p[i] = '*'
	}
}

// Writer redacts what is written to it and passes it on to w.
func (r *Redactor) Writer(w io.Writer) *Writer {
	out := &Writer{w: w}
	if !r.Empty() {
		out.c.r = r
	}
	return out
}

// Writer is a redacting io.Writer. It holds back only bytes that may be the
// beginning of a secret: at most one piece, or one with the longest gaps that
// are looked for in it. It is not safe for concurrent use.
type Writer struct {
	w     io.Writer
	c     cursor // c.r is nil when there is nothing to find
	held  []byte // undecided bytes
	hit   []bool // which of held are secret
	inRun bool   // the last byte passed on was secret
	out   []byte
}

// Write implements io.Writer. An error of the underlying writer is returned
// with a count of 0; what was written by then cannot be told.
func (w *Writer) Write(p []byte) (int, error) {
	if w.c.r == nil {
		return w.w.Write(p)
	}
	w.out = w.out[:0]
	for i := 0; i < len(p); i++ {
		if len(w.held) == 0 && w.c.idle() {
			n := w.c.r.skip(p[i:])
			if n > 0 {
				w.out = append(w.out, p[i:i+n]...)
				w.inRun = false
				i += n
			}
			if i == len(p) {
				break
			}
		}
		n := w.c.next(p[i])
		w.held = append(w.held, p[i])
		w.hit = append(w.hit, false)
		w.mark(n)
		w.settle(len(w.held) - w.c.hold())
	}
	return len(p), w.pass()
}

// mark makes the last n held bytes secret.
func (w *Writer) mark(n int) {
	for j := max(len(w.hit)-n, 0); j < len(w.hit); j++ {
		w.hit[j] = true
	}
}

// Flush passes on what is held back; the stream ends here. Of a secret that
// has only begun, minPart bytes or more are redacted.
func (w *Writer) Flush() error {
	w.out = w.out[:0]
	if w.c.r != nil {
		w.mark(w.c.part(w.held))
		w.c = cursor{r: w.c.r}
	}
	w.settle(len(w.held))
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
