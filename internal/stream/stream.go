// Package stream is the framing of an interactive process on one connection:
// standard input, output and error, terminal size, signals and the exit code.
// It is used from the client through the daemon to the guest, after an HTTP
// Upgrade to guestapi.StreamProtocol; the daemon passes the bytes on unread.
//
// A frame is a type byte, a big-endian uint32 length of at most MaxPayload,
// and the payload. The peer is never trusted: an unknown type or a larger
// length is an error that ends the connection.
package stream

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
)

// Type is the kind of a frame.
type Type byte

// The frame types. To the process: Stdin, StdinEOF, Resize, Signal. From the
// process: Stdout, Stderr, Exit. Ping is sent in both directions and is
// ignored.
const (
	Stdin    Type = 1
	StdinEOF Type = 2 // empty payload
	Resize   Type = 3 // JSON WindowSize
	Signal   Type = 4 // signal name without "SIG", e.g. "INT"
	Stdout   Type = 5
	Stderr   Type = 6
	Exit     Type = 7 // JSON ExitStatus; the last frame
	Ping     Type = 8 // empty payload
)

// MaxPayload is the largest payload of one frame, in bytes.
const MaxPayload = 64 << 10

// ErrFrame is returned for an invalid frame.
var ErrFrame = errors.New("stream: malformed frame")

// WindowSize is the size of a terminal in character cells.
type WindowSize struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// ExitStatus describes how the process ended.
type ExitStatus struct {
	Code   int    `json:"code"`             // exit code, 128+n if killed by signal n
	Signal string `json:"signal,omitempty"` // name without "SIG", if killed by a signal
	Error  string `json:"error,omitempty"`  // why it could not be started
}

// Writer writes frames. It is safe for use by many goroutines.
type Writer struct {
	mu sync.Mutex
	w  io.Writer
}

// NewWriter returns a Writer on w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// Frame writes p as frames of type t; a payload longer than MaxPayload is
// split, which is only meaningful for the data types.
func (w *Writer) Frame(t Type, p []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for first := true; first || len(p) > 0; first = false {
		n := min(len(p), MaxPayload)
		buf := make([]byte, 5+n)
		buf[0] = byte(t)
		binary.BigEndian.PutUint32(buf[1:], uint32(n))
		copy(buf[5:], p[:n])
		if _, err := w.w.Write(buf); err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// JSON writes v as the payload of one frame.
func (w *Writer) JSON(t Type, v any) error {
	p, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return w.Frame(t, p)
}

// Data returns an io.Writer whose writes become frames of type t.
func (w *Writer) Data(t Type) io.Writer { return dataWriter{w, t} }

type dataWriter struct {
	w *Writer
	t Type
}

func (d dataWriter) Write(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if err := d.w.Frame(d.t, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Reader reads frames. It is not safe for concurrent use.
type Reader struct {
	r   io.Reader
	buf [MaxPayload]byte
}

// NewReader returns a Reader on r.
func NewReader(r io.Reader) *Reader { return &Reader{r: r} }

// Next returns the next frame; the payload is valid until the following call.
// It returns io.EOF at an end between frames.
func (r *Reader) Next() (Type, []byte, error) {
	var head [5]byte
	if _, err := io.ReadFull(r.r, head[:]); err != nil {
		return 0, nil, err
	}
	t, n := Type(head[0]), binary.BigEndian.Uint32(head[1:])
	if t < Stdin || t > Ping || n > MaxPayload {
		return 0, nil, fmt.Errorf("%w: type %d, length %d", ErrFrame, t, n)
	}
	p := r.buf[:n]
	if _, err := io.ReadFull(r.r, p); err != nil {
		if errors.Is(err, io.EOF) { // this end is not between frames
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, fmt.Errorf("stream: truncated: %w", err)
	}
	return t, p, nil
}
