// Package redact removes literal secret values from text and byte streams.
//
// It matches the given values, not patterns of secrets. It finds a value in
// every encoding in which values usually appear in a log (see variants), also
// if it is split over writes at any point, has several lines, overlaps another
// value, or is wrapped by white space (see gapPatterns).
//
// It does not find a value that is compressed, encrypted, reversed, encoded
// twice or printed in parts on purpose. It prevents accidental leaks; it does
// not protect against a hostile program.
package redact

import (
	"bytes"
	"io"
	"strings"
)

// Replacement replaces every run of secret bytes in the output. Adjacent or
// overlapping values become one Replacement.
const Replacement = "[redacted]"

// MinLength is the length in bytes, without surrounding white space, below
// which a value is not redacted: shorter ones ("true", "8080", "debug") are
// common words rather than secrets, and would remove ordinary text.
const MinLength = 6

// MaxPattern is the maximum length of a pattern in bytes. Longer values are
// matched in pieces.
const MaxPattern = 1024

// minPart is the length in bytes from which the beginning of a secret, at the
// very end of a stream, is redacted too: a killed program may have written
// only a part of the secret.
const minPart = 12

// Redactor removes a set of secret values. It is immutable and safe for
// concurrent use. The zero value and nil redact nothing.
type Redactor struct {
	exact *matcher // nil if there is nothing to find
	loose *matcher // patterns with possible gaps
	start [256]bool
}

// New returns a Redactor of the values. Values shorter than MinLength are
// ignored; each line of a multi-line value is also a value.
func New(values ...string) *Redactor {
	r := &Redactor{exact: newMatcher(), loose: newMatcher()}
	for _, v := range values {
		for _, p := range variants(v) {
			if len(p) >= MinLength {
				r.exact.addAll(pieces(p, MaxPattern, 0))
			}
		}
		for _, p := range gapPatterns(v) {
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

// pieces splits a pattern into pieces of at most size bytes that cover the
// pattern; each begins overlap bytes before the end of the previous one.
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

// Empty reports whether the Redactor has no values.
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

// Context is how many bytes before a chunk Mask needs.
const Context = looseLead * (1 + maxGap)

// maxRun is the length in bytes of a run of masked bytes from which Mask settles a part
// of it.
const maxRun = 64 << 10

// Mask overwrites every secret byte of p with '*', which keeps the length, and
// returns how many bytes at the start of p are settled: the bytes after them
// may be the beginning of a secret and must be passed again together with the
// next data. The content of p after settled is undefined. before is the end of
// the data that is already settled, masked: Context bytes of it, or all if
// there are fewer.
func (r *Redactor) Mask(before, p []byte) (settled int) {
	if r.Empty() {
		return len(p)
	}
	leads := make([]int, len(p)+1) // of each position, where the first lead begins that reaches it
	for i := range leads {
		leads[i] = i
	}
	c := r.mask(before, p, func(begin, end int) {
		begin = max(begin-len(before), 0)
		for i := begin; i <= min(end-len(before), len(p)); i++ {
			leads[i] = min(leads[i], begin)
		}
	})
	// The next call finds a secret that begins in the settled part only if that has its
	// lead, unmasked, and no other byte of it.
	settled = max(len(p)-c.hold(), 0)
	for moved := true; moved; {
		was := settled
		for settled > 0 && settled < len(p) && p[settled-1] == '*' {
			settled--
		}
		if i := bytes.IndexByte(p[leads[settled]:settled], '*'); i >= 0 {
			settled = leads[settled] + i
		}
		moved = settled < was
	}
	if settled == 0 && len(p) >= maxRun {
		settled = len(p) - c.hold()
		for settled > 0 && settled < len(p) && p[settled-1] == '*' && p[settled] == '*' { // it may be inside of a secret
			settled++
		}
	}
	return settled
}

// MaskEnd masks the last bytes of a stream: unlike Mask it holds none of p
// back, and it also masks an incomplete secret at the end of p.
func (r *Redactor) MaskEnd(before, p []byte) {
	if r.Empty() {
		return
	}
	c := r.mask(before, p, func(int, int) {})
	mask(p[len(p)-c.part(p):])
}

// mask calls lead with the positions in the stream at which the leads of loose matches
// begin and end, also of one that may begin at the end of p.
func (r *Redactor) mask(before, p []byte, lead func(begin, end int)) *cursor {
	c := &cursor{r: r}
	for _, b := range before {
		c.next(b)
	}
	for i, b := range p {
		if n := c.next(b); n > 0 {
			mask(p[max(i+1-n, 0) : i+1])
		}
		if !isGap(b) {
			c.lead(r.loose.nodes[c.loose].match, lead)
		}
	}
	c.lead(r.loose.nodes[c.loose].hold, lead)
	return c
}

func mask(p []byte) {
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
// beginning of a secret: at most one piece, including the longest allowed
// gaps. It is not safe for concurrent use.
type Writer struct {
	w     io.Writer
	c     cursor // c.r is nil if there is nothing to find
	held  []byte // undecided bytes
	hit   []bool // which of held are secret
	inRun bool   // the last byte passed on was secret
	out   []byte
}

// Write implements io.Writer. An error of the underlying writer is returned
// with a count of 0, because the number of written bytes is not known.
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

// mark marks the last n held bytes as secret.
func (w *Writer) mark(n int) {
	for j := max(len(w.hit)-n, 0); j < len(w.hit); j++ {
		w.hit[j] = true
	}
}

// Flush writes the held bytes at the end of the stream. An incomplete secret
// of minPart bytes or more is redacted.
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
