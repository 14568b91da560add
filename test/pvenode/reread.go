package pvenode

import (
	"strings"
	"unicode"
)

// reread returns a configuration as the node reads it back from its file: without
// white space at the end of the description and around all other values. A
// description that is only line feeds writes no line, so there is none.
func (s section) reread() section {
	out := section{}
	for k, val := range s {
		switch {
		case k == "description":
			if strings.Trim(val, "\n") != "" {
				out[k] = strings.TrimRightFunc(val, unicode.IsSpace)
			}
		case strings.TrimSpace(val) == "":
			out[k] = val
		default:
			out[k] = strings.TrimSpace(val)
		}
	}
	return out
}
