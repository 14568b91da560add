// Package skills holds what coding agents on the host are told of AgentLab.
package skills

import "embed"

// FS holds a directory for each skill, with its SKILL.md.
//
//go:embed agentlab
var FS embed.FS
