package termfilter

import (
	"bytes"
	"slices"
	"strconv"
	"strings"
)

// allowedEscape reports whether an ESC sequence of the intermediate bytes mid and the
// final byte passes.
func allowedEscape(mid []byte, final byte) bool {
	switch string(mid) {
	case "":
		// 7 8 save and restore the cursor, = > set the keypad, D E M move by a line,
		// H sets a tab stop, c resets the terminal. Not passed, among others:
		// Z asks for the identity in an obsolete form, and G (followed by Q) makes rxvt
		// answer with a line feed (CVE-2021-33477); N O n o change the meaning of the
		// bytes that follow, l m lock the memory of HP terminals.
		return strings.IndexByte("78=>DEMHc", final) >= 0
	case "(", ")", "*", "+":
		// Character sets: line drawing, British, ASCII, and that of a Linux console.
		return strings.IndexByte("0ABU", final) >= 0
	case "%":
		// G selects UTF-8. ESC % @ leaves it, and makes bytes inside of characters of
		// UTF-8 controls.
		return final == 'G'
	case " ":
		return final == 'F' // answers with 7-bit controls; G would be those of 8 bits
	}
	return false
}

// maxParam is the largest number in a control sequence. No screen is larger. Larger
// counts kept VTE and xterm busy (CVE-2012-2738).
const maxParam = 65535

// csiRules are the control sequences that pass, by their private prefix, intermediate
// bytes and final byte. A rule checks the parameters.
//
// Not in the list, with the reason:
//
//	i, ?i   print the screen to a printer or a program (media copy)
//	*y, ?n  checksums, with an identifier of the guest's choice (DECRQCRA, DECCKSR):
//	        they read the screen, also what other programs wrote to it
//	*z      run a macro (DECINVM)
//	"p      leave the conformance level, with 8-bit controls (DECSCL)
//	x y     obsolete reports and self-tests; &u, $w, 'w, '| further reports
//	#…      stacks and reports of titles and colours (XTPUSHTITLE, XTREPORTSGR)
//	>t, >T  titles in hexadecimal form, which titles' checks do not see (XTSMTITLE)
//	?S      graphics (XTSMGRAPHICS)
//	>p      hide the pointer
//	q       lamps of the keyboard; SP @, SP A and others that programs do not use
var csiRules = func() map[string]func(params string) bool {
	rules := map[string]func(string) bool{
		// Modes. ?…s and ?…r save and restore them; ?…$p and …$p ask whether they are
		// set, and the answer has only numbers (DECRQM; asked before synchronized
		// output is used).
		"h": nil, "l": nil, "?h": nil, "?l": nil, "?s": nil, "?r": nil, // see allowedModes
		"$p": single, "?$p": single,

		// Device attributes, the version of the terminal (XTVERSION) and the position
		// of the cursor: the answers do not contain text of the guest. tmux, vim and
		// the agents begin with them.
		"c": oneOf("", "0"), ">c": oneOf("", "0"), "=c": oneOf("", "0"), ">q": oneOf("", "0"),
		"n": oneOf("5", "6"), "?n": oneOf("6", "996"), // 996 asks whether colours are dark

		// Sizes of the window, and the stack of titles: 22 saves the title, 23 restores
		// it, without an answer. The others move and resize the window, or report the
		// title, which the guest can set, as typed text (20 and 21; CVE-2003-0063,
		// CVE-2010-2713, CVE-2024-56803).
		"t": oneOf("14", "16", "18", "14;2", "22", "23", "22;0", "22;1", "22;2", "23;0", "23;1", "23;2", "22;0;0", "23;0;0"),

		"T":  single,                  // scroll; with five parameters it starts highlighting with the mouse
		"!p": oneOf(""), " q": single, // soft reset; shape of the cursor
		// The keyboard of kitty: push, pop, set and ask; the modified keys of xterm:
		// set, disable and ask. The answers have only numbers.
		">u": numbers, "<u": numbers, "=u": numbers, "?u": oneOf(""),
		">m": numbers, ">n": numbers, "?m": numbers,
	}
	// Cursor, erase, insert and delete, scroll, tab stops, repetition, colours (also
	// with colons), margins, save and restore of the cursor.
	for _, final := range "@ABCDEFGHIJKLMPSXZ`abdefgmrsu" {
		rules[string(final)] = numbers
	}
	// Selective erase; protected characters; columns; copy, fill and erase rectangles.
	for _, k := range []string{"?J", "?K", "\"q", "'}", "'~", "$v", "$x", "$z", "${", "$r", "$t"} {
		rules[k] = numbers
	}
	return rules
}()

func numbers(string) bool { return true }

func single(params string) bool { return !strings.ContainsAny(params, ";:") }

func oneOf(list ...string) func(string) bool {
	return func(params string) bool { return slices.Contains(list, params) }
}

// allowedCSI returns the bytes between CSI and the final byte that pass. seq is what
// came there.
func allowedCSI(seq []byte, final byte) (out []byte, ok bool) {
	if len(seq) == 0 && final == 'm' || final == 'H' && len(seq) == 0 { // the most frequent ones
		return seq, true
	}
	prefix, params, mid := splitCSI(seq)
	if len(mid) > 1 || !validParams(params) {
		return nil, false
	}
	var buf [3]byte
	key := append(append(append(buf[:0], prefix...), mid...), final)
	rule, ok := csiRules[string(key)]
	if !ok {
		return nil, false
	}
	if rule == nil {
		return allowedModes(prefix, params, final)
	}
	return seq, rule(string(params))
}

// splitCSI splits a control sequence into its private prefix (one of < = > ?, or
// none), parameters and intermediate bytes (ECMA-48, section 5.4). Bytes in another
// order are in params or mid, where they are invalid.
func splitCSI(seq []byte) (prefix, params, mid []byte) {
	if len(seq) > 0 && seq[0] >= '<' {
		prefix, seq = seq[:1], seq[1:]
	}
	i := bytes.IndexFunc(seq, func(r rune) bool { return r < '0' })
	if i < 0 {
		i = len(seq)
	}
	return prefix, seq[:i], seq[i:]
}

// validParams reports whether params are numbers up to maxParam with ; and : between
// them.
func validParams(params []byte) bool {
	n := 0
	for _, c := range params {
		switch {
		case c == ';' || c == ':':
			n = 0
		case c >= '0' && c <= '9':
			if n = n*10 + int(c-'0'); n > maxParam {
				return false
			}
		default:
			return false
		}
	}
	return true
}

// privateModes are the modes that pass with CSI ? … h and l. Not in the list, with the
// reason:
//
//	2, 38      another parser: VT52 and Tektronix
//	3, 40      change the size of the window
//	18, 19     the printer
//	42         national character sets
//	80, 1070   Sixel
//	1001       xterm waits for the program until the mouse is highlighted, and hangs
//	1050–1061  function keys of other keyboards
//	9001       keys are sent in the format of Windows consoles
var privateModes = []string{
	"1", "4", "5", "6", "7", "8", "12", "25", // cursor keys, scrolling, colours, origin, wrap, repeat, cursor
	"9", "1000", "1002", "1003", "1004", "1005", "1006", "1007", "1015", "1016", // mouse and focus
	"45", "66", "67", "69", // reverse wrap, keypad, backspace key, left and right margins
	"47", "1047", "1048", "1049", // alternate screen
	"1034", "1035", "1036", "1039", "1042", "1045", // meta and alt keys, urgency on bell, reverse wrap
	"2004", "2026", "2027", "2031", "2048", // bracketed paste, synchronized output, graphemes, colour scheme, size
	"7727", // another sequence for the Escape key (mintty; tmux sets it)
}

// ansiModes are the modes that pass with CSI … h and l: insert, line feed, and the
// cursor of screen's terminal. 2 locks the keyboard and 12 its echo.
var ansiModes = []string{"4", "20", "34"}

// allowedModes returns the modes of a list that pass.
func allowedModes(prefix, params []byte, final byte) (out []byte, ok bool) {
	list := ansiModes
	if len(prefix) > 0 {
		list = privateModes
	}
	var pass []string
	for mode := range strings.SplitSeq(string(params), ";") {
		if slices.Contains(list, mode) {
			pass = append(pass, mode)
		}
	}
	return []byte(string(prefix) + strings.Join(pass, ";")), len(pass) > 0
}

// isNumber reports whether s is a number of at most limit.
func isNumber(s string, limit int) bool {
	n, err := strconv.ParseUint(s, 10, 16)
	return err == nil && int(n) <= limit && s[0] != '+'
}
