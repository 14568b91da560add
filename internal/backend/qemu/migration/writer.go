package migration

import "io"

// writer writes pages, and joins those that follow each other. It does not map
// the file: when the disk is full, a write to a mapped file ends the process.
type writer struct {
	file  io.WriterAt
	start uint64 // offset of buf in the file
	buf   []byte
	err   error
}

const writerMax = 256 << 10

// next returns the buffer for the page at an offset, to be filled before the
// next call.
func (w *writer) next(offset uint64) []byte {
	if len(w.buf) >= writerMax || offset != w.start+uint64(len(w.buf)) {
		w.flush()
		w.start = offset
	}
	if w.buf == nil {
		w.buf = make([]byte, 0, writerMax+PageSize)
	}
	n := len(w.buf)
	w.buf = w.buf[:n+PageSize]
	return w.buf[n:]
}

func (w *writer) flush() {
	if len(w.buf) > 0 && w.err == nil {
		_, w.err = w.file.WriteAt(w.buf, int64(w.start))
	}
	w.buf = w.buf[:0]
}
