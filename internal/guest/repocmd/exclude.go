package repocmd

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// The lines around the part of info/exclude with the files that the host sends.
const (
	sentBegin = "# Files that AgentLab has sent, until the end of this part:"
	sentEnd   = "# End of the files that AgentLab has sent."
)

// exclude has git ignore the directory of work trees, what a killed copy left and, unless it is nil, the files that
// the host sends, in place of those of the last call. They count as the agent's work
// otherwise. Lines of the agent stay.
func (r repo) exclude(sent []string) error {
	name := filepath.Join(r.dir, ".git", "info", "exclude")
	old, err := os.ReadFile(name)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	lines := strings.Split(strings.TrimSuffix(string(old), "\n"), "\n")
	if len(old) == 0 {
		lines = nil
	}
	for _, own := range []string{"/" + guestapi.WorktreesDir + "/", guestapi.FilesStage + "*/"} {
		if !slices.Contains(lines, own) {
			lines = append(lines, own)
		}
	}
	if sent != nil {
		begin, end := slices.Index(lines, sentBegin), slices.Index(lines, sentEnd)
		if begin >= 0 && end > begin {
			lines = slices.Delete(lines, begin, end+1)
		}
		if len(sent) > 0 {
			lines = append(lines, sentBegin)
			for _, name := range sent {
				if pattern, ok := excludePattern(name); ok {
					lines = append(lines, pattern)
				}
			}
			lines = append(lines, sentEnd)
		}
	}
	text := []byte(strings.Join(lines, "\n") + "\n")
	if bytes.Equal(text, old) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	return os.WriteFile(name, text, 0o644)
}

// excludePattern returns the pattern of git that matches only the file with a path. There
// is none for a path with the end of a line.
func excludePattern(path string) (pattern string, ok bool) {
	if path == "" || strings.ContainsAny(path, "\n\r\x00") {
		return "", false
	}
	return "/" + strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`, " ", `\ `).Replace(path), true
}
