// Package termfilter removes from the output of a guest what makes the terminal of a
// user act for the guest.
//
// A terminal answers some sequences by typing the answer, as if the user had typed
// it. The answer can contain text that the guest chose, or that is secret, and it can
// arrive when the guest's program has ended and a shell of the host reads. Other
// sequences write to files, start programs or change the clipboard. Full-screen
// programs need none of these.
//
// The filter is a list of what passes: a sequence that is not on the list is dropped,
// also if it is unknown. What passes is written in one piece and in its regular form,
// so that a terminal with a slightly different parser reads the same sequence as the
// filter.
//
// Sources of the rules:
//
//   - ECMA-48, 5th edition: control functions and their syntax (section 5.4 for CSI,
//     5.6 for strings).
//   - XTerm Control Sequences (ctlseqs), by Edward Moy, Stephen Gildea and Thomas
//     Dickey: what terminals implement and answer.
//   - A parser for DEC's ANSI-compatible video terminals, by Paul Williams: how a
//     VT500 reads malformed sequences.
//   - Terminal Emulator Security Issues, by H D Moore, 2003 (CVE-2003-0063 and
//     others), and the vulnerabilities since then, which the rules name.
//
// The terminal must read UTF-8: in a terminal that reads an 8-bit character set, text
// in UTF-8 contains controls.
package termfilter

import (
	"io"
	"strings"
	"unicode/utf8"
)

// Limits of a sequence. A longer one is dropped to its end.
const (
	maxCSI = 256       // bytes of parameters of a control sequence
	maxOSC = 128 << 10 // bytes of an operating system command
	maxDCS = 16        // bytes of a device control string; the only ones that pass have three
)

// passthrough begins a device control string with which programs in tmux send a sequence,
// whose ESC are doubled, to the terminal around it.
const passthrough = "tmux;"

// maxOut is how much output the filter collects before it writes it.
const maxOut = 64 << 10

// Options are the rules that a caller can choose.
type Options struct {
	// Clipboard lets a guest write text to the clipboard (OSC 52). It can never
	// read the clipboard.
	Clipboard bool
}

// state is the position in a sequence.
type state uint8

const (
	ground    state = iota
	inUTF8          // in a character of several bytes
	escape          // after ESC
	escapeMid       // after ESC and an intermediate byte
	csi             // in a control sequence
	str             // in a string: OSC, DCS, and those that never pass
	strEscape       // after ESC in a string
)

// Writer is an io.Writer that passes the allowed output of a guest to another writer.
// It is not safe for concurrent use. A sequence can be split over any number of
// writes; its end is written, or nothing of it.
type Writer struct {
	w    io.Writer
	opts Options

	state state
	kind  byte   // of a string: the byte after ESC
	seq   []byte // the sequence so far, without its introducer
	long  bool   // the sequence is over its limit
	char  [utf8.UTFMax]byte
	chars int // bytes in char

	changes changes // of the terminal, by what passed

	out []byte
	err error
}

// New returns a Writer that writes to w.
func New(w io.Writer, o Options) *Writer { return &Writer{w: w, opts: o} }

// Write implements io.Writer. It returns len(p) unless writing failed.
func (f *Writer) Write(p []byte) (int, error) {
	for i := 0; i < len(p) && f.err == nil; {
		if f.state == ground {
			if n := plain(p[i:]); n > 0 {
				f.pass(p[i : i+n])
				i += n
				continue
			}
		}
		f.step(p[i])
		i++
	}
	f.flush()
	if f.err != nil {
		return 0, f.err
	}
	return len(p), nil
}

// plain returns how many bytes at the beginning of p are text and harmless controls.
func plain(p []byte) int {
	i := 0
	for i < len(p) {
		if isPlain[p[i]] {
			i++
			continue
		}
		if p[i] < utf8.RuneSelf {
			break
		}
		r, size := utf8.DecodeRune(p[i:])
		if r < firstGraphic || r == utf8.RuneError && size == 1 {
			break
		}
		i += size
	}
	return i
}

// firstGraphic is the first character after the C1 controls. Terminals differ in
// whether they obey a C1 control that is encoded in UTF-8 (VTE obeys U+009B as CSI),
// so none passes.
const firstGraphic = 0xa0

// isPlain is what passes as it is: printable ASCII, and the controls that move the
// cursor (BS HT LF VT FF CR), ring the bell or select a character set (SO SI), and
// NUL, which is padding. The others are dropped:
//
//   - ENQ makes terminals type their answerback string, which can be set
//     by a sequence on some of them.
//   - CAN (ZDLE) begins a file transfer by ZMODEM, which some terminals start
//     without a question ("**", CAN, "B00").
//   - DC1 to DC4 stop the output, or control printers and tapes, on old terminals.
//   - SOH begins a packet of Kermit; FS, GS, RS and US draw in a Tektronix terminal.
var isPlain = func() (t [256]bool) {
	for c := ' '; c <= '~'; c++ {
		t[c] = true
	}
	for _, c := range "\x00\a\b\t\n\v\f\r\x0e\x0f" {
		t[c] = true
	}
	return t
}()

const (
	bel = 0x07
	can = 0x18
	sub = 0x1a
	esc = 0x1b
	del = 0x7f
)

// step reads one byte that is not plain text in the ground state.
func (f *Writer) step(c byte) {
	switch f.state {
	case ground:
		f.groundByte(c)
	case inUTF8:
		f.utf8Byte(c)
	case escape, escapeMid, csi:
		f.sequenceByte(c)
	case str:
		f.stringByte(c)
	case strEscape:
		if c == '\\' {
			f.endString("\x1b\\")
			return
		}
		if c == esc && f.isPassthrough() {
			f.collect(esc, maxOSC)
			f.state = str
			return
		}
		// Any other ESC sequence ends a string without effect (xterm, VTE). A string
		// without end can therefore not hide what follows it.
		f.begin(escape)
		f.sequenceByte(c)
	}
}

// begin starts a state with an empty sequence.
func (f *Writer) begin(s state) {
	f.state, f.long, f.seq = s, false, f.seq[:0]
	if cap(f.seq) > 4<<10 { // of a large OSC
		f.seq = nil
	}
}

func (f *Writer) groundByte(c byte) {
	switch {
	case c == esc:
		f.begin(escape)
	case isPlain[c]:
		f.passByte(c)
	case c >= utf8.RuneSelf:
		f.state, f.chars = inUTF8, 0
		f.utf8Byte(c)
	}
}

// utf8Byte collects one character. A byte that is not UTF-8 becomes U+FFFD, as a
// terminal shows it: a terminal that reads 8-bit controls could obey it (ECMA-48,
// section 5.3, C1 controls 80 to 9F).
func (f *Writer) utf8Byte(c byte) {
	f.char[f.chars] = c
	f.chars++
	char := f.char[:f.chars]
	if !utf8.FullRune(char) {
		return
	}
	r, size := utf8.DecodeRune(char)
	f.state = ground
	if r != utf8.RuneError || size > 1 {
		if r >= firstGraphic {
			f.pass(char[:size])
		}
		return
	}
	f.pass([]byte(string(utf8.RuneError)))
	rest := f.char // a copy: the bytes after the invalid one begin again
	for _, c := range rest[1:len(char)] {
		f.step(c)
	}
}

// sequenceByte reads a byte of an ESC or control sequence.
func (f *Writer) sequenceByte(c byte) {
	switch {
	case c == esc:
		f.begin(escape)
	case c == can || c == sub: // they cancel a sequence
		f.state = ground
	case c < ' ':
		if isPlain[c] { // a VT executes a control in a sequence before the sequence
			f.passByte(c)
		}
	case c == del: // ignored
	case c >= utf8.RuneSelf: // terminals differ here, so the sequence has no effect
		f.state = ground
		f.groundByte(c)
	case f.state == csi:
		f.csiByte(c)
	default:
		f.escapeByte(c)
	}
}

// escapeByte reads a byte after ESC.
func (f *Writer) escapeByte(c byte) {
	switch {
	case c < '0': // an intermediate byte
		f.collect(c, maxCSI)
		f.state = escapeMid
		return
	case f.state == escape:
		switch c {
		case '[':
			f.begin(csi)
			return
		case ']', 'P', 'X', '^', '_', 'k': // OSC DCS SOS PM APC, and the title of screen
			f.begin(str)
			f.kind = c
			return
		}
	}
	f.state = ground
	if !f.long && allowedEscape(f.seq, c) {
		f.passSequence("\x1b", f.seq, string(c))
	}
}

func (f *Writer) csiByte(c byte) {
	if c < '@' {
		f.collect(c, maxCSI)
		return
	}
	f.state = ground
	if f.long {
		return
	}
	if params, ok := allowedCSI(f.seq, c); ok {
		f.passSequence("\x1b[", params, string(c))
	}
}

// stringByte reads a byte of a string. Only OSC and DCS are collected. BEL ends an OSC
// (xterm), and no other string.
func (f *Writer) stringByte(c byte) {
	switch {
	case c == esc:
		f.state = strEscape
		return
	case c == can || c == sub:
		f.begin(ground)
		return
	case c == bel && f.kind == ']':
		f.endString("\a")
		return
	}
	switch f.kind {
	case ']':
		f.collect(c, maxOSC)
		// OSC of a Linux console have no end: R resets the palette, P sets one
		// colour with seven digits (console_codes(4)).
		if f.seq[0] == 'R' || f.seq[0] == 'P' && len(f.seq) == 8 {
			f.begin(ground)
		}
	case 'P':
		limit := maxDCS
		if f.isPassthrough() {
			limit = maxOSC
		}
		f.collect(c, limit)
	}
}

// isPassthrough reports whether the string is a passthrough of tmux.
func (f *Writer) isPassthrough() bool {
	return f.kind == 'P' && strings.HasPrefix(string(f.seq[:min(len(f.seq), len(passthrough))]), passthrough)
}

// endString ends a string, and passes it if a rule allows it.
func (f *Writer) endString(terminator string) {
	if !f.long {
		switch f.kind {
		case ']':
			if body, ok := f.opts.allowedOSC(f.seq); ok {
				f.passSequence("\x1b]", body, terminator)
			}
		case 'P':
			// Device control strings answer with text of the guest (DECRQSS,
			// CVE-2008-2383; XTGETTCAP), define keys (DECUDK) and macros, draw with
			// Sixel (CVE-2022-24130), or make iTerm2 a client of tmux
			// (CVE-2019-9535). Only the begin and end of a synchronized update pass, and
			// text for the clipboard from a passthrough of tmux.
			if body := string(f.seq); body == "=1s" || body == "=2s" {
				f.passSequence("\x1bP", f.seq, terminator)
			} else if f.isPassthrough() {
				f.passClipboard(body[len(passthrough):])
			}
		}
		// The other strings never pass: APC has the graphics of kitty, which read and
		// delete files of the host (t=f, t=t) and answer with the name of the file
		// (CVE-2020-35605), and programs of screen; PM and SOS have no use;
		// ESC k sets the name of a window of screen and tmux, and is text elsewhere.
	}
	f.begin(ground)
}

// passClipboard passes a sequence of a passthrough of tmux, without the passthrough, if it
// writes to the clipboard. The terminal of the user need not be in tmux.
func (f *Writer) passClipboard(sequence string) {
	body, ok := strings.CutPrefix(sequence, "\x1b]")
	if !ok || !strings.HasPrefix(body, "52;") {
		return
	}
	for _, end := range []string{"\a", "\x1b\\"} {
		if command, ended := strings.CutSuffix(body, end); ended {
			if out, ok := f.opts.allowedOSC([]byte(command)); ok {
				f.passSequence("\x1b]", out, end)
			}
			return
		}
	}
}

// collect adds a byte to the sequence, up to limit bytes.
func (f *Writer) collect(c byte, limit int) {
	if f.long || len(f.seq) == limit {
		f.long = true
		return
	}
	f.seq = append(f.seq, c)
}

func (f *Writer) passSequence(intro string, body []byte, end string) {
	f.changes.note(intro, body, end)
	f.out = append(f.out, intro...)
	f.out = append(f.out, body...)
	f.out = append(f.out, end...)
	if len(f.out) >= maxOut {
		f.flush()
	}
}

func (f *Writer) passByte(c byte) { f.out = append(f.out, c) }

// pass writes text: directly if it is long.
func (f *Writer) pass(p []byte) {
	if len(f.out)+len(p) >= maxOut {
		f.flush()
	}
	if len(p) >= maxOut {
		f.write(p)
		return
	}
	f.out = append(f.out, p...)
}

func (f *Writer) flush() {
	if len(f.out) > 0 {
		f.write(f.out)
		f.out = f.out[:0]
	}
}

func (f *Writer) write(p []byte) {
	if f.err == nil {
		_, f.err = f.w.Write(p)
	}
}
