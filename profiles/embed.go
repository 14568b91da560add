// Package profiles embeds the profiles that AgentLab ships.
package profiles

import "embed"

// FS holds one file NAME.yaml for each shipped profile.
//
//go:embed *.yaml
var FS embed.FS
