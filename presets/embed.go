// Package presets embeds the lists of hosts that profiles include as
// preset:NAME. Package internal/egress reads them.
package presets

import "embed"

// FS holds one file NAME.txt for each preset, in the format of a list file:
// one rule per line, comments after #. The first comment describes its
// purpose.
//
//go:embed *.txt
var FS embed.FS
