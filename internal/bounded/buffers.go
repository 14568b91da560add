package bounded

import (
	"io"
	"sync"
)

// Tail stores the last Max bytes written to it. It is safe for concurrent use.
type Tail struct {
	Max int

	mu  sync.Mutex
	buf []byte
}

// Write implements io.Writer; it never fails.
func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p[max(0, len(p)-t.Max):]...)
	if len(t.buf) > 2*t.Max { // rarely, to keep short writes cheap
		t.buf = append(t.buf[:0], t.buf[len(t.buf)-t.Max:]...)
	}
	return len(p), nil
}

// String returns the bytes.
func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.buf[max(0, len(t.buf)-t.Max):])
}

// Head stores the first Max bytes written to it. More bytes set Over. They are
// dropped, unless Fail is set: then Write returns it, which ends a program whose
// output goes there.
type Head struct {
	Max  int
	Fail error
	Over bool

	buf []byte
}

// Write implements io.Writer.
func (h *Head) Write(p []byte) (int, error) {
	n := min(len(p), h.Max-len(h.buf))
	h.buf = append(h.buf, p[:n]...)
	if n < len(p) {
		h.Over = true
		if h.Fail != nil {
			return n, h.Fail
		}
	}
	return len(p), nil
}

// String returns the bytes.
func (h *Head) String() string { return string(h.buf) }

// Writer writes to W at most Left bytes. A write of more returns Fail, and nothing of it
// is written.
type Writer struct {
	W    io.Writer
	Left int64
	Fail error
}

// Write implements io.Writer.
func (w *Writer) Write(p []byte) (int, error) {
	if int64(len(p)) > w.Left {
		return 0, w.Fail
	}
	n, err := w.W.Write(p)
	w.Left -= int64(n)
	return n, err
}
