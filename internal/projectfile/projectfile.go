// Package projectfile checks the file .agentlab.yaml of a repository, which the runner
// reads in the guest and the CLI on the host.
package projectfile

import (
	"path"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/bmatcuk/doublestar/v4"

	"github.com/agentlab-vm/agentlab"
)

// Limits of the file.
const (
	Name       = ".agentlab.yaml"
	MaxBytes   = 64 << 10
	MaxOutputs = 100 // patterns

	maxPattern  = 512 // bytes
	maxServices = 256 // bytes
)

// CheckOutputs returns an error unless all patterns name files inside the repository.
// Codes: invalid, and limit for too many.
func CheckOutputs(patterns []string) error {
	if len(patterns) > MaxOutputs {
		return agentlab.Errorf(agentlab.CodeLimit, "%d patterns are more than %d", len(patterns), MaxOutputs)
	}
	for _, p := range patterns {
		if p == "" || len(p) > maxPattern || path.IsAbs(p) || strings.ContainsRune(p, 0) || slices.Contains(strings.Split(p, "/"), "..") || !doublestar.ValidatePattern(p) {
			return agentlab.Errorf(agentlab.CodeInvalid, "%.60q is not a pattern of files inside the repository", p).
				WithHint("patterns are relative to the top of the work tree; * matches in a directory, and ** in all below")
		}
	}
	return nil
}

// CheckServices returns an error unless name is that of a file inside the repository, or
// empty. Code: invalid.
func CheckServices(name string) error {
	if name != "" && (len(name) > maxServices || !filepath.IsLocal(name) || !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) || strings.HasPrefix(name, "-")) {
		return agentlab.Errorf(agentlab.CodeInvalid, "services: %.60q is not a file inside the repository", name).
			WithHint("name a Compose file, e.g. services: compose.yaml")
	}
	return nil
}
