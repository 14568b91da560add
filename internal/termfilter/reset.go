package termfilter

import (
	"bytes"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// modesSet are the modes that a terminal has set at its start, of those in privateModes
// and ansiModes (with ?).
var modesSet = []string{"?7", "?8", "?25", "?1035", "34"}

// modesKept are the modes that a reset leaves as they are: their default is a choice of
// the terminal or its user, and no program is confused by them.
var modesKept = []string{"?12", "?1007", "?1034", "?1036", "?1039", "?1048", "?2027"}

// screens are the modes of the alternate screen.
var screens = []string{"?1049", "?1047", "?47"}

// changes is how a terminal differs from its state before the guest wrote to it.
type changes struct {
	any     bool
	modes   map[string]bool // that do not have their default
	kitty   [2]int          // pushed flags of the keyboard, on the main and the alternate screen
	flags   [2]bool         // of the keyboard, set without a push
	keys    map[string]bool // resources of modified keys (XTMODKEYS)
	titles  int             // pushed
	colours map[string]bool // 4 (the palette), 10, 11 and 12

	keypad, margins, shape, protected, link, update bool
}

// maxPushed limits what a reset takes from a stack. Terminals have smaller stacks.
const maxPushed = 32

// screen is 1 on the alternate screen, else 0.
func (c *changes) screen() int {
	for _, m := range screens {
		if c.modes[m] {
			return 1
		}
	}
	return 0
}

// note records a sequence that passes.
func (c *changes) note(intro string, body []byte, end string) {
	c.any = true
	switch intro {
	case "\x1b[":
		c.control(body, end[0])
	case "\x1b":
		if len(body) == 0 && (end == "=" || end == ">") {
			c.keypad = end == "="
		}
	case "\x1b]":
		c.command(string(body))
	case "\x1bP":
		c.update = string(body) == "=1s"
	}
}

// control records a control sequence.
func (c *changes) control(body []byte, final byte) {
	if strings.IndexByte("hlrumntq", final) < 0 || final == 'm' && (len(body) == 0 || body[0] != '>') {
		return // most of them
	}
	prefix, params, mid := splitCSI(body)
	switch p := string(params); string(prefix) + string(mid) + string(final) {
	case "?h", "?l", "?r", "h", "l":
		for mode := range strings.SplitSeq(p, ";") {
			c.mode(string(prefix)+mode, final)
		}
	case "r":
		c.margins = p != ""
	case ">u":
		c.kitty[c.screen()] = min(c.kitty[c.screen()]+1, maxPushed)
	case "<u":
		n, err := strconv.Atoi(p)
		if err != nil || n == 0 {
			n = 1
		}
		c.kitty[c.screen()] = max(c.kitty[c.screen()]-n, 0)
	case "=u":
		c.flags[c.screen()] = true
	case ">m", ">n":
		if resource, _, _ := strings.Cut(p, ";"); len(resource) == 1 {
			c.keys = with(c.keys, resource, true)
		}
	case "t":
		switch {
		case strings.HasPrefix(p, "22"):
			c.titles = min(c.titles+1, maxPushed)
		case strings.HasPrefix(p, "23"):
			c.titles = max(c.titles-1, 0)
		}
	case " q":
		c.shape = true
	case "\"q":
		c.protected = true
	}
}

// mode records a mode that was set (h), reset (l) or restored to an unknown value (r).
func (c *changes) mode(mode string, final byte) {
	if !slices.Contains(modesKept, mode) {
		c.modes = with(c.modes, mode, final == 'r' || (final == 'h') != slices.Contains(modesSet, mode))
	}
}

// command records an operating system command.
func (c *changes) command(body string) {
	number, rest, _ := strings.Cut(body, ";")
	switch number {
	case "8":
		c.link = rest != ";"
	case "4", "10", "11", "12":
		if !strings.HasSuffix(rest, "?") {
			c.colours = with(c.colours, number, true)
		}
	}
}

func with(m map[string]bool, key string, value bool) map[string]bool {
	if m == nil {
		m = map[string]bool{}
	}
	m[key] = value
	return m
}

// Reset writes what restores the state that the terminal had before the guest wrote to
// it: the main screen and the modes of keyboard, mouse, cursor and colours, as far as
// what passed has changed them. The guest's program can have ended without doing that.
// Tab stops and a title that the guest did not save stay. A sequence that has not ended
// is dropped.
func (f *Writer) Reset() error {
	f.out = f.changes.undo(f.out)
	f.changes = changes{}
	f.begin(ground)
	f.flush()
	return f.err
}

func (c *changes) undo(out []byte) []byte {
	if !c.any {
		return out
	}
	b := bytes.NewBuffer(out)
	put := func(condition bool, sequence string) {
		if condition {
			b.WriteString(sequence)
		}
	}
	keyboard := func(screen int) {
		put(c.flags[screen], "\x1b[=0u")
		put(c.kitty[screen] > 0, "\x1b[<"+strconv.Itoa(c.kitty[screen])+"u")
	}
	put(c.update, "\x1bP=2s\x1b\\")
	alternate := c.screen()
	keyboard(alternate)
	modes := slices.Sorted(maps.Keys(c.modes))
	for _, mode := range modes {
		final := "l"
		if slices.Contains(modesSet, mode) {
			final = "h"
		}
		put(c.modes[mode] && !slices.Contains(screens, mode), "\x1b["+mode+final)
	}
	put(c.keypad, "\x1b>")
	put(c.shape, "\x1b[0 q")
	put(c.protected, "\x1b[0\"q")
	for _, resource := range slices.Sorted(maps.Keys(c.keys)) {
		put(true, "\x1b[>"+resource+"m")
	}
	put(true, strings.Repeat("\x1b[23;0t", c.titles))
	put(c.link, "\x1b]8;;\x1b\\")
	for _, number := range slices.Sorted(maps.Keys(c.colours)) {
		put(true, "\x1b]1"+strings.Repeat("0", 2-len(number))+number+"\x1b\\")
	}
	for _, mode := range screens {
		put(c.modes[mode], "\x1b["+mode+"l")
	}
	if alternate == 1 {
		keyboard(0)
	}
	put(c.margins, "\x1b7\x1b[r\x1b8") // r moves the cursor
	put(true, "\x1b[m\x1b(B\x0f")
	return b.Bytes()
}
