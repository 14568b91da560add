package termfilter

import (
	"encoding/base64"
	"net/url"
	"strings"
	"unicode/utf8"

	"github.com/agentlab-vm/agentlab"
)

// Limits of an operating system command, in bytes.
const (
	maxTitle     = 256
	maxLink      = 2083 // VTE and iTerm2 ignore longer ones
	maxLinkID    = 250  // likewise
	maxClipboard = 100 << 10
	maxColour    = 64
	maxMark      = 256
)

// allowedOSC returns the operating system command that passes instead of body, which is
// between ESC ] and its end.
//
// Not passed, with the reason:
//
//	3                properties of windows of X
//	5, 13–19, 22     colours and shapes that programs do not use
//	7                the working directory, in which the terminal opens new windows
//	9, 99, 777       notifications: messages outside of the terminal in the user's name,
//	                 and commands of conemu; they started programs in kitty (CVE-2022-41322)
//	50               the font: xterm answers with text of the guest (CVE-2022-45063)
//	51               functions of Emacs and Vim
//	1337             iTerm2: transfers files, reads the clipboard, opens the browser
//	5522             reads the clipboard in kitty
//	l, L, I          titles and icons of dtterm; I reads a file
func (o Options) allowedOSC(body []byte) (out []byte, ok bool) {
	number, rest, more := strings.Cut(string(body), ";")
	switch number {
	case "0", "1", "2":
		return []byte(number + ";" + title(rest)), more
	}
	if hasControls(rest) {
		return nil, false
	}
	switch number {
	case "4":
		ok = more && palette(rest)
	case "10", "11", "12":
		ok = more && dynamicColours(number, rest)
	case "104":
		ok = !more || eachNumber(rest)
	case "110", "111", "112":
		ok = rest == ""
	case "8":
		return []byte("8;" + hyperlink(rest)), more
	case "52":
		ok = more && o.Clipboard && clipboard(rest)
	case "133":
		ok = more && promptMark(rest)
	}
	return body, ok
}

func hasControls(s string) bool {
	return !utf8.ValidString(s) || strings.ContainsFunc(s, agentlab.ControlsTerminal)
}

// title removes controls and invalid UTF-8 from a title, and shortens it. A terminal
// may report a title, log it or show it in menus, and shells use it in prompts.
func title(s string) string {
	s = strings.Map(func(r rune) rune {
		if r == utf8.RuneError || agentlab.ControlsTerminal(r) {
			return -1
		}
		return r
	}, s)
	if len(s) <= maxTitle {
		return s
	}
	n := maxTitle
	for !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// hyperlink returns the parameters and the address of OSC 8, or the end of a link if
// the address does not pass: the text stays, and does not become part of the link
// before it.
//
// A click on file: opens a file of the host, ssh: and others start programs with
// words of the guest (iTerm2 and x-man-page, CVE-2023-46321), and kitty's own schemes
// have further effects.
func hyperlink(rest string) string {
	params, address, ok := strings.Cut(rest, ";")
	if !ok || address == "" || len(address) > maxLink || !isGraphic(address) {
		return ";"
	}
	u, err := url.Parse(address)
	if err != nil {
		return ";"
	}
	switch strings.ToLower(u.Scheme) {
	case "http", "https":
		ok = u.Hostname() != ""
	case "mailto":
		// Mail programs attached files of the host (attach=, CVE-2020-4089), so only
		// the address passes.
		ok = u.RawQuery == "" && !u.ForceQuery
	default:
		ok = false
	}
	if !ok {
		return ";"
	}
	if !strings.HasPrefix(params, "id=") || len(params) > maxLinkID || !isGraphic(params) {
		params = ""
	}
	return params + ";" + address
}

// isGraphic reports whether s is ASCII without spaces and controls.
func isGraphic(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }) < 0
}

// clipboard reports whether a command writes text to the clipboard (c), the primary
// selection (p), or the terminal's choice of them (none, as tmux does it). It never
// reads them: "?" would type the user's clipboard into the guest. Cut buffers, and
// selections with other names, are not for text.
//
// Text with control characters does not pass: ESC [201~ would end a bracketed paste, and
// what follows it would be typed.
func clipboard(rest string) bool {
	selection, data, ok := strings.Cut(rest, ";")
	if !ok || strings.Trim(selection, "cp") != "" || len(selection) > 2 || data == "" || len(data) > maxClipboard {
		return false
	}
	text, err := base64.StdEncoding.Strict().DecodeString(data)
	if err != nil || !utf8.Valid(text) {
		return false
	}
	for _, r := range string(text) {
		if r != '\t' && r != '\n' && r != '\r' && (r < ' ' || r >= del && r < firstGraphic) {
			return false
		}
	}
	return true
}

// palette checks pairs of a number and a colour.
func palette(rest string) bool {
	words := strings.Split(rest, ";")
	for i := 0; i+1 < len(words); i += 2 {
		if !isNumber(words[i], 255) || !isColour(words[i+1]) {
			return false
		}
	}
	return len(words)%2 == 0
}

// dynamicColours checks the colours of the text, background and cursor: a command sets
// its own and those after it.
func dynamicColours(number, rest string) bool {
	words := strings.Split(rest, ";")
	if len(words) > int('3'-number[1]) {
		return false
	}
	for _, w := range words {
		if !isColour(w) {
			return false
		}
	}
	return true
}

func eachNumber(rest string) bool {
	if rest == "" {
		return true
	}
	for w := range strings.SplitSeq(rest, ";") {
		if !isNumber(w, 255) {
			return false
		}
	}
	return true
}

// isColour reports whether s is a name or value of a colour, or "?", which the terminal
// answers with its value.
func isColour(s string) bool {
	if s == "?" {
		return true
	}
	return s != "" && len(s) <= maxColour && strings.IndexFunc(s, func(r rune) bool {
		return !isWord(r) && !strings.ContainsRune("#:/.,% -", r)
	}) < 0
}

// promptMark reports whether s marks the begin or end of a prompt, a command or its
// output. Parameters are short words: some terminals show a
// command line that is in them.
func promptMark(s string) bool {
	return len(s) <= maxMark && s != "" && strings.IndexByte("ABCD", s[0]) >= 0 && (len(s) == 1 || s[1] == ';') &&
		strings.IndexFunc(s, func(r rune) bool { return !isWord(r) && !strings.ContainsRune(";=-._", r) }) < 0
}

func isWord(r rune) bool {
	return r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r == '_'
}
