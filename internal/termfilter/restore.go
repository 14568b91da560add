package termfilter

import (
	"fmt"
	"slices"
	"strings"
)

// restoredModes are the private modes that Restore sets back, in this order: the
// alternate screen last, because leaving it restores the cursor.
var restoredModes = []string{
	"2026", "9", "1000", "1002", "1003", "1004", "1005", "1006", "1015", "1016", "2004", "2031", "2048", "7727",
	"1", "5", "6", "7", "25", "66", "69", "47", "1047", "1049",
}

// onByDefault are the modes among them that a terminal begins with.
var onByDefault = []string{"7", "25"}

// changes are what the guest has changed in the terminal.
type changes struct {
	modes   map[string]bool // those that are not as the terminal begins
	margins bool            // of the area that scrolls
	keypad  bool            // application keypad
	shape   bool            // of the cursor
	keys    bool            // modified keys of xterm
	pushed  int             // modes of the keyboard of kitty
}

// noteCSI notes what a sequence that passes changes.
func (ch *changes) noteCSI(params []byte, final byte) {
	prefix, params, mid := splitCSI(params)
	switch key := string(prefix) + string(mid) + string(final); key {
	case "?h", "?l":
		for mode := range strings.SplitSeq(string(params), ";") {
			if ch.modes == nil {
				ch.modes = map[string]bool{}
			}
			ch.modes[mode] = (final == 'h') != slices.Contains(onByDefault, mode)
		}
	case "r":
		ch.margins = len(params) > 0
	case " q":
		ch.shape = true
	case ">m":
		ch.keys = true
	case ">u":
		ch.pushed++
	case "<u":
		ch.pushed = max(0, ch.pushed-1)
	}
}

// Restore sets back what the guest has changed in the terminal: the alternate screen,
// mouse, cursor, keyboard and colours. A guest whose connection ends, as when the user
// detaches, does not do that itself. The Writer can be used again after it.
func (f *Writer) Restore() error {
	f.begin(ground)
	ch := f.changes
	f.changes = changes{}
	out := "\x1b[m"
	add := func(changed bool, sequence string) {
		if changed {
			out += sequence
		}
	}
	add(ch.pushed > 0, fmt.Sprintf("\x1b[<%du", ch.pushed))
	add(ch.keys, "\x1b[>4m")
	add(ch.keypad, "\x1b>")
	add(ch.shape, "\x1b[0 q")
	add(ch.margins, "\x1b7\x1b[r\x1b8")
	for _, mode := range restoredModes {
		if final := "l"; ch.modes[mode] {
			if slices.Contains(onByDefault, mode) {
				final = "h"
			}
			out += "\x1b[?" + mode + final
		}
	}
	_, err := f.w.Write([]byte(out))
	return err
}
