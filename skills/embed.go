// Package skills embeds the documentation of AgentLab for coding agents on the
// host.
package skills

import "embed"

// FS holds a directory for each skill, with its SKILL.md.
//
//go:embed agentlab
var FS embed.FS
