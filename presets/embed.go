// Package presets holds the lists of hosts that profiles name as preset:NAME.
// Package internal/egress reads them.
package presets

import "embed"

// FS holds one file NAME.txt for each preset, in the form of a list file: one
// rule a line, comments after #. The first comment says what it is for.
//
//go:embed *.txt
var FS embed.FS
