package work

import (
	"os"

	"golang.org/x/term"
)

// TerminalOf returns r as a file and reports whether it is a terminal.
func TerminalOf(r any) (*os.File, bool) {
	f, ok := r.(*os.File)
	if !ok {
		return nil, false
	}
	return f, term.IsTerminal(int(f.Fd()))
}
