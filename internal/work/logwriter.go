package work

import (
	"bytes"
	"io"
	"unicode/utf8"

	"github.com/agentlab-vm/agentlab"
)

// sanitizeWriter writes a guest's log to a terminal without escape sequences. It
// passes tab, newline and carriage return, and replaces other control
// characters and invalid UTF-8 by dots. Colors are lost.
type sanitizeWriter struct {
	w    io.Writer
	rest []byte // an incomplete rune at the end of the last write
}

// Write implements io.Writer.
func (p *sanitizeWriter) Write(b []byte) (int, error) {
	in := append(p.rest, b...)
	clean := make([]byte, 0, len(in))
	for len(in) > 0 && utf8.FullRune(in) {
		r, size := utf8.DecodeRune(in)
		switch {
		case r == utf8.RuneError && size == 1, agentlab.ControlsTerminal(r) && r != '\t' && r != '\n' && r != '\r':
			clean = append(clean, '.')
		default:
			clean = append(clean, in[:size]...)
		}
		in = in[size:]
	}
	p.rest = bytes.Clone(in)
	if _, err := p.w.Write(clean); err != nil {
		return 0, err
	}
	return len(b), nil
}

// Sanitizer returns a writer of the log of a guest to w without escape sequences.
func Sanitizer(w io.Writer) io.Writer { return &sanitizeWriter{w: w} }

// LogWriter returns w for a log of a guest, without control characters if it is a terminal.
func LogWriter(w io.Writer) io.Writer {
	if _, tty := TerminalOf(w); tty {
		return Sanitizer(w)
	}
	return w
}
